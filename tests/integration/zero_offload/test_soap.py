"""examples/soap.py, whose states have other shapes than its matrices, on every tier: the bits of plain torch."""

import random
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
from tests.integration.zero_offload import test_muon
from tests.integration.zero_offload.test_muon import (
    PLACES,
    STEPS,
    VOCABULARY,
    WIDTH,
    Run,
    apart,
    built,
    is_matrix,
    live_bytes,
    loss_of,
    parameters_of,
    sharded,
    steps,
    store_of,
    tokens_of,
)
from tests.integration.zero_offload.training import Model
from zero_core import checkpoint
from zero_core.errors import CheckpointError, UnsupportedOptimizerError
from zero_core.store import Segment
from zero_offload import GenerationError, MemoryByteStore, TieredStore, plan, step_for, write_checkpoint
from zero_offload.protocols import TileView, UpdateSegment
from zero_offload.testing import CrashByteStore
from zero_offload.uncut_step import UncutStep

pytestmark = [pytest.mark.usefixtures("small_chunks"), pytest.mark.promise("soap")]

MATRIX = "layers.0.up.weight"  # (4 * WIDTH, WIDTH)


def pair(named: Any, **options: Any) -> list[torch.optim.Optimizer]:
    """SOAP for the matrices inside, over (name, parameter), and AdamW for the rest."""
    named = list(named)
    matrices = [p for name, p in named if is_matrix(name, p)]
    others = [p for name, p in named if not is_matrix(name, p)]
    options = {"lr": 0.01, "weight_decay": 0.1, "frequency": 2, **options}
    return [SOAP(matrices, **options), zero_optim_cpu.AdamW(others, lr=3e-3, threads=1)]


def begun(run: Run, **options: Any) -> tuple[nn.Module, Any]:
    model = built()
    return model, sharded(run, model, pair(model.named_parameters(), **options))


def train(run: Run, **options: Any) -> dict[str, Tensor]:
    model, optimizer = begun(run, **options)
    steps(optimizer, model, 0, STEPS, run)
    masters = kit.named_values(model, master=True)
    optimizer.close()
    return masters


def plain(run: Run, size: int = 1, **options: Any) -> dict[str, Tensor]:
    return test_muon.plain(run, size, lambda named, _: pair(named, **options))


@pytest.mark.promise("needs-whole")
@pytest.mark.parametrize(
    ("place", "dtype"), [*((place, torch.bfloat16) for place in PLACES), *((place, None) for place in ("none", "nvme"))]
)
def test_states_of_any_shape_have_the_bits_of_plain_torch(place: str, dtype: torch.dtype | None) -> None:
    run = Run(place, dtype=dtype)
    assert not apart(train(run), plain(run))


@pytest.mark.parametrize("place", ["none", "nvme"])
def test_which_states_there_are_may_depend_on_the_shape(place: str) -> None:
    """A side of 4 x WIDTH is not rotated here, so there is nothing of it."""
    run = Run(place)
    assert not apart(train(run, max_side=WIDTH), plain(run, max_side=WIDTH))
    model, optimizer = begun(run, max_side=WIDTH)
    steps(optimizer, model, 0, 1)
    weight = dict(model.named_parameters())[MATRIX]
    right = zero_core.full_state(weight, "right")
    assert right is not None and right.shape == (WIDTH, WIDTH)
    with pytest.raises(zero_core.ZeroError, match="the optimizer keeps master, exp_avg, .*right"):
        zero_core.full_state(weight, "left")
    optimizer.close()


# -- states from before, and for later ---------------------------------------------------------------------------------


