"""Nine kinds of races, each with a twin that has the missing edge: reported with both places, and not reported."""

import _thread
import os
import threading
import time
from collections.abc import Callable

import pytest
import torch

zero_sim = pytest.importorskip("zero_sim")

N = 1000
DEFAULT, HOST = "default stream of sim:0", "host thread MainThread"
DEVICE, PINNED = "device memory of sim:0", "pinned host memory"
Party = tuple[str, str]  # actor, part of what it did
Expected = tuple[str, str, Party, Party, str]  # kind of race, memory, now, before, part of what is missing


def name_of(stream: torch.Stream) -> str:
    return f"stream {stream.stream_id} of sim:0"


# Each function runs a program, with the edge that it needs if `ordered`, and returns what is reported without it.
def missing_wait(ordered: bool) -> Expected:
    x, side = torch.ones(N, device="sim"), torch.sim.Stream()
    if ordered:
        side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        x * 2
    missing = f"record an event on {DEFAULT} after 'aten::fill_'"
    return "read after write", DEVICE, (name_of(side), "aten::mul"), (DEFAULT, "aten::fill_"), missing


def wait_recorded_too_early(ordered: bool) -> Expected:
    x, side, event = torch.ones(N, device="sim"), torch.sim.Stream(), torch.sim.Event()
    event.record()
    x.mul_(3)
    if ordered:
        event.record()
    side.wait_event(event)
    with torch.sim.stream(side):
        x + 2
    missing = f"{name_of(side)} has waited for {DEFAULT} up to 'aten::fill_' only"
    return "read after write", DEVICE, (name_of(side), "aten::add"), (DEFAULT, "aten::mul_"), missing


def free_too_early(ordered: bool) -> Expected:
    zero_sim.configure(strict=True)
    x, side = torch.ones(N, device="sim"), torch.sim.Stream()
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        x * 2
    if ordered:
        x.record_stream(side)
    del x
    zero_sim.configure(strict=False)
    missing = f"record_stream with {name_of(side)}"
    return "write after read", DEVICE, (DEFAULT, "memory freed"), (name_of(side), "aten::mul"), missing


def reuse_across_streams(ordered: bool) -> Expected:
    x, side = torch.ones(N, device="sim"), torch.sim.Stream()
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        x * 2
    if ordered:
        x.record_stream(side)
    address = x.data_ptr()
    del x
    y = torch.empty(N, device="sim")
    assert ordered or y.data_ptr() == address
    missing = f"record_stream with {name_of(side)}"
    return "write after read", "freed at", (DEFAULT, "memory given out again"), (name_of(side), "aten::mul"), missing


