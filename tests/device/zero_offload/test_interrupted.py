"""Exceptions and Ctrl-C while copies are under way: what goes on has the same bits, and nothing is freed under a copy.

Fails if what was begun ahead is forgotten instead of waited for, or if close() gives memory back before the lanes are
empty.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.device.zero_core.runs import differing, loss_of
from tests.device.zero_offload import runs
from zero_offload.streams import Streams, streams_of

pytestmark = pytest.mark.promise("device-exceptions")

GPU = (512, 8, 64)
STORES = ["device store", "swapping", "host", "nvme", "classic", "thirds"]


def made(device: torch.device, store: str, **options: Any) -> runs.Run:
    return runs.Run(device, runs.placed(device, store), runs.sized(device, GPU, (64, 6, 512)), **options)


def ends_in(run: runs.Run, where: str, error: type[BaseException]) -> None:
    """A forward or a backward that raises in the fourth of six blocks."""
    block = run.model.blocks[3]

    def stop(*_: Any) -> None:
        raise error("stopped by the test")

    if where == "forward":
        handle = block.register_forward_pre_hook(stop)
    else:
        handle = block.register_forward_hook(lambda module, args, output: output.register_hook(stop) and None)
    try:
        with pytest.raises(error):
            loss_of(run.model, run.batches[3]).backward()
    finally:
        handle.remove()
    run.optimizer.zero_grad()


def trained(device: torch.device, store: str, interrupt: Callable[[runs.Run], None], **options: Any) -> list[Tensor]:
    with runs.discrete(device):
        run = made(device, store, **options)
        seen: list[Tensor] = []
        for number in range(3):
            interrupt(run)  # while the update of the step before goes on
            seen += run.step(number)
        seen = [loss.cpu() for loss in seen] + run.masters()
        run.close()
    return seen


@pytest.fixture(scope="module")
def expected(device):
    made: dict[tuple[str, str], list[Tensor]] = {}

    def of(store: str, activations: str) -> list[Tensor]:
        if (store, activations) not in made:
            made[store, activations] = trained(device, store, lambda run: None, activations=activations)
        return made[store, activations]

    return of


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("store", STORES)
def test_training_goes_on_with_the_same_bits(device, expected, store, where, error):
    found = trained(device, store, lambda run: ends_in(run, where, error))
    assert not differing(found, expected(store, "keep"))


class Interrupted:
    """Streams in which one copy is queued and then ends in Ctrl-C."""

    def __init__(self, streams: Streams, at: int) -> None:
        self._streams, self._left = streams, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._streams, name)

    def copy(self, *args: Any, **options: Any) -> Any:
        mark = self._streams.copy(*args, **options)
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
        return mark


@pytest.mark.parametrize("at", [1, 2, 5, 9, 14, 20, 27, 35])
@pytest.mark.parametrize("store", ["host", "classic", "thirds"])
def test_after_ctrl_c_at_a_copy_everything_can_be_closed(device, needs_device, store, at):
    """In the training thread or one of the store's: then the store says so, and close() waits for what is under way."""
    needs_device("a copy")
    make = streams_of(device)
    placement = (runs.BELOW | runs.MIXED)[store]
    tiers = runs.tiered(placement, streams=lambda host: Interrupted(make(host), at))
    run = None
    try:
        run = runs.Run(device, tiers, runs.sized(device, GPU), activations="host" if store == "host" else "keep")
        for number in range(3):
            run.step(number)
        pytest.fail(f"{at} copies were not reached")
    except KeyboardInterrupt:
        pass
    except Exception as error:  # of the thread that was interrupted, as the training thread learns it
        assert isinstance(error.__cause__ or error, KeyboardInterrupt | RuntimeError), error
    for call in (run.offloaded.close, run.optimizer.close) if run is not None else (tiers.close,):
        try:
            call()
        except (Exception, KeyboardInterrupt) as error:
            assert isinstance(error.__cause__ or error, KeyboardInterrupt | RuntimeError), error
    del run, tiers
    values = torch.full((1 << 16,), 3.0, device=device)  # memory that was theirs
    assert float(values.sum()) == 3.0 * (1 << 16)