def dense(last: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """A plain model after that many steps, which do not clip."""
    model = built()
    optimizers = pair(model.named_parameters())
    for step in range(last):
        loss_of(model, tokens_of(step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizers


@pytest.mark.promise("muon-states")
@pytest.mark.parametrize("place", ["none", "mixed", "whole"])
def test_states_of_plain_torch_go_on_and_come_back(place: str) -> None:
    expected, theirs = dense(4)
    model, optimizers = dense(2)
    loaded = [each.state_dict() for each in optimizers]
    for given in (optimizers, None):  # carried over by shard(), and loaded after it
        if given is None:
            model, _ = dense(2)
        optimizer = sharded(Run(place, clip=None), model, given or pair(model.named_parameters()))
        if given is None:
            optimizer.load_state_dict(loaded)
        steps(optimizer, model, 2, 4)
        full = optimizer.full_state_dict()
        assert not apart(kit.named_values(model), parameters_of(expected))
        optimizer.close()
    both = zero_core.JointOptimizer(*theirs).state_dict()
    for number, state in both["state"].items():
        found = full["state"][number]
        assert state.keys() == found.keys()
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(found[name])) for name, v in state.items()), number


@pytest.mark.parametrize("place", ["none", "nvme", "whole"])
def test_a_state_of_another_shape_is_read_and_written(place: str) -> None:
    model, optimizer = begun(Run(place))
    steps(optimizer, model, 0, 1)
    weight = dict(model.named_parameters())[MATRIX]
    values = torch.randn(4 * WIDTH, 4 * WIDTH)
    zero_core.set_full_state(weight, "left", values)
    found = zero_core.full_state(weight, "left")
    assert found is not None and torch.equal(found, values)
    with pytest.raises(zero_core.ZeroError, match=r"shape \(384, 96\) for .* of shape \(384, 384\): give real"):
        zero_core.set_full_state(weight, "left", torch.zeros(4 * WIDTH, WIDTH))
    optimizer.close()


@pytest.mark.promise("muon-states")
def test_a_checkpoint_travels_between_tiers(tmp_path: Any) -> None:
    expected = train(Run("host", dtype=torch.bfloat16))
    model, optimizer = begun(Run("nvme", dtype=torch.bfloat16))
    steps(optimizer, model, 0, 2)
    checkpoint.save(tmp_path, model, optimizer, tile_numel=3 * WIDTH * WIDTH)  # so that a state takes several boxes
    optimizer.close()
    for place in ("none", "halves", "whole"):
        run = Run(place, dtype=torch.bfloat16)
        torch.manual_seed(7)
        model = Model(WIDTH, 2, VOCABULARY)
        optimizer = sharded(run, model, pair(model.named_parameters()))
        checkpoint.load(tmp_path, model, optimizer)
        steps(optimizer, model, 2, STEPS)
        assert not apart(kit.named_values(model, master=True), expected)
        optimizer.close()
    metadata = torch.distributed.checkpoint.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert metadata[f"optim.state.{MATRIX}.left"].size == (4 * WIDTH, 4 * WIDTH)


@pytest.mark.promise("states-refused")
def test_a_checkpoint_with_other_states_is_refused_as_of_another_optimizer(tmp_path: Any) -> None:
    model, optimizer = begun(Run("none"))
    steps(optimizer, model, 0, 1)
    checkpoint.save(tmp_path, model, optimizer)
    optimizer.close()
    model, optimizer = begun(Run("host"), max_side=WIDTH)
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=r"of another optimizer: states .* shapes: optim\S+\.left: saved \("):
            checkpoint.load(tmp_path, model, optimizer, strict=strict)
    optimizer.close()


def durable(disk: Any, **options: Any) -> tuple[nn.Module, Any]:
    model = built()
    step = zero_optim_cpu.CpuStep(threads=1)
    halves = {"host": 0.5, "nvme": 0.5}
    store = TieredStore("nvme", "host", halves, nvme=disk, step=step, tile_numel=TILE, durable=True)
    return model, zero_core.shard(model, pair(model.named_parameters(), **options), store=store, max_grad_norm=0.5)


