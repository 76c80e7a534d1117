"""run.durable: a run that is killed goes on from its last step, and what it keeps goes when the run has ended well."""

import pytest

import zero_offload
from tests.integration.zero_train.helpers import killed, trained
from zero_train.errors import ConfigError
from zero_train.report import picture
from zero_train.run import assemble
from zero_train.settings import placement

pytestmark = pytest.mark.promise("train-durable")

RUN = ("run.steps=8", "run.durable=power")


def slabs(folder):
    return sorted(path.name for path in folder.rglob("*.slab"))


@pytest.mark.parametrize("place", ["nvme", "host"])
def test_a_killed_run_goes_on_from_its_last_step(tmp_path, interpreter, capsys, place):
    whole = trained(tmp_path / "whole", f"offload={place}", "run.steps=8")
    killed(interpreter, tmp_path / "run", 5, *RUN, f"offload={place}")
    assert len(slabs(tmp_path / "run")) == 1
    rest = trained(tmp_path / "run", f"offload={place}", *RUN, "run.resume=auto")
    said = " ".join(capsys.readouterr().out.split())
    assert "continuing after step 4, the last on nvme" in said or "continuing after step 5, the last on nvme" in said
    assert rest.losses == whole.losses[-len(rest.losses) :] and rest.digest == whole.digest
    assert [step.step for step in picture.read_steps(tmp_path / "run")] == list(range(1, 9))
    assert len(slabs(tmp_path / "run")) == 1  # there is no checkpoint, so it is all that the run has left
    again = trained(tmp_path / "run", f"offload={place}", *RUN, "run.resume=auto")
    assert not again.losses and again.digest == whole.digest
    longer = trained(tmp_path / "run", f"offload={place}", *RUN, "run.steps=9", "run.resume=auto")
    said = " ".join(capsys.readouterr().out.split())
    assert len(longer.losses) == 1 and "differs from the run that it continues: run.steps=9 (was 8)" in said


def test_a_run_that_ends_with_a_checkpoint_removes_its_slab(tmp_path):
    done = trained(tmp_path / "run", "offload=nvme", *RUN, "run.checkpoint_every=4")
    assert done.exit_code == 0 and not slabs(tmp_path)
    again = ("run.steps=9", "run.durable=power", "run.resume=auto", "run.checkpoint_every=4")
    rest = trained(tmp_path / "run", "offload=nvme", *again)
    assert len(rest.losses) == 1  # from the checkpoint, as there is no slab


def test_another_run_is_refused_and_the_way_out_works(tmp_path, interpreter):
    folder = tmp_path / "run"
    killed(interpreter, folder, 5, *RUN, "offload=nvme")
    kept = [path.read_bytes() for path in folder.rglob("*.slab")]

    def refused(match, *overrides):
        with pytest.raises(ConfigError, match=match):
            trained(folder, "offload=nvme", *RUN, *overrides)
        assert [path.read_bytes() for path in folder.rglob("*.slab")] == kept

    refused(r"run.dir=.* holds a run")
    refused(r"holds another run \(run.seed=0, now 1\)", "run.seed=1", "run.resume=auto")
    for path in [path for path in folder.iterdir() if ".slab" not in path.name]:
        path.unlink()
    refused(r"has durable steps up to [45] \(.*run.resume=auto, name another folder with run.dir")
    refused(
        r"are another run's \(run.seed=0, now 1\); set run.seed=0, or name another", "run.seed=1", "run.resume=auto"
    )
    assert trained(folder, "offload=nvme", *RUN, "run.resume=auto").exit_code == 0


@pytest.mark.promise("durable-elsewhere")
@pytest.mark.parametrize("now", [("offload.tile_numel=2097152", "run.durable=power"), ("run.durable=null",)], ids=str)
def test_a_run_goes_on_on_other_ranks_and_without_a_slab(tmp_path, interpreter, capsys, now):
    """By a checkpoint that is written of its slab, which goes. Here: in other tiles, as other ranks sum otherwise."""
    whole = trained(tmp_path / "whole", "offload=nvme", "run.steps=8")
    killed(interpreter, tmp_path / "run", 5, *RUN, "offload=nvme")
    rest = trained(tmp_path / "run", "offload=nvme", "run.steps=8", *now, "run.resume=auto")
    said = " ".join(capsys.readouterr().out.split())
    assert "they are a checkpoint now" in said and "continuing after step" in said
    assert 3 <= len(rest.losses) <= 4
    assert rest.losses == whole.losses[-len(rest.losses) :] and rest.digest == whole.digest
    assert len(slabs(tmp_path / "run")) == ("run.durable=power" in now)


@pytest.mark.promise("durable-no-room")
def test_a_disk_without_room_for_both_places_is_refused(tmp_path, monkeypatch):
    """Before anything is written. The slab that the run has there already counts as room."""
    run = ("offload=nvme", "run.steps=2", "run.durable=power")
    free = placement.free_bytes
    monkeypatch.setattr(placement, "free_bytes", lambda folder: 2 << 20)
    with pytest.raises(ConfigError, match=r"larger disk .* Or set run.durable=null, which halves the room"):
        trained(tmp_path / "run", *run)
    assert not slabs(tmp_path)
    assert trained(tmp_path / "run", "offload=nvme", "run.steps=2", "run.durable=null").exit_code == 0
    monkeypatch.setattr(placement, "free_bytes", free)
    assert trained(tmp_path / "kept", *run).exit_code == 0 and slabs(tmp_path / "kept")
    monkeypatch.setattr(placement, "free_bytes", lambda folder: 2 << 20)
    assert trained(tmp_path / "kept", *run, "run.resume=auto").exit_code == 0


@pytest.mark.promise("durable-elsewhere")
def test_steps_that_cannot_become_a_checkpoint_are_left(tmp_path, interpreter, monkeypatch):
    folder = tmp_path / "run"
    killed(interpreter, folder, 5, *RUN, "offload=nvme")
    kept = [path.read_bytes() for path in folder.rglob("*.slab")]
    others = ("run.steps=8", "run.resume=auto", "run.durable=null")
    with monkeypatch.context() as patched:
        patched.setattr(assemble, "find_spec", lambda name: None)  # as on a GPU, or without zero-optim-cpu
        with pytest.raises(ConfigError, match=r"are in slabs, .* choose offload=host or offload=nvme"):
            trained(folder, "offload=none", *others)

    def full(*given, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(zero_offload, "write_checkpoint", full)
        with pytest.raises(ConfigError, match=r"No space left.*; make room, start the run as it was, on 1 ranks"):
            trained(folder, "offload=nvme", *others)
    assert [path.read_bytes() for path in folder.rglob("*.slab")] == kept
    assert trained(folder, "offload=nvme", *RUN, "run.resume=auto").exit_code == 0
