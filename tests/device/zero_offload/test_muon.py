"""Optimizers that need whole matrices, kept elsewhere and updated on the device: the bits of plain torch on it.

Fails if the arithmetic runs on the host, if a tile is read before it came to the device or kept before it came back,
if the plan does not count the memory that it comes into, or if any of that memory is kept.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_core
from examples.soap import SOAP
from tests.device.zero_core.runs import Wide, device_of_rank, differing, loss_of
from tests.device.zero_core.test_memory import allocated, forward_keeps, warm_up
from tests.device.zero_offload import runs
from tests.reference import Reference
from tests.unit.zero_offload.harness import LateStep
from zero_offload import Hardware, TieredStore, TorchStep, plan, step_for

pytestmark = [
    pytest.mark.promise("whole-on-gpu"),
    pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon"),
]

GPU, SMALL = (512, 4, 64), (64, 3, 16)
CLASSES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "muon": lambda matrices: torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1),
    "soap": lambda matrices: SOAP(matrices, lr=0.01, frequency=2),
}
PLACES = ["host", "nvme", "classic nvme", "half"]


def pair(parameters: Any, kind: str = "muon") -> torch.optim.Optimizer:
    """One of the above for the matrices, and for the rest SGD in powers of two, which host and device round alike."""
    parameters = list(parameters)
    others = [p for p in parameters if p.ndim != 2]
    rest = torch.optim.SGD(others, lr=2**-6, momentum=0.5)
    return zero_core.JointOptimizer(CLASSES[kind]([p for p in parameters if p.ndim == 2]), rest)


def options(kind: str, dtype: torch.dtype | None) -> dict[str, Any]:
    return {"build": partial(pair, kind=kind), "param_dtype": dtype, "max_grad_norm": None}


@contextmanager
def seen(monkeypatch: pytest.MonkeyPatch, kind: str) -> Iterator[list[tuple[int, set[str]]]]:
    """Of each matrix that the class steps: its elements, and the devices of parameter, gradient and states."""
    cls: Any = torch.optim.Muon if kind == "muon" else SOAP
    step, found = cls.step, list[tuple[int, set[str]]]()

    def watched(self: Any, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            kinds = {p.device.type, p.grad.device.type, *(v.device.type for v in self.state[p].values() if v.dim())}
            found.append((p.numel(), kinds))
        return step(self, closure)

    with monkeypatch.context() as patched:
        patched.setattr(cls, "step", watched)
        yield found


def plain(device: torch.device, sized: runs.Sized, kind: str, dtype: torch.dtype | None) -> list[Tensor]:
    width, blocks, rows = sized
    torch.manual_seed(1)
    model = Wide(width, blocks).to(device)
    reference = Reference(model, partial(pair, kind=kind), param_dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    batches = [torch.randn(rows, width, generator=generator).to(device, dtype or torch.float32) for _ in range(4)]
    for number in range(runs.STEPS):
        reference.step([batches[number]], loss_of)
    return [master.detach().cpu() for master in reference.masters]


@pytest.mark.parametrize("dtype", [torch.bfloat16, None], ids=str)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", CLASSES)
def test_the_bits_are_those_of_plain_torch_on_the_device(device, monkeypatch, kind, place, dtype):
    sized = runs.sized(device, GPU, SMALL)
    expected = plain(device, sized, kind, dtype)
    with runs.discrete(device):
        run = runs.Run(device, (runs.BELOW | runs.MIXED)[place], sized, **options(kind, dtype))
        with seen(monkeypatch, kind) as stepped:
            for number in range(runs.STEPS):
                run.step(number)
            run.store.wait()
        masters = run.masters()
        run.close()
    assert len(stepped) == runs.STEPS * 2 * sized[1]
    assert {numel for numel, _ in stepped} == {4 * sized[0] ** 2}
    assert all(kinds == {device.type} for _, kinds in stepped)
    assert not differing(masters, expected)


@pytest.mark.parametrize(
    "more",
    [{"accumulate": 2}, {"max_grad_norm": 0.1}, {"reduce_dtype": torch.float32}, {"update_in_backward": True}],
    ids=str,
)
@pytest.mark.parametrize("kind", CLASSES)
def test_whatever_becomes_of_gradients_the_bits_are_those_of_a_run_without_overlap(device, kind, more):
    sized = runs.sized(device, GPU, SMALL)
    given = {**options(kind, torch.bfloat16), **more}
    masters = slice(-len(list(Wide(8, sized[1]).parameters())), None)  # an update in backward is seen by evaluations
    expected = runs.history(device, "host", sized, tiers={"overlap": False}, prefetch_bytes=0, **given)[masters]
    for place in ("nvme", "classic"):
        found = runs.history(device, runs.BELOW[place], sized, **given)[masters]
        assert not differing(found, expected), place


@pytest.mark.parametrize("place", ["host", "nvme"])
def test_a_rate_that_is_a_tensor_on_the_device_is_read_as_it_was_at_the_step(device, place):
    """The compute stream writes it, also anew once step() has returned; matrices are updated on another stream."""
    sized = runs.sized(device, GPU, SMALL)
    rates = torch.tensor([0.02 / (number + 1) for number in range(runs.STEPS)])

    def trained(on_device: bool) -> list[Tensor]:
        with runs.discrete(device):
            run = runs.Run(device, runs.BELOW[place], sized, **options("muon", torch.bfloat16))
            group = run.optimizer.param_groups[0]
            rate = torch.zeros((), device=device)
            for number in range(runs.STEPS):
                group["lr"] = rate.copy_(rates[number]) if on_device else rates[number].clone()
                run.step(number)
                rate.fill_(3.0)
            masters = run.masters()
            run.close()
        return masters

    assert not differing(trained(on_device=True), trained(on_device=False))


@pytest.mark.parametrize("place", ["host", "nvme"])
def test_beside_a_step_with_tiles_under_way_the_bits_are_the_same(device, place):
    """Matrices come to the device while tiles of the elementwise step, started before them, have not ended."""
    given = options("muon", torch.bfloat16)
    expected = runs.history(device, place, SMALL, tiers={"overlap": False}, **given)
    step = LateStep("fp32")
    assert not differing(runs.history(device, place, SMALL, tiers={"step": step}, **given), expected)
    assert step.most > 0


def on_ranks(kind: str, optimizer: str) -> dict[str, list[int]]:
    device = device_of_rank(kind)
    given = {**options(optimizer, torch.bfloat16), "reduce_dtype": torch.float32}
    with runs.small_tiles(device):
        first = runs.history(device, "host", SMALL, tiers={"overlap": False}, **given)
        found = {place: runs.history(device, runs.BELOW[place], SMALL, **given) for place in PLACES[:3]}
        return {place: differing(each, first) for place, each in found.items()}


@pytest.mark.parametrize("kind", CLASSES)
def test_owners_on_several_ranks(device, device_ranks, needs_device, kind):
    needs_device("a device for each rank")
    for found in device_ranks.run(on_ranks, device.type, kind):
        assert found == dict.fromkeys(PLACES[:3], [])


@pytest.mark.promise("soap")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", CLASSES)
def test_the_device_holds_what_was_planned_and_keeps_none_of_it(device, needs_device, kind, dtype):
    """One matrix is most of what the device has at once, so a plan without what it comes into would be too small."""
    width, blocks, rows = runs.sized(device, (1024, 4, 8), (256, 1, 8))
    x = torch.randn(rows, width, device=device, dtype=dtype)
    warm_up(width, x)
    model = Wide(width, blocks)
    step = step_for(pair(model.parameters(), kind), TorchStep("fp32"))
    kinds = dict.fromkeys(runs.KINDS, "host")
    hardware = Hardware(device=device.type, device_gib=60, host_gib=60, nvme_gib=60)
    figures = plan(
        model, hardware, **kinds, step=step, prefetch_bytes=1, parameter_dtype=dtype, tile_numel=runs.tile_numel()
    )
    kept = forward_keeps(model.to(device, dtype), x)
    del model
    with runs.discrete(device):
        before = allocated(device)
        store = TieredStore(plan=figures, nvme=runs.MemoryByteStore(), step=TorchStep("fp32"), streams=runs.streams())
        run = runs.Run(device, store, (width, blocks, rows), prefetch_bytes=1, **options(kind, dtype))
        assert store.describe().device_scratch_bytes == figures.store.device_scratch_bytes
        assert store.describe().scratch_bytes == 0
        run.step()
        store.wait()
        between = allocated(device)

        def whole() -> None:
            run.step(1)
            store.wait()

        held, peak = runs.stats_of(device, whole)
        batches = sum(batch.nbytes for batch in run.batches)
        run.step(2)
        store.wait()
        needs_device("bytes allocated")
        gc.collect()
        assert allocated(device) <= between + 512 * 2 * blocks, "what a matrix was updated in is kept"
        run.close()
    scratch, planned = figures.store.device_scratch_bytes, figures.total("device")
    matrix = 4 * width * width
    assert scratch >= (4 + 4 + 4 + 4) * matrix  # gradient, master, momentum, and what the class has
    assert peak - before - batches <= planned + 2 * kept
    assert held == between
    assert 0.55 * scratch <= peak - held <= scratch