@pytest.mark.advice("than the one given: give it the options that")
@pytest.mark.promise("muon-states")
def test_a_durable_run_goes_on_and_becomes_a_checkpoint(tmp_path: Any) -> None:
    expected = train(Run("host"))
    disk = CrashByteStore()
    model, optimizer = durable(disk)
    zero_core.resume(model, optimizer)
    steps(optimizer, model, 0, 2)
    zero_core.commit(model)
    checkpoint.save(tmp_path / "beside", model, optimizer, blocking=False).wait()
    optimizer.close()
    again, other, kept, odd = (disk.crashed(random.Random(seed)) for seed in range(4))
    model, optimizer = durable(again)
    assert zero_core.resume(model, optimizer).step == 2
    steps(optimizer, model, 2, STEPS)
    assert not apart(kit.named_values(model, master=True), expected)
    optimizer.close()
    with pytest.raises(GenerationError, match="shapes: "):
        durable(other, max_side=WIDTH)
    step = zero_optim_cpu.CpuStep()
    given = zero_core.JointOptimizer(*pair(built().named_parameters(), max_side=WIDTH))
    with pytest.raises(GenerationError, match="kept states of other shapes"):
        write_checkpoint([odd], tmp_path / "odd", step=step, optimizer=given)
    given = zero_core.JointOptimizer(*pair(built().named_parameters()))
    write_checkpoint([kept], tmp_path / "kept", step=step, optimizer=given)
    for folder in ("beside", "kept"):
        model, optimizer = begun(Run("none"))
        checkpoint.load(tmp_path / folder, model, optimizer)
        steps(optimizer, model, 2, STEPS)
        assert not apart(kit.named_values(model, master=True), expected)
        optimizer.close()


# -- what it takes -----------------------------------------------------------------------------------------------------


@pytest.mark.promise("whole-is-one-tile")
def test_a_plan_counts_each_state_in_its_shape() -> None:
    model = built()
    optimizer = zero_core.JointOptimizer(*pair(model.named_parameters()))
    step = step_for(optimizer, zero_optim_cpu.CpuStep(threads=1))
    planned = plan(
        model, parameters="host", gradients="nvme", optimizer="nvme", step=step, tile_numel=TILE,
        parameter_dtype=torch.float32, reduce_dtype=torch.float32,
    )  # fmt: skip
    store = TieredStore(plan=planned, nvme=MemoryByteStore(), step=step)
    held_by = zero_core.shard(model, optimizer, store=store)
    held = store.describe()
    assert held.held == planned.store.held and held.arena_bytes == planned.store.arena_bytes
    of_matrix = 4 * (2 * 4 * WIDTH * WIDTH + 2 * WIDTH**2 + 2 * (4 * WIDTH) ** 2)
    assert held.state_slot_bytes == of_matrix
    others = sum(p.numel() for name, p in model.named_parameters() if not is_matrix(name, p))
    assert held.bytes_of("nvme", "optimizer") == pytest.approx(4 * of_matrix + 8 * others, rel=0.05)
    held_by.close()


@pytest.mark.parametrize("shape", [(256, 512), (384, 384), (512, 128)])
def test_a_step_takes_the_memory_that_it_says(shape: tuple[int, int]) -> None:
    matrix = nn.Parameter(torch.zeros(shape))
    optimizer = SOAP([matrix], frequency=1)
    step = step_for(optimizer, zero_optim_cpu.CpuStep())
    assert isinstance(step, UncutStep)
    segment = Segment(0, matrix.numel(), 0, "matrix", shape, uncut=True)
    fields = step.uncut_layout(segment, matrix.numel(), torch.bfloat16)
    assert sum(field.numel for field in fields if field.name.startswith(("left", "right"))) == 2 * sum(
        side**2 for side in shape
    )
    states = {f.name: torch.zeros(f.numel, dtype=f.dtype) for f in fields}
    gradient = torch.randn(matrix.numel()).bfloat16()
    tile = TileView(states, torch.zeros(matrix.numel(), dtype=torch.bfloat16), gradient, segment)
    options = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    peaks = [
        live_bytes(
            lambda count=count: step.update(tile, [UpdateSegment(0, matrix.numel(), options, count, shape)], 0.5)
        )
        for count in (1, 2, 3)
    ]
    assert 0.6 * step.scratch_bytes(0, shape) <= max(peaks) <= step.scratch_bytes(0, shape), peaks


