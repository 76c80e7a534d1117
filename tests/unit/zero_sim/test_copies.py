"""Copies: asynchronous exactly where CUDA's are, the right bits whatever types, strides and devices are involved."""

import itertools
from collections.abc import Callable

import pytest
import torch

zero_sim = pytest.importorskip("zero_sim", exc_type=ImportError)

LATE_US = 30_000


def returns_early(work: Callable[[], object]) -> bool:
    """Returns whether the call comes back while the stream still has its work to do."""
    torch.sim.synchronize()
    zero_sim.configure(latency_us=LATE_US)
    try:
        work()
        return not torch.sim.current_stream().query()
    finally:
        zero_sim.configure(latency_us=0)
        torch.sim.synchronize()


@pytest.mark.parametrize(
    ("what", "asynchronous"),
    [
        ("up from pageable memory", False),
        ("up from pageable memory, non_blocking", True),  # staged: the source may be changed at once
        ("up from pinned memory", False),
        ("up from pinned memory, non_blocking", True),
        ("down to pageable memory", False),
        ("down to pageable memory, non_blocking", False),  # a driver returns from it when the bytes are there
        ("down to pinned memory", False),
        ("down to pinned memory, non_blocking", True),
        ("within the device", True),
        ("to another device", True),
        ("up with another type, non_blocking", True),  # converted on the device
        ("up with another type", False),
        ("down from a transposed matrix to pinned memory, non_blocking", True),  # packed on the device
        ("down to every second element of pinned memory, non_blocking", False),  # through pageable memory
    ],
)
def test_the_host_waits_where_it_does_on_cuda(what: str, asynchronous: bool):
    """Fails if a copy blocks that CUDA queues, which would hide races, or one returns early that CUDA waits for."""
    non_blocking = "non_blocking" in what
    device, host = torch.ones(8, 8, device="sim"), torch.ones(8, 8)
    if "pinned" in what:
        host = host.pin_memory()
    if what.startswith("within"):
        work = lambda: torch.empty_like(device).copy_(device)  # noqa: E731
    elif what.startswith("to another"):
        work = lambda: torch.empty(8, 8, device="sim:1").copy_(device)  # noqa: E731
    elif what.startswith("up"):
        into = device.double() if "type" in what else device
        work = lambda: into.copy_(host, non_blocking=non_blocking)  # noqa: E731
    else:
        source = device.t() if "transposed" in what else device
        target = torch.empty(8, 16).pin_memory()[:, ::2] if "second" in what else host
        work = lambda: target.copy_(source, non_blocking=non_blocking)  # noqa: E731
    assert returns_early(work) == asynchronous


@pytest.mark.parametrize(("pinned", "copied", "races"), [(False, 1.0, []), (True, 7.0, ["write after read"])])
def test_a_pinned_source_is_read_when_the_copy_runs_and_another_at_the_call(pinned, copied, races):
    """As on a GPU: and the detector says so."""
    source, into = torch.ones(64, pin_memory=pinned), torch.zeros(64, device="sim")
    zero_sim.configure(latency_us=10 * LATE_US)
    into.copy_(source, non_blocking=True)
    source.fill_(7)
    assert into.tolist() == [copied] * 64
    assert [race.kind for race in zero_sim.take_races()] == races


PLACES = ["pageable", "pinned", "sim:0", "sim:1"]


def placed(tensor: torch.Tensor, place: str) -> torch.Tensor:
    """Returns a copy with the same strides, gaps included."""
    base = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8)
    base = base.pin_memory() if place == "pinned" else base if place == "pageable" else base.to(place)
    made = base.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    made.copy_(tensor)
    return made


@pytest.mark.parametrize("non_blocking", [False, True], ids=["blocking", "non_blocking"])
def test_every_kind_of_copy_has_the_cpus_bits(non_blocking: bool):
    """Fails if a type, a stride, an offset, a broadcast or a conjugate bit is lost on any way between two places."""
    plain = torch.arange(48.0).view(6, 8) / 7
    sources = [plain, plain.t(), plain[1:, ::2], plain[:, 3], plain[2, 3], plain[:0], plain.bfloat16(), plain.long()]
    sources += [torch.complex(plain, plain).conj(), plain > 3]
    zero_sim.configure(jitter_us=50)
    for source, a, b in itertools.product(sources, PLACES, PLACES):
        if "sim" not in a + b:
            continue
        for dtype in {source.dtype, torch.float32} if not source.is_complex() else {source.dtype}:
            for target in (torch.zeros(source.shape, dtype=dtype), torch.zeros(source.shape[::-1], dtype=dtype).t()):
                expected = target.clone().copy_(source)
                into, given = placed(target, b), placed(source, a)
                into.copy_(given, non_blocking=non_blocking)
                zero_sim.races.synchronize()
                assert torch.equal(into.cpu(), expected), (source.shape, source.dtype, a, b, dtype)
    row = torch.zeros(5, 8, device="sim").copy_(plain[0])
    assert torch.equal(row.cpu(), plain[0].expand(5, 8))
    assert not zero_sim.take_races()
