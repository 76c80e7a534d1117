"""Which device a run computes on: one that is asked for and that torch sees, else torch's accelerator, or the CPU.

And what a rank raises where it does not reach the others.
"""

from types import SimpleNamespace

import pytest
import torch

from zero_core.errors import CollectiveError
from zero_train.run.ranks import Ranks, device_type


@pytest.fixture
def accelerator(monkeypatch):
    """torch's accelerator, as these tests describe it."""

    def seen(kind, **module):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind is not None)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device(kind))
        found = SimpleNamespace(is_available=lambda: True, **module)
        monkeypatch.setattr(torch, "get_device_module", lambda device: found)

    return seen


def test_torchs_accelerator_is_taken_and_the_cpu_where_there_is_none(accelerator):
    accelerator("xpu", Stream=object)
    assert Ranks(local_rank=2).device == torch.device("xpu", 2)
    assert device_type("cpu") == "cpu"
    accelerator(None)
    assert Ranks(local_rank=2).device == torch.device("cpu")


@pytest.mark.promise("device-chosen")
def test_two_kinds_are_taken_only_where_they_are_asked_for(accelerator):
    accelerator("mps")  # without streams
    assert device_type(None) == "cpu"
    accelerator("xpu", Stream=object, simulated=True)
    assert device_type(None) == "cpu" and device_type("xpu") == "xpu"


def test_a_device_that_torch_does_not_see_is_not_taken():
    assert device_type("no-such-device") == device_type(None)


@pytest.mark.promise("machines-exit")
@pytest.mark.parametrize("call", ["mean", "most", "gather"])
def test_a_rank_that_does_not_reach_the_others_raises_an_error_of_ours(monkeypatch, call):
    """Fails if gloo's own RuntimeError escapes, which ends a run with a traceback."""

    def fails(*given, **named):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr("torch.distributed.all_gather_object", fails)
    with pytest.raises(CollectiveError, match="rank 1 of 2 did not reach the others: Connection closed by peer"):
        getattr(Ranks(1, 2, device_type="cpu"), call)(0)