# -- what is refused ---------------------------------------------------------------------------------------------------


class Strided(SOAP):
    """As torch.linalg.eigh gives a basis: column by column."""

    needs_uncut = SOAP.needs_uncut  # of this step too

    def step(self, closure: Any = None) -> None:
        super().step()
        for state in self.state.values():
            state["left_basis"] = state["left_basis"].T.contiguous().T


class Halves(SOAP):
    """Keeps a state in 16 bits."""

    needs_uncut = SOAP.needs_uncut  # of this step too

    def step(self, closure: Any = None) -> None:
        for state in self.state.values():
            state["left"] = state["left"].float()
        super().step()
        for state in self.state.values():
            state["left"] = state["left"].bfloat16()


class Uncounted(SOAP):
    """Counts its updates, of which the first step makes none, as the authors' code does."""

    needs_uncut = SOAP.needs_uncut  # of this step too

    def step(self, closure: Any = None) -> None:
        for state in self.state.values():
            state["step"] += 1
        super().step()
        for state in self.state.values():
            state["step"] -= 1


@pytest.mark.promise("states-refused")
@pytest.mark.parametrize("place", ["none", "host"])
@pytest.mark.parametrize(
    "kind, told",
    [
        (Strided, r"keeps left_basis \(torch.float32, strides .*contiguous float32"),
        (Halves, r"keeps left \(torch.bfloat16, strides .*contiguous float32"),
        (Uncounted, r'Uncounted has 1 for the state "step" after 2 steps.*count each step'),
    ],
)
def test_states_that_no_store_keeps_are_refused(kind: Any, told: str, place: str) -> None:
    model = built()
    soap, rest = pair(model.named_parameters())
    given = [kind(soap.param_groups[0]["params"]), rest]
    with pytest.raises(UnsupportedOptimizerError, match=told):
        zero_core.shard(model, given, store=store_of(Run(place)))
    optimizer = zero_core.shard(model, pair(model.named_parameters()), store=store_of(Run(place)))
    steps(optimizer, model, 0, 1)
    optimizer.close()


class Large(SOAP):
    """Needs whole what no trial of a small parameter shows."""

    def needs_uncut(self, group: Any, shape: Any) -> bool:
        return len(shape) == 2 and shape[0] >= WIDTH


@pytest.mark.promise("soap-large-only")
@pytest.mark.parametrize("place", ["none", "nvme"])
def test_what_needs_only_large_matrices_whole_keeps_its_states(place: str) -> None:
    def both(model: nn.Module) -> list[Any]:
        soap, rest = pair(model.named_parameters())
        return [Large(soap.param_groups[0]["params"]), rest]

    expected = built()
    theirs = both(expected)
    for step in range(STEPS):
        loss_of(expected, tokens_of(step)).backward()
        for each in theirs:
            each.step()
            each.zero_grad()
    model = built()
    optimizer = sharded(Run(place, clip=None), model, both(model))
    steps(optimizer, model, 0, STEPS)
    assert not apart(kit.named_values(model), parameters_of(expected))
    optimizer.close()


