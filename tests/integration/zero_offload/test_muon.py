"""torch.optim.Muon for matrices and AdamW for the rest, on every tier: the bits of plain torch on one rank.

The plain run is `Reference`: the optimizers' own classes over whole fp32 masters, gradients clipped before the step.
Beside Muon it has zero_optim_cpu's AdamW, whose bits CpuStep has on the tiers; torch's own AdamW rounds otherwise.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("zero_optim_cpu")

import zero_core
import zero_optim_cpu
from tests import kit
from tests.chunks import TILE, small_chunks
from tests.integration.zero_offload.training import Model
from tests.reference import Reference
from tests.unit.zero_offload import simulated
from zero_core import checkpoint
from zero_core.store import Segment
from zero_offload import MemoryByteStore, TieredStore, step_for
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
    """One run on every rank; `muon`: options of it."""

    place: str = "host"
    stage: int = 3
    clip: float | None = 0.5
    dtype: torch.dtype | None = None
    accumulate: int = 1
    tile: int = TILE
    overlap: bool = True
    muon: tuple[tuple[str, Any], ...] = ()
    in_backward: bool = False


def built() -> nn.Module:
    torch.manual_seed(0)
    return Model(WIDTH, 2, VOCABULARY)


def is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and name.startswith("layers")


def pair(named: Any, muon: Any = ()) -> list[torch.optim.Optimizer]:
    """As a user writes it, over (name, parameter)."""
    named = list(named)
    matrices = [p for name, p in named if is_matrix(name, p)]
    others = [p for name, p in named if not is_matrix(name, p)]
    options = {"lr": 0.02, "weight_decay": 0.1, **dict(muon)}
    return [torch.optim.Muon(matrices, **options), zero_optim_cpu.AdamW(others, lr=3e-3, threads=1)]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def tokens_of(step: int, rank: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(100 * step + rank))


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
    rank = kit.world()[0]
    for step in range(first, last):
        for part in range(run.accumulate):
            (loss_of(model, tokens_of(run.accumulate * step + part, rank)) / run.accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()


def train(run: Run) -> dict[str, Tensor]:
    """fp32 masters after STEPS."""
    with small_chunks():
        model = built()
        optimizer = sharded(run, model, pair(model.named_parameters(), run.muon))
        steps(optimizer, model, 0, STEPS, run)
        masters = kit.named_values(model, master=True)
        optimizer.close()
    return masters


def plain(run: Run, size: int = 1, optimizers_of: Any = pair) -> dict[str, Tensor]:
    """The same without shards: masters of a dense model that is given all batches."""
    model = built()
    names = [name for name, _ in model.named_parameters()]
    reference = Reference(
        model,
        lambda masters: zero_core.JointOptimizer(*optimizers_of(zip(names, masters, strict=True), run.muon)),
        param_dtype=run.dtype,
        max_grad_norm=run.clip,
    )
    for step in range(STEPS):
        parts = range(run.accumulate * step, run.accumulate * (step + 1))
        reference.step([tokens_of(part, rank) for part in parts for rank in range(size)], loss_of)
    return {name: master.detach() for name, master in zip(names, reference.masters, strict=True)}


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    return [name for name in theirs if not torch.equal(ours[name], theirs[name])]


NESTEROV = (("nesterov", False), ("ns_steps", 3), ("ns_coefficients", (2.0, -1.5, 0.5)))
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


@pytest.mark.promise("muon-bits")
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_one_rank_has_the_bits_of_plain_torch(run: Run) -> None:
    assert not apart(train(run), plain(run))


@pytest.mark.promise("muon-bits")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("place", ["none", "host"])
def test_ranks_that_have_all_states_have_its_bits_too(ranks: Any, size: int, place: str) -> None:
    expected = plain(Run(), size)
    for ours in ranks(size).run(train, Run(place, stage=0)):
        assert not apart(ours, expected)


# -- states from before, and for later ---------------------------------------------------------------------------------


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.promise("muon-states")
def test_a_checkpoint_has_of_each_parameter_what_its_optimizer_keeps(tmp_path: Any) -> None:
    with small_chunks():
        model = built()
        optimizer = sharded(Run("host"), model, pair(model.named_parameters()))
        steps(optimizer, model, 0, 1)
        checkpoint.save(tmp_path, model, optimizer)
        optimizer.close()
    names = torch.distributed.checkpoint.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    of = "optim.state.layers.0.up.weight"
    assert sorted(name for name in names if name.startswith(of)) == [f"{of}.momentum_buffer", f"{of}.step"]
    assert "optim.state.layers.0.up.bias.exp_avg" in names


def durable(disk: Any) -> tuple[nn.Module, Any, Any]:
    """A model in a durable store on `disk`, gone on from what is there."""
    model = built()
    step = zero_optim_cpu.CpuStep(threads=1)
    store = TieredStore("nvme", "host", HALF, nvme=disk, step=step, tile_numel=TILE, durable=True)
    optimizer = zero_core.shard(model, pair(model.named_parameters()), store=store, max_grad_norm=0.5)
    return model, optimizer, zero_core.resume(model, optimizer)


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


@pytest.mark.promise("whole-is-one-tile")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(512, 1024), (768, 768), (1024, 256)])
def test_an_update_takes_the_memory_that_the_plan_says(shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrix = nn.Parameter(torch.zeros(shape))
    step = step_for(torch.optim.Muon([matrix]), zero_optim_cpu.CpuStep())
    assert isinstance(step, UncutStep)
    segment = Segment(0, matrix.numel(), 0, "matrix", shape, uncut=True)
    states = {f.name: torch.zeros(f.numel, dtype=f.dtype) for f in step.uncut_layout(segment, matrix.numel(), dtype)}
    tile = TileView(states, torch.zeros(matrix.numel(), dtype=dtype), torch.randn(matrix.numel()).to(dtype), segment)
    options = {k: v for k, v in torch.optim.Muon([matrix]).param_groups[0].items() if k != "params"}
    moved = [UpdateSegment(0, matrix.numel(), options, 2, shape)]
    step.update(tile, moved, 0.5)  # oneDNN keeps what its first call makes
    peak = live_bytes(lambda: step.update(tile, moved, 0.5))
    assert 0.45 * step.scratch_bytes(0, shape) <= peak <= step.scratch_bytes(0, shape)