def host_read_of_a_copy_in_flight(ordered: bool) -> Expected:
    x, pinned = torch.ones(N, device="sim"), torch.empty(N, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    if ordered:
        torch.sim.current_stream().synchronize()
    pinned.sum()
    return "read after write", PINNED, (HOST, "aten::sum"), (DEFAULT, "copy"), "(before.record_event().synchronize())"


def host_write_under_a_copy_in_flight(ordered: bool) -> Expected:
    x, pinned, event = torch.empty(N, device="sim"), torch.ones(N).pin_memory(), torch.sim.Event()
    x.copy_(pinned, non_blocking=True)
    event.record()
    if ordered:
        event.synchronize()
    pinned.fill_(2)
    return "write after read", PINNED, (HOST, "aten::fill_"), (DEFAULT, "copy"), f"waited for {DEFAULT}"


def early_reuse_of_pinned_memory(ordered: bool) -> Expected:
    x, pinned = torch.empty(N - 8, device="sim"), torch.ones(N).pin_memory()
    part = torch.from_numpy(pinned.numpy()[8:])  # the allocator does not know whose memory this is
    x.copy_(part, non_blocking=True)
    if ordered:
        torch.sim.synchronize()
    del part, pinned
    return "write after read", PINNED, (HOST, "pinned memory freed"), (DEFAULT, "copy"), f"waited for {DEFAULT}"


def collective_against_compute(ordered: bool) -> Expected:
    import torch.distributed as dist

    dist.init_process_group("simccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = torch.ones(N, device="sim")
        work = dist.all_reduce(x, async_op=True)
        if ordered:
            work.wait()
        x + 1
        work.wait()
        torch.sim.synchronize()
    finally:
        dist.destroy_process_group()
    missing = "wait for it before 'aten::add'."
    return "read after write", DEVICE, (DEFAULT, "aten::add"), ("stream ", "all_reduce"), missing


def two_host_threads(ordered: bool) -> Expected:
    pinned, written = torch.zeros(N, pin_memory=True), []

    def write() -> None:
        pinned.fill_(1)
        written.append(True)

    thread = threading.Thread(target=write, name="writer")
    thread.start()
    if ordered:
        thread.join()
    while not written:
        time.sleep(0)
    pinned.sum()
    thread.join()
    return "read after write", PINNED, (HOST, "aten::sum"), ("host thread writer", "aten::fill_"), "a join"


KINDS = [
    missing_wait,
    wait_recorded_too_early,
    free_too_early,
    reuse_across_streams,
    host_read_of_a_copy_in_flight,
    host_write_under_a_copy_in_flight,
    early_reuse_of_pinned_memory,
    collective_against_compute,
    two_host_threads,
]


every_kind = pytest.mark.parametrize("program", KINDS, ids=lambda kind: kind.__name__)


@every_kind
def test_a_program_with_its_edge_has_no_report(program: Callable[[bool], Expected]):
    program(True)
    assert zero_sim.take_races() == []


@every_kind
def test_the_same_program_without_the_edge_is_reported_with_both_places(
    program: Callable[[bool], Expected], request: pytest.FixtureRequest
):
    kind, memory, now, before, missing = program(False)
    (race,) = zero_sim.take_races()
    assert race.kind == kind and memory in race.memory and missing in race.missing
    for party, (actor, what) in ((race.now, now), (race.before, before)):
        assert party.actor.startswith(actor) and what in party.what
        assert f"{os.path.basename(__file__)}:" in party.site
    assert program.__name__ in race.now.site
    assert " < " not in race.now.site.split(f" in {request.function.__name__}")[1], "frames of whoever calls the test"
    assert str(race).count("\n") == 6


def test_a_race_is_told_once_for_each_pair_of_places():
    x, side = torch.ones(N, device="sim"), torch.sim.Stream()
    for _ in range(5):
        with torch.sim.stream(side):
            x * 2
        x.fill_(1)
    kinds = [race.kind for race in zero_sim.take_races()]
    assert sorted(kinds) == ["read after write", "read after write", "write after read"]  # after ones(), after fill_()
    assert zero_sim.take_races() == []


def test_detect_raises_what_happened_inside_and_keeps_what_happened_before():
    missing_wait(ordered=False)
    torch.sim.synchronize()
    with pytest.raises(zero_sim.RaceError, match="1 race was found") as error, zero_sim.detect():
        wait_recorded_too_early(ordered=False)
        torch.sim.synchronize()
    assert [race.before.what for race in error.value.races] == ["aten::mul_"]
    assert [race.before.what for race in zero_sim.take_races()] == ["aten::fill_"]
    with pytest.raises(ValueError, match="mine"), zero_sim.detect():  # an error stays as it is
        missing_wait(ordered=False)
        raise ValueError("mine")
    assert len(zero_sim.take_races()) == 1


def test_a_hook_of_backward_is_ordered_with_its_caller():
    """Fails if the edges between a caller of backward and autograd's own thread are missing, in either direction."""
    pinned = torch.zeros(N, pin_memory=True)
    x = torch.ones(N, device="sim", requires_grad=True)
    y = x * 2
    threads = []

    def hook(gradient: torch.Tensor) -> None:
        threads.append(_thread.get_ident())
        pinned.add_(1)

    y.register_hook(hook)
    pinned.fill_(1)
    y.sum().backward()
    pinned.sum()
    assert threads and threads[0] != _thread.get_ident(), "autograd ran the node in the caller's thread"
    assert zero_sim.take_races() == []


def test_memory_that_a_thread_waited_for_may_be_freed_by_another():
    """Reference counts are edges that nobody sees: fails if whoever drops the last one is taken for the user."""
    x, side = torch.ones(N, device="sim"), torch.sim.Stream()
    kept = [x]
    del x

    def use() -> None:
        side.wait_stream(torch.sim.default_stream(0))
        with torch.sim.stream(side):
            kept[0] * 2
        side.synchronize()

    thread = threading.Thread(target=use)
    thread.start()
    while thread.ident is None or _is_running(thread):
        time.sleep(0)
    kept.clear()
    torch.empty(N, device="sim")
    assert zero_sim.take_races() == []
    thread.join()


def _is_running(thread: threading.Thread) -> bool:
    """As thread.is_alive(), which would be an edge."""
    return thread.ident in {frame for frame in __import__("sys")._current_frames()}
