"""torch.optim.Muon for matrices and AdamW for the rest, on every tier: the bits of plain torch on one rank.

The plain run is `Reference`: the optimizers' own classes over whole fp32 masters, gradients clipped before the step.
Beside Muon it has zero_optim_cpu's AdamW, whose bits CpuStep has on the tiers; torch's own AdamW rounds otherwise.
"""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("zero_optim_cpu")

import zero_core
import zero_optim_cpu
from examples.soap import SOAP
from tests import kit
from tests.chunks import TILE, small_chunks
from tests.integration.zero_offload.training import Model
from tests.reference import Reference
from tests.unit.zero_offload import simulated
from zero_core.store import Segment
from zero_offload import MemoryByteStore, TieredStore, plan, step_for
from zero_offload.protocols import TileView, UpdateSegment
from zero_offload.uncut_step import UncutStep

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")

HALF = {"host": 0.5, "nvme": 0.5}
STEPS, WIDTH, VOCABULARY = 3, 96, 400  # matrices of 2.25 tiles, and an embedding that is cut in 3
PLACES: dict[str, Any] = {
    "none": None,
    "host": ("host", "host", "host"),
    "nvme": ("nvme", "nvme", "nvme"),
    "mixed": ("nvme", "host", HALF),
    "halves": (HALF, HALF, HALF),
    # On a discrete device, with copies that come as late as they may.
    "homes": ("device", "host", "nvme"),
    "whole": ("device", {"device": 0.5, "host": 0.5}, {"device": 0.5, "host": 0.5}),
}
DISCRETE = ("homes", "whole")


@dataclass(frozen=True)
class Run:
    """One run on every rank. muon: options of `kind`, which is torch.optim.Muon by default."""

    place: str = "host"
    stage: int = 3
    clip: float | None = 0.5
    dtype: torch.dtype | None = None
    accumulate: int = 1
    tile: int = TILE
    overlap: bool = True
    muon: tuple[tuple[str, Any], ...] = ()
    in_backward: bool = False
    kind: Any = None


def built() -> nn.Module:
    torch.manual_seed(0)
    return Model(WIDTH, 2, VOCABULARY)


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Or a stack of them."""
    return parameter.ndim > 1 and "layers" in name


def pair(named: Any, muon: Any = (), kind: Any = None) -> list[torch.optim.Optimizer]:
    """As a user writes it, over (name, parameter): `kind` for matrices inside, and AdamW for the rest."""
    named, kind = list(named), kind or torch.optim.Muon
    matrices = [p for name, p in named if is_matrix(name, p)]
    others = [p for name, p in named if not is_matrix(name, p)]
    options = {"lr": 0.01, "frequency": 2} if issubclass(kind, SOAP) else {"lr": 0.02, "weight_decay": 0.1}
    return [kind(matrices, **{**options, **dict(muon)}), zero_optim_cpu.AdamW(others, lr=3e-3, threads=1)]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def tokens_of(step: int, rank: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(100 * step + rank))


def own_loss_of(model: nn.Module, number: int) -> Tensor:
    """Of this rank's batch of that number."""
    return loss_of(model, tokens_of(number, kit.world()[0]))


def store_of(run: Run, disk: Any = None) -> TieredStore | None:
    if PLACES[run.place] is None:
        return None
    step = zero_optim_cpu.CpuStep(threads=1)
    nvme = disk or MemoryByteStore()
    streams = None
    if run.place in DISCRETE:
        with simulated.simulated_device():
            streams = simulated.streams()
    return TieredStore(
        *PLACES[run.place], nvme=nvme, step=step, tile_numel=run.tile, overlap=run.overlap, streams=streams
    )


def sharded(run: Run, model: nn.Module, optimizers: Any, **options: Any) -> Any:
    return zero_core.shard(
        model,
        optimizers,
        stage=run.stage,
        store=options.pop("store", None) or store_of(run),
        param_dtype=run.dtype,
        reduce_dtype=torch.float32,
        max_grad_norm=run.clip,
        update_in_backward=run.in_backward,
        **options,
    )


