"""A run that was stopped or killed goes on as if it had not been: the same losses, the same bits."""

import pytest

from tests.integration.zero_train.helpers import killed, stopped_after, trained
from zero_train.report import picture

STEPS = 8
RUN = (f"run.steps={STEPS}", "run.checkpoint_every=3")


def numbers(folder):
    return [step.step for step in picture.read_steps(folder)]


@pytest.mark.promise("resume-placements")
@pytest.mark.parametrize("place", ["none", "host", "nvme"])
def test_after_ctrl_c_the_rest_is_the_same(tmp_path, place):
    whole = trained(tmp_path / "whole", f"offload={place}", *RUN)
    with stopped_after(4):
        stopped = trained(tmp_path / "run", f"offload={place}", *RUN)
    assert stopped.exit_code == 130 and len(stopped.losses) == 4
    rest = trained(tmp_path / "run", f"offload={place}", *RUN, "run.resume=auto")
    assert stopped.losses + rest.losses == whole.losses
    assert rest.digest == whole.digest
    assert numbers(tmp_path / "run") == list(range(1, STEPS + 1))


@pytest.mark.promise("resume-killed")
def test_after_kill_9_the_rest_is_the_same(tmp_path, interpreter):
    whole = trained(tmp_path / "whole", "offload=nvme", *RUN)
    killed(interpreter, tmp_path / "run", 5, "offload=nvme", *RUN)
    assert numbers(tmp_path / "run") == [1, 2, 3, 4, 5]
    rest = trained(tmp_path / "run", "offload=nvme", *RUN, "run.resume=auto")
    assert [step.step for step in rest.steps] == [4, 5, 6, 7, 8]  # from the checkpoint after step 3
    assert rest.losses == whole.losses[3:]
    assert rest.digest == whole.digest
    assert numbers(tmp_path / "run") == list(range(1, STEPS + 1))
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step_0000006", "step_0000008"]


def test_an_exported_model_streams_back_in(tmp_path):
    words = ("offload=nvme", "run.evaluate_every=5")
    first = trained(tmp_path / "first", *words, "run.export=true")
    again = trained(tmp_path / "again", *words, f"model.path={tmp_path / 'first' / 'pretrained'}", "run.steps=1")
    assert again.validation[0][1] == pytest.approx(first.validation[-1][1], abs=1e-3)
    assert first.validation[-1][1] < first.validation[0][1] - 0.1
