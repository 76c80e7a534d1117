"""Streams, threads and devices that are the user's choice: the same bits as on the device's own stream.

The user orders his streams as torch asks him to; everything else is ours to order. Fails if a wait is put on the
device's default stream, or on the stream of another thread or device, instead of the caller's.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_core
from tests.device.zero_core.runs import BLOCKS, Wide, differing, loss_of
from tests.device.zero_offload import runs

GPU = (512, 8, 64)
STORES = ["device store", "swapping", "host", "classic", "thirds"]


class OneStream:
    """How a user runs a step: on the stream that is current."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.module = device, torch.get_device_module(device)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        yield

    def backward(self, loss: Tensor) -> None:
        loss.backward()


class OwnStream(OneStream):
    """All steps on a stream of the user's."""

    streams = 1

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.own = [self.module.Stream(device) for _ in range(self.streams)]

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        stream, before = self.own[number % self.streams], self.module.current_stream(self.device)
        stream.wait_stream(before)
        with self.module.stream(stream):
            yield
        before.wait_stream(stream)


class AlternatingStreams(OwnStream):
    """Each step on the other of two streams."""

    streams = 2


class BackwardInAnother(OwnStream):
    """Forward and step on the current stream, backward called in another."""

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        yield

    def backward(self, loss: Tensor) -> None:
        with super().step(0):
            loss.backward()


class BackwardFromAThread(OneStream):
    """Backward called by another thread, whose current device and streams are the defaults."""

    def backward(self, loss: Tensor) -> None:
        raised: list[BaseException] = []

        def work() -> None:
            try:
                self.module.set_device(self.device)
                loss.backward()
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if raised:
            raise raised[0]


def trained(device: torch.device, store: str, within: OneStream, **options: Any) -> list[Tensor]:
    """Losses, evaluations and masters; the host waits for nothing but the norm before the end."""
    run = runs.Run(device, runs.placed(device, store), runs.sized(device, GPU), **options)
    seen = []
    for number in range(runs.STEPS):
        with within.step(number):
            loss = loss_of(run.model, run.batches[number % 4])
            within.backward(loss)
            with torch.no_grad():
                seen += [loss.detach(), run.model(run.batches[0])]
            run.optimizer.step()
            run.optimizer.zero_grad()
    seen = [each.cpu() for each in seen] + run.masters()
    run.close()
    return seen


@pytest.fixture(scope="module")
def expected(device):
    """`expected(store)`: on the device's own stream."""
    made: dict[str, list[Tensor]] = {}

    def of(store: str) -> list[Tensor]:
        if store not in made:
            made[store] = trained(device, store, OneStream(device))
        return made[store]

    return of


@pytest.mark.promise("device-streams")
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("within", [OwnStream, AlternatingStreams, BackwardInAnother, BackwardFromAThread])
def test_the_users_streams_and_threads_change_nothing(device, needs_device, expected, within, store):
    needs_device("a stream")
    assert not differing(trained(device, store, within(device)), expected(store))


@pytest.mark.promise("device-streams")
@pytest.mark.parametrize("store", STORES)
def test_a_second_device_while_the_first_is_current(device, needs_device, expected, store):
    needs_device("a second device")
    module = torch.get_device_module(device)
    if module.device_count() < 2:
        pytest.skip(f"one {device.type} device")
    second = torch.device(device.type, (device.index + 1) % module.device_count())
    found = trained(second, store, OneStream(second))
    assert module.current_device() == device.index
    assert not differing(found, expected(store))


def test_homes_in_memory_that_queued_kernels_still_use(device, needs_device):
    """Fails if parameters are copied to the device before what its memory was used for last has ended.

    A model in host memory gives no kernel to wait for: the first copies are queued while the device is still busy.
    """
    needs_device("an allocator that gives memory away in stream order")
    module = torch.get_device_module(device)
    model = Wide(64, BLOCKS)
    used = [torch.empty(each.numel(), device=device) for each in model.parameters()]
    module._sleep(500_000_000)
    for each in used:
        each.fill_(float("nan"))
    del used, each
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    values = [each.detach().clone() for each in model.parameters()]
    sharded = zero_core.shard(model, optimizer, store=runs.tiered(runs.classic("host")), device=device)
    with zero_core.gathered(model):
        assert not differing([each.detach().cpu() for each in model.parameters()], values)
    sharded.close()
