"""Which runs do not go on after a Trainer's steps on disk, and what cannot be kept: refused, and the way out works."""

import shutil

import pytest
import torch

import zero_core
import zero_hf
from zero_hf import ConfigError, ZeroConfig
from zero_offload import TieredStore
from zero_offload.errors import GenerationError

from .durable_runs import GIVEN, durable, frozen, gone_on, interrupted, llama_0, model, plain, refused, slabs
from .trainers import Sharded, llama, rows, train, trainer

OTHERS = {
    "rate": ({"learning_rate": 1e-3}, "learning_rate was 0.01, is 0.001"),
    "rows": ({"train_dataset": rows(11, seed=3)}, "train_dataset was 11 rows"),
    "fewer rows": ({"train_dataset": rows(10)}, "is 10 rows"),
    "dtype": ({"bf16": True}, "bf16 was False, is True"),
}


@pytest.mark.advice("To begin a new run, name another output_dir")
@pytest.mark.promise("durable-trainer-refused")
@pytest.mark.parametrize("other", OTHERS)
def test_another_run_in_the_same_folder_is_refused_and_the_steps_stay(tmp_path, other):
    interrupted(tmp_path, 5)
    given, said = OTHERS[other]
    refused(tmp_path, f"has steps of a run with other settings .*{said}", **given)
    _, elsewhere = train(Sharded, tmp_path / "another", model(), zero=durable(tmp_path), **GIVEN | given)
    assert elsewhere.losses
    _, later = gone_on(tmp_path)  # set back
    assert len(later.losses) == 4


def test_the_files_that_are_named_may_be_removed(tmp_path):
    interrupted(tmp_path, 5)
    for path in (tmp_path / "drive").iterdir():
        path.unlink()
    _, later = gone_on(tmp_path, learning_rate=1e-3)
    assert len(later.losses) == 8


@pytest.mark.promise("durable-trainer")
def test_a_checkpoint_that_is_not_made_leaves_the_steps(tmp_path):
    interrupted(tmp_path, 5, build=frozen)
    others = durable(tmp_path, tile_numel=2 << 20)
    said = r"has steps of a run with other settings \(learning_rate was 0.01, is 0.001\)"
    refused(tmp_path, said, frozen, others, learning_rate=1e-3)
    assert [path.name for path in (tmp_path / "run").iterdir()] == []
    _, later = gone_on(tmp_path, build=lambda seed: frozen())
    assert len(later.losses) == 4


@pytest.mark.promise("durable-trainer-refused")
def test_another_model_is_refused(tmp_path):
    interrupted(tmp_path, 5)
    refused(tmp_path, "a run with another model", lambda: llama(hidden_size=48), error=GenerationError)


def test_what_changes_no_number_may_change(tmp_path):
    """How often a Trainer logs is in its state, and stays as it was."""
    interrupted(tmp_path, 5)
    _, later = gone_on(tmp_path, logging_steps=2, save_steps=3, run_name="another", eval_steps=4)
    assert len(later.losses) == 4


@pytest.mark.promise("durable-trainer-refused")
def test_what_does_not_go_with_it_is_refused(tmp_path):
    for given, said in (
        ({"model_init": llama_0}, "model_init= cannot be used with durable.*give the Trainer the model"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True cannot be used .*set per_device_train_batch_size"),
    ):
        refused(tmp_path, said, **given)
    made, _ = gone_on(tmp_path)
    with pytest.raises(ConfigError, match="a second train.*another output_dir"):
        made.train()
    made.end()
    other, logs = train(Sharded, tmp_path / "another", model(), zero=durable(tmp_path), **GIVEN)
    assert len(logs.losses) == 8
    other.end()
    made, _ = trainer(Sharded, tmp_path / "run", model(), zero=durable(tmp_path), **GIVEN | {"train_dataset": None})
    made.evaluate()
    made.train_dataset = rows(11)
    with pytest.raises(ConfigError, match="sharded for evaluation alone.* when it is built"):
        made.train()
    made.end()
    made, _ = gone_on(tmp_path)  # with its train_dataset
    assert made.state.global_step == 8


@pytest.mark.advice("resume_from_checkpoint out to continue after that step")
@pytest.mark.parametrize("way_out", ["left out", "removed"])
def test_another_checkpoint_is_refused(tmp_path, way_out):
    """Also where the steps were left in other tiles."""
    saving = {"save_strategy": "steps", "save_steps": 4}
    _, logs = train(Sharded, tmp_path / "other", frozen(), zero=plain(tmp_path), **GIVEN | saving)
    elsewhere = str(tmp_path / "other" / "checkpoint-4")
    interrupted(tmp_path, 6, build=frozen)
    said = r"other/checkpoint-4, but the last step of this run is in run-.*slab in"
    refused(tmp_path, said, frozen, resume=elsewhere).end()
    tiles = durable(tmp_path, tile_numel=2 << 20)
    refused(tmp_path, r"the last step of this run is in .*run/checkpoint-5: leave", frozen, tiles, elsewhere).end()
    if way_out == "removed":
        shutil.rmtree(tmp_path / "run" / "checkpoint-5")
        _, later = gone_on(tmp_path, build=lambda seed: frozen(), zero=tiles, resume=elsewhere)
        assert later.losses == logs.losses[4:]
    else:
        _, later = gone_on(tmp_path, build=lambda seed: frozen(), zero=tiles)
        assert later.losses == logs.losses[5:]


def test_a_loop_gives_the_files_a_name(tmp_path):
    zero = ZeroConfig(**durable(tmp_path))
    with pytest.raises(
        ConfigError,
        match=r"In a loop of your own, pass slab_name= to zero_hf.shard, too, and then call zero_core.resume",
    ):
        zero_hf.Accelerator(zero=zero, cpu=True).prepare(built := model(), torch.optim.AdamW(built.parameters()))
    for step in (0, 1):
        built = model()
        run = zero_hf.shard(built, torch.optim.AdamW(built.parameters()), zero, slab_name="mine")
        assert zero_core.resume(built, run.optimizer).step == step
        assert "\neach step stays on disk, in " in run.describe()
        batch = torch.stack([row["input_ids"] for row in rows(2)])
        built(input_ids=batch, labels=batch).loss.backward()
        run.optimizer.step()
        zero_core.commit(built)
        run.close()
    assert slabs(tmp_path) == ["mine.slab"]


@pytest.mark.promise("durable-trainer-refused")
def test_two_trainers_of_one_folder_are_refused(tmp_path):
    made, _ = gone_on(tmp_path)
    refused(tmp_path, "in use by this process")
    made.end()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"durable": "always", "offload": "host"}, "durable='always': choose one of None, 'power', 'process'"),
        ({"durable": "power"}, "nothing is offloaded: .*name a folder on a disk"),
        ({"durable": "power", "offload": "host"}, "nvme_paths is empty"),
    ],
)
def test_settings_that_keep_nothing_are_refused(tmp_path, given, said):
    with pytest.raises(ConfigError, match=said):
        ZeroConfig(**given)
    made, _ = gone_on(tmp_path, zero=durable(tmp_path, "power", offload="host"))
    assert len(slabs(tmp_path)) == 1
    made.end()


@pytest.mark.parametrize("kind", ["power", "process"])
def test_what_survives_is_what_the_setting_says(tmp_path, kind, monkeypatch):
    found, of = [], TieredStore.__init__
    monkeypatch.setattr(TieredStore, "__init__", lambda s, *a, **k: found.append(k["durable"]) or of(s, *a, **k))
    made, _ = gone_on(tmp_path, zero=durable(tmp_path, kind))
    made.end()
    assert found == [True if kind == "power" else "process"]
