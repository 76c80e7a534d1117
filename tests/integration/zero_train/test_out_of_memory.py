"""A device that is full in the middle of a run, by a stand-in that raises what torch raises.

Fails if the run ends with a traceback or without the plan's advice, or if what it did before is lost.
"""

import json

import pytest
import torch

from tests.integration.zero_train.helpers import COMMON, left, trained
from zero_train.errors import RunError
from zero_train.run import assemble, loop, planning
from zero_train.run.ranks import Ranks
from zero_train.settings import compose

MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. "
    "GPU 0 has a total capacity of 139.72 GiB of which 1.00 GiB is free."
    " Of the allocated memory 130.00 GiB is allocated by PyTorch, and 5.00 GiB is reserved by PyTorch but unallocated."
)


@pytest.fixture
def full_at(monkeypatch):
    """`full_at(n)`: the n-th forward finds no room."""

    def at(number):
        real, calls = loop.loss_of, []

        def loss(*arguments):
            calls.append(0)
            if len(calls) == number:
                raise torch.OutOfMemoryError(MESSAGE)
            return real(*arguments)

        monkeypatch.setattr(loop, "loss_of", loss)

    return at


def test_a_run_says_what_the_plan_gave_and_leaves_what_it_has_done(full_at, tmp_path):
    full_at(3)
    with pytest.raises(RunError) as caught:
        trained(tmp_path / "run", "offload=host", "run.micro_batch=4")
    text = str(caught.value)
    assert text.startswith(
        "the run stopped: out of memory on the host tier: 2.0 GiB more were asked for; 130.0 GiB are"
    )
    assert "the plan gave it " in text and "lower it with PYTORCH_CUDA_ALLOC_CONF=" in text
    assert "offload.optimizer=nvme" in text and "run.micro_batch" in text
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert "timeline.json" in left(tmp_path / "run")


WAYS = ("run.micro_batch=1", "data.sequence_length=16", "offload.activations=recompute", "offload=nvme offload.slots=3")


@pytest.mark.parametrize("way", WAYS)
def test_memory_that_runs_out_before_the_first_step_has_ways_out_that_need_less(monkeypatch, tmp_path, way):
    def full(*_, **__):
        raise torch.OutOfMemoryError(MESSAGE)

    def memory(*words):
        given = compose.compose([*COMMON, f"run.dir={tmp_path / 'run'}", "offload=none", *words])
        plan = planning.make(given, assemble.model_of(given), Ranks(), None)
        return plan.total("device") + plan.total("host")

    with monkeypatch.context() as patch, pytest.raises(RunError) as caught:
        patch.setattr(assemble, "make_store", full)
        trained(tmp_path / "run", "offload=none", "run.micro_batch=4")
    assert str(caught.value).endswith(
        "; lower run.micro_batch or data.sequence_length, set offload.activations=recompute, or put more on nvme with "
        "offload=nvme offload.slots=3"
    )
    assert memory("run.micro_batch=4", *way.split()) < memory("run.micro_batch=4")
    assert trained(tmp_path / "other", "offload=none", "run.micro_batch=4", *way.split()).losses