def steps(optimizer: Any, model: nn.Module, first: int, last: int, run: Run = Run()) -> None:
    for step in range(first, last):
        for part in range(run.accumulate):
            (own_loss_of(model, run.accumulate * step + part) / run.accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()


def begun(run: Run) -> tuple[nn.Module, Any]:
    model = built()
    return model, sharded(run, model, pair(model.named_parameters(), run.muon, run.kind))


def train(run: Run) -> dict[str, Tensor]:
    """fp32 masters after STEPS."""
    with small_chunks():
        model, optimizer = begun(run)
        steps(optimizer, model, 0, STEPS, run)
        masters = kit.named_values(model, master=True)
        optimizer.close()
    return masters


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def states_of(model: nn.Module, names: Any = ("momentum_buffer",)) -> dict[str, Tensor]:
    """Whole masters, and states of matrices."""
    inside = [(name, p) for name, p in model.named_parameters() if is_matrix(name, p)]
    states: Any = {f"{name}.{state}": zero_core.full_state(p, state) for name, p in inside for state in names}
    return kit.named_values(model, master=True) | states


def plain(run: Run, size: int = 1) -> dict[str, Tensor]:
    """The same without shards: masters of a dense model that is given all batches."""
    model = built()
    names = [name for name, _ in model.named_parameters()]

    def both(masters: Any) -> torch.optim.Optimizer:
        return zero_core.JointOptimizer(*pair(zip(names, masters, strict=True), run.muon, run.kind))

    reference = Reference(model, both, param_dtype=run.dtype, max_grad_norm=run.clip)
    for step in range(STEPS):
        parts = range(run.accumulate * step, run.accumulate * (step + 1))
        reference.step([tokens_of(part, rank) for part in parts for rank in range(size)], loss_of)
    return {name: master.detach() for name, master in zip(names, reference.masters, strict=True)}


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    return [name for name in theirs if not torch.equal(ours[name], theirs[name])]


NESTEROV = (("nesterov", False), ("ns_steps", 3), ("ns_coefficients", (2.0, -1.5, 0.5)))
SOAPS = [
    *(Run(place, dtype=torch.bfloat16, kind=SOAP) for place in PLACES),
    *(Run(place, kind=SOAP, muon=options) for place in ("none", "nvme") for options in ((), (("max_side", WIDTH),))),
]
RUNS = [
    *(Run(place, stage) for place in ("none", "host") for stage in (0, 1, 2, 3)),
    *(Run(place) for place in ("nvme", "mixed", "halves")),
    *(Run(place, dtype=torch.bfloat16) for place in PLACES),
    *(Run(place) for place in DISCRETE),
    *(Run(place, accumulate=2) for place in ("none", "nvme", "whole")),
    Run("nvme", tile=4 * TILE),
    Run("halves", tile=64 * TILE, overlap=False),
    Run("mixed", clip=None, in_backward=True),
    Run("none", muon=NESTEROV),
    Run("nvme", muon=(*NESTEROV, ("adjust_lr_fn", "match_rms_adamw"), ("momentum", 0.8), ("weight_decay", 0.0))),
]


@pytest.mark.promise("muon-bits", "soap", "needs-whole")
@pytest.mark.parametrize("run", RUNS + SOAPS, ids=str)
def test_one_rank_has_the_bits_of_plain_torch(run: Run) -> None:
    assert not apart(train(run), plain(run))


@pytest.mark.promise("muon-bits")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("place", ["none", "host"])
def test_ranks_that_have_all_states_have_its_bits_too(ranks: Any, size: int, place: str) -> None:
    expected = plain(Run(), size)
    for ours in ranks(size).run(train, Run(place, stage=0)):
        assert not apart(ours, expected)


# -- shared with the tests of several ranks, of experts and of other optimizers ----------------------------------------


def fed(run: Run, model: nn.Module, shard: Any, loss_of: Any = own_loss_of, no_sync: bool = False) -> list[str]:
    """What differs from plain optimizers over whole masters, which step with the gradients that our ranks have."""
    with small_chunks():
        masters = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
        both, optimizer = zero_core.JointOptimizer(*pair(masters.items(), run.muon, run.kind)), shard()
        for step in range(STEPS):
            for part in range(run.accumulate):
                with zero_core.no_sync(model) if no_sync and part + 1 < run.accumulate else nullcontext():
                    (loss_of(model, run.accumulate * step + part) / run.accumulate).backward()
            for name, parameter in model.named_parameters():
                masters[name].grad = zero_core.full_gradient(parameter)
            optimizer.step()
            factor = 1.0 if run.clip is None else min(1.0, run.clip / (optimizer.grad_norm + 1e-6))
            for master in masters.values():
                master.grad.mul_(factor)  # type: ignore[union-attr]
            both.step()
            optimizer.zero_grad()
        ours = states_of(model)
        optimizer.close()
    theirs = {name: master.detach() for name, master in masters.items()}
    states = both.optimizers[0].state
    momenta = {
        f"{name}.momentum_buffer": states[m]["momentum_buffer"] for name, m in masters.items() if is_matrix(name, m)
    }
    return apart(ours, theirs | momenta)


def durable(disk: Any, run: Run = Run(), model: Any = None, **options: Any) -> tuple[nn.Module, Any, Any]:
    """A model in a durable store on `disk`, gone on from what is there."""
    model = model or built()
    step = zero_optim_cpu.CpuStep(threads=1)
    store = TieredStore("nvme", "host", HALF, nvme=disk, step=step, tile_numel=TILE, durable=True)
    both = pair(model.named_parameters(), run.muon, run.kind)
    optimizer = zero_core.shard(model, both, store=store, max_grad_norm=run.clip, **options)
    return model, optimizer, zero_core.resume(model, optimizer)


def as_planned(run: Run, model: nn.Module, optimizers: Any, **options: Any) -> tuple[Any, Any, Any]:
    """A plan, what the store of the same run describes, which holds the same, and the run's optimizer."""
    placed: dict[str, Any] = dict(zip(("parameters", "gradients", "optimizer"), PLACES[run.place], strict=True))
    step = step_for(zero_core.JointOptimizer(*optimizers), zero_optim_cpu.CpuStep(threads=1))
    rank, size = kit.world()
    planned = plan(
        model, step=step, shard_count=size, rank=rank, stage=run.stage, tile_numel=run.tile,
        parameter_dtype=run.dtype or torch.float32, reduce_dtype=torch.float32, **placed, **options,
    )  # fmt: skip
    store = store_of(run)
    optimizer = sharded(run, model, optimizers, store=store, **options)
    held = store.describe()  # type: ignore[union-attr]
    assert held.held == planned.store.held and held.arena_bytes == planned.store.arena_bytes
    return planned, held, optimizer


# -- what it takes -----------------------------------------------------------------------------------------------------


def live_bytes(call: Callable[[], None]) -> int:
    """Most bytes of tensors that the call has at once, beside those from before it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = sorted(
        (e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()
    )
    live = list(itertools.accumulate(e.nbytes() for e in events))
    return max(live) - min(0, live[0])


UPDATES = [
    *(("Muon", shape, torch.float32) for shape in ((512, 1024), (768, 768), (1024, 256))),
    *(("Muon", shape, torch.bfloat16) for shape in ((512, 1024), (768, 768), (1024, 256))),
    *(("SOAP", shape, torch.bfloat16) for shape in ((256, 512), (384, 384), (512, 128))),
]


@pytest.mark.promise("whole-is-one-tile", "soap")
@pytest.mark.parametrize("kind, shape, dtype", UPDATES)
def test_an_update_takes_the_memory_that_the_plan_says(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrix = nn.Parameter(torch.zeros(shape))
    optimizer = torch.optim.Muon([matrix]) if kind == "Muon" else SOAP([matrix], frequency=1)
    step = step_for(optimizer, zero_optim_cpu.CpuStep())
    assert isinstance(step, UncutStep)
    segment = Segment(0, matrix.numel(), 0, "matrix", shape, uncut=True)
    fields = step.uncut_layout(segment, matrix.numel(), dtype)
    sides = sum(field.numel for field in fields if field.name.startswith(("left", "right")))
    assert sides == (0 if kind == "Muon" else 2 * sum(side**2 for side in shape))
    states = {f.name: torch.zeros(f.numel, dtype=f.dtype) for f in fields}
    tile = TileView(states, torch.zeros(matrix.numel(), dtype=dtype), torch.randn(matrix.numel()).to(dtype), segment)
    options = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}

    def update(count: int) -> None:
        step.update(tile, [UpdateSegment(0, matrix.numel(), options, count, shape)], 0.5)

    update(1)  # oneDNN keeps what its first call makes
    peak = max(live_bytes(lambda count=count: update(count)) for count in (1, 2, 3))
    least = 0.45 if kind == "Muon" else 0.6
    assert least * step.scratch_bytes(0, shape) <= peak <= step.scratch_bytes(0, shape)