def on_ranks(runs: list[Run], folder: Any) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Of each run the masters, and SOAP's states of a matrix. The last run's checkpoint is saved in `folder`."""
    found = []
    with small_chunks():
        for run in runs:
            model, optimizer = begun(run)
            steps(optimizer, model, 0, STEPS, run)
            weight = model.get_parameter(MATRIX)
            states = {name: zero_core.full_state(weight, name) for name in ("left", "right", "exp_avg")}
            found.append((kit.named_values(model, master=True), states))
            if run is runs[-1]:
                checkpoint.save(folder, model, optimizer)
            optimizer.close()
    return found


def test_ranks_that_own_matrices_have_the_bits_of_plain_torch(ranks: Any, tmp_path: Any) -> None:
    """So do states of other shapes than the matrix, which only the owner has, and a checkpoint of two ranks."""
    runs = [Run("none", 1), Run("host", 3), Run("nvme", 2), Run("mixed", 3)]
    expected = plain(Run(), 2)
    each = ranks(2).run(on_ranks, runs, tmp_path)
    for of_rank in each:
        for run, (masters, states) in zip(runs, of_rank, strict=True):
            assert not apart(masters, expected), run
            assert states["left"].shape == (4 * WIDTH, 4 * WIDTH) and bool(states["left"].any())
            assert not apart(states, each[0][0][1]), run
    model, optimizer = begun(Run("host"))
    checkpoint.load(tmp_path, model, optimizer)
    weight = model.get_parameter(MATRIX)
    states = {name: zero_core.full_state(weight, name) for name in each[0][0][1]}
    assert not apart(states, each[0][0][1]) and not apart(kit.named_values(model, master=True), expected)
    optimizer.close()


@pytest.mark.parametrize("place", ["none", "host", "nvme"])
def test_an_option_that_decides_which_states_there_are_stays(place: str) -> None:
    """Plain torch goes on with the states that it has; a tier would leave them out, and so would a state dict."""
    run = Run(place)
    model, optimizer = begun(run)
    steps(optimizer, model, 0, 1, run)
    before = optimizer.param_groups[0]["max_side"]
    optimizer.param_groups[0]["max_side"] = WIDTH
    loss_of(model, tokens_of(1)).backward()
    with pytest.raises(
        UnsupportedOptimizerError, match="an option changed during the run that decides which states .* Set it back"
    ):
        optimizer.step()
    optimizer.param_groups[0]["max_side"] = before
    optimizer.step()
    optimizer.zero_grad()
    steps(optimizer, model, 2, STEPS, run)
    assert not apart(kit.named_values(model, master=True), plain(run))
    optimizer.close()


class Narrow(SOAP):
    """Keeps exp_avg in another shape than the matrix, which AdamW beside it keeps too."""

    needs_uncut = SOAP.needs_uncut  # of this step too

    def __init__(self, parameters: Any, mean: str = "exp_avg") -> None:
        torch.optim.Optimizer.__init__(self, parameters, {"lr": 0.1, "mean": mean})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault(group["mean"], torch.zeros(p.shape[1:], device=p.device))
                mean.lerp_(p.grad.mean(0), 0.1)
                p.sub_(mean, alpha=group["lr"])
                self.state[p]["step"] = self.state[p].get("step", 0) + 1


@pytest.mark.parametrize("place", ["none", "host"])
def test_one_name_of_two_shapes_is_refused_and_another_name_is_saved(place: str, tmp_path: Any) -> None:
    for mean in ("exp_avg", "narrow_avg"):
        model = built()
        _, adamw = pair(model.named_parameters())
        both = [Narrow([p for name, p in model.named_parameters() if is_matrix(name, p)], mean), adamw]
        if mean == "exp_avg":
            with pytest.raises(UnsupportedOptimizerError, match="rename it in one of them"):
                sharded(Run(place), model, both)
            continue
        optimizer = sharded(Run(place), model, both)
        steps(optimizer, model, 0, 1)
        checkpoint.save(tmp_path, model, optimizer)
        assert zero_core.full_state(model.get_parameter(MATRIX), mean).shape == (WIDTH,)
        optimizer.close()


@pytest.mark.parametrize("place", ["none", "host", "whole"])
def test_asleep_it_keeps_them(place: str) -> None:
    expected = train(Run(place))
    model, optimizer = begun(Run(place))
    steps(optimizer, model, 0, 1)
    disk = MemoryByteStore()
    zero_core.sleep(model, to=disk)
    zero_core.wake(model)
    steps(optimizer, model, 1, STEPS)
    assert not apart(kit.named_values(model, master=True), expected)
    optimizer.close()
