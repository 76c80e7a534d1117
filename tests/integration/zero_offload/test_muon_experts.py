"""zero_core.Muon over a mixture whose stacked experts are in groups: the bits of plain Muon over the uncut stacks.

What groups compute differs from the stock forward by rounding. So plain optimizers over whole masters step with the
gradients that our ranks have. Fails if a group is not stepped as the matrices that it has, or its states are not the
rows of the stack's.
"""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("zero_optim_cpu")

import zero_core
import zero_optim_cpu
from tests import kit
from tests.chunks import small_chunks
from tests.integration.zero_core import mixtures
from tests.integration.zero_core.mixtures import GROUP, STACKS, grouped, loss_of, share
from tests.integration.zero_offload import test_muon
from tests.integration.zero_offload.test_muon import PLACES, STEPS, Run, apart, store_of
from tests.reference import Reference
from zero_core import checkpoint
from zero_offload import GenerationError, TieredStore, plan, step_for, write_checkpoint
from zero_offload.testing import CrashByteStore

pytestmark = pytest.mark.promise("muon-experts")

NAME = f"{STACKS[1]}.gate_up_proj"


def is_inside(name: str, parameter: Tensor) -> bool:
    return parameter.ndim in (2, 3) and "layers" in name


def pair(named: Any, **options: Any) -> list[torch.optim.Optimizer]:
    """Muon for matrices and stacks inside of the model, and AdamW for the rest."""
    named = list(named)
    inside = [p for name, p in named if is_inside(name, p)]
    others = [p for name, p in named if not is_inside(name, p)]
    return [zero_core.Muon(inside, lr=0.02, **options), zero_optim_cpu.AdamW(others, lr=3e-3, threads=1)]


def states_of(model: nn.Module) -> dict[str, Tensor]:
    """Whole masters and momenta, by name."""
    inside = [(name, p) for name, p in model.named_parameters() if is_inside(name, p)]
    momenta: dict[str, Any] = {f"{name}.momentum": zero_core.full_state(p, "momentum_buffer") for name, p in inside}
    return kit.named_values(model, master=True) | momenta


def bytes_of(run: Run, expert_bytes: int | None) -> int | None:
    """`expert_bytes` that make the same groups in the run's dtype as these do in fp32."""
    return expert_bytes and expert_bytes * (run.dtype or torch.float32).itemsize // 4


def sharded(run: Run, model: nn.Module, expert_bytes: int | None = GROUP, muon: Any = (), **options: Any) -> Any:
    optimizers = pair(model.named_parameters(), **dict(muon))
    return test_muon.sharded(run, model, optimizers, expert_bytes=bytes_of(run, expert_bytes), **options)


def begun(run: Run, expert_bytes: int | None = GROUP, seed: int = 0, **options: Any) -> tuple[nn.Module, Any]:
    model = mixtures.qwen(seed)
    return model, sharded(run, model, expert_bytes, **options)


def number_of(step: int) -> int:
    """Of a batch. On one rank the first has two tokens, so most experts have a gradient of zeros in it."""
    return share(step + 1)[0]


def steps(optimizer: Any, model: nn.Module, first: int, last: int) -> list[float]:
    return [float(kit.step(optimizer, loss_of(model, number_of(step)))) for step in range(first, last)]


def fed(run: Run, **muon: Any) -> list[str]:
    """What differs from plain optimizers over whole masters, which step with the gradients that our ranks have."""
    with small_chunks():
        model = mixtures.qwen()
        names = [name for name, _ in model.named_parameters()]
        masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
        both = zero_core.JointOptimizer(*pair(zip(names, masters, strict=True), **muon))
        optimizer = sharded(run, model, muon=muon)
        assert len(grouped(model)) == 8
        for step in range(STEPS):
            for part in range(run.accumulate):
                (loss_of(model, number_of(run.accumulate * step + part)) / run.accumulate).backward()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad = zero_core.full_gradient(parameter)
            optimizer.step()
            factor = 1.0 if run.clip is None else min(1.0, run.clip / (optimizer.grad_norm + 1e-6))
            for master in masters:
                assert master.grad is not None
                master.grad.mul_(factor)
            both.step()
            optimizer.zero_grad()
        idle = masters[names.index(NAME)].grad.flatten(1).norm(dim=1) == 0  # type: ignore[union-attr]
        assert bool(idle.any()), "experts without tokens"
        ours = states_of(model)
        optimizer.close()
    theirs = {name: master.detach() for name, master in zip(names, masters, strict=True)}
    momenta = {
        f"{name}.momentum": both.optimizers[0].state[master]["momentum_buffer"]
        for name, master in zip(names, masters, strict=True)
        if is_inside(name, master)
    }
    return apart(ours, theirs | momenta)


RUNS = [
    *((Run(place), {}) for place in ("none", "host", "nvme", "mixed", "whole")),
    *((Run(place, dtype=torch.bfloat16), {"orthogonal": "bfloat16"}) for place in ("none", "nvme", "homes")),
    (Run("mixed", accumulate=2), {"orthogonal": "bfloat16"}),
    (Run("nvme", clip=None), {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0}),
]


@pytest.mark.parametrize("run, muon", RUNS, ids=str)
def test_groups_have_the_bits_of_plain_muon_over_the_stacks(run: Run, muon: dict[str, Any]) -> None:
    assert fed(run, **muon) == []


@pytest.mark.parametrize("run", [Run("none"), Run("mixed", accumulate=2), Run("nvme", dtype=torch.bfloat16)], ids=str)
@kit.on_ranks(2)
def test_each_rank_owns_groups_and_has_them_too(run: Run) -> None:
    assert fed(run) == []


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("place", ["none", "host", "nvme"])
def test_uncut_a_mixture_has_the_bits_of_plain_torch_and_in_groups_its_losses(place: str, dtype: Any) -> None:
    run = Run(place, dtype=dtype)
    model = mixtures.qwen()
    names = [name for name, _ in model.named_parameters()]
    reference = Reference(
        model,
        lambda masters: zero_core.JointOptimizer(*pair(zip(names, masters, strict=True))),
        param_dtype=dtype,
        max_grad_norm=run.clip,
    )
    wanted = [reference.step([number_of(step)], loss_of)[0] for step in range(STEPS)]
    with small_chunks():
        model, optimizer = begun(run, None)
        assert steps(optimizer, model, 0, STEPS) == wanted
        ours = kit.named_values(model, master=True)
        optimizer.close()
        assert not apart(ours, {n: m.detach() for n, m in zip(names, reference.masters, strict=True)})
        model, optimizer = begun(run)
        assert steps(optimizer, model, 0, STEPS) == pytest.approx(wanted, rel=1e-4 if dtype is None else 1e-2)
        optimizer.close()


@pytest.mark.parametrize("place", ["none", "nvme"])
@kit.on_ranks(1, 2)
def test_updates_in_backward_are_those_of_a_step(place: str) -> None:
    found = []
    for in_backward in (False, True):
        with small_chunks():
            model, optimizer = begun(Run(place, clip=None, in_backward=in_backward))
            steps(optimizer, model, 0, STEPS)
            found.append(states_of(model))
            optimizer.close()
    assert not apart(*found)


# -- states from before, and for later ---------------------------------------------------------------------------------


def saved(folder: str, expert_bytes: int | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with small_chunks():
        model, optimizer = begun(Run("mixed", dtype=torch.bfloat16), expert_bytes)
        steps(optimizer, model, 0, 2)
        checkpoint.save(folder, model, optimizer)
        found = states_of(model), optimizer.full_state_dict()
        optimizer.close()
    return found


def loaded(folder: str, expert_bytes: int | None) -> dict[str, Tensor]:
    with small_chunks():
        model, optimizer = begun(Run("host", dtype=torch.bfloat16), expert_bytes, seed=1)
        checkpoint.load(folder, model, optimizer)
        found = states_of(model)
        assert math.isfinite(steps(optimizer, model, 2, 3)[0])
        optimizer.close()
    return found


@pytest.mark.parametrize("before, after", [((1, GROUP), (2, 60_000)), ((2, GROUP), (1, None)), ((2, None), (2, GROUP))])
def test_a_checkpoint_loads_with_other_groups_and_ranks(ranks: Any, before: Any, after: Any, tmp_path: Any) -> None:
    (states, full), *_ = ranks(before[0]).run(saved, str(tmp_path), before[1])
    for found in ranks(after[0]).run(loaded, str(tmp_path), after[1]):
        assert not apart(found, states)
    names = torch.distributed.checkpoint.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    of = f"optim.state.{NAME}"
    assert sorted(name for name in names if name.startswith(of)) == [f"{of}.momentum_buffer", f"{of}.step"]
    plain = mixtures.qwen()
    both = zero_core.JointOptimizer(*pair(plain.named_parameters()))
    both.load_state_dict(full)
    momentum = both.optimizers[0].state[plain.get_parameter(NAME)]["momentum_buffer"]
    assert torch.equal(momentum, states[f"{NAME}.momentum"]) and momentum.shape == (16, 64, 64)


@kit.on_ranks(1, 2)
def test_states_of_plain_torch_are_carried_over_read_written_and_given_back() -> None:
    plain = mixtures.qwen()
    theirs = pair(plain.named_parameters())
    loss_of(plain, 0).backward()
    for each in theirs:
        each.step()
    with small_chunks():
        model = mixtures.qwen()
        model.load_state_dict(plain.state_dict())
        brought = pair(model.named_parameters())
        for mine, each in zip(brought, theirs, strict=True):
            mine.load_state_dict(each.state_dict())
        optimizer = zero_core.shard(model, brought, store=store_of(Run("mixed")), expert_bytes=GROUP)
        stack = model.get_parameter(NAME)
        momentum = theirs[0].state[plain.get_parameter(NAME)]["momentum_buffer"]
        assert torch.equal(zero_core.full_state(stack, "momentum_buffer"), momentum)  # type: ignore[arg-type]
        zero_core.set_full_state(stack, "momentum_buffer", momentum * 2)
        assert torch.equal(zero_core.full_state(stack, "momentum_buffer"), momentum * 2)  # type: ignore[arg-type]
        steps(optimizer, model, 0, 1)
        before = states_of(model)
        optimizer = sharded(Run("none"), model, 60_000)  # a second stage
        values = kit.named_values(model, master=True)
        assert not apart(values, {name: before[name] for name in values})
        zero_core.unshard(model)
        assert not apart({name: p.detach() for name, p in model.named_parameters()}, values)


def durable(disk: Any, expert_bytes: int = GROUP) -> tuple[nn.Module, Any, Any]:
    model = mixtures.qwen()
    store = TieredStore("nvme", "host", {"host": 0.5, "nvme": 0.5}, nvme=disk, step=cpu_step(), durable=True)
    optimizer = sharded(Run(), model, expert_bytes, store=store)
    return model, optimizer, zero_core.resume(model, optimizer)


def cpu_step() -> Any:
    return zero_optim_cpu.CpuStep(threads=1)


def test_a_killed_run_goes_on_with_the_same_bits_and_becomes_a_checkpoint(tmp_path: Any) -> None:
    with small_chunks():
        model, optimizer = begun(Run("host"))
        steps(optimizer, model, 0, 2)
        second = states_of(model)
        steps(optimizer, model, 2, STEPS)
        expected = states_of(model)
        optimizer.close()
        disk, generator = CrashByteStore(), random.Random(0)
        model, optimizer, _ = durable(disk)
        steps(optimizer, model, 0, 2)
        zero_core.commit(model)
        optimizer.close()
        kept, again = disk.crashed(generator), disk.crashed(generator)
        model, optimizer, resumed = durable(again)
        assert resumed.step == 2
        steps(optimizer, model, 2, STEPS)
        assert not apart(states_of(model), expected)
        optimizer.close()
        with pytest.raises(GenerationError, match="trained units"):
            durable(disk.crashed(generator), 60_000)
        both = zero_core.JointOptimizer(*pair(mixtures.qwen().named_parameters()))
        assert write_checkpoint([kept], tmp_path, step=cpu_step(), optimizer=both)[0] == 2
        model, optimizer = begun(Run("host"), 60_000, seed=1)
        checkpoint.load(tmp_path, model, optimizer)
        assert not apart(states_of(model), second)
        optimizer.close()


# -- what it takes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [Run("nvme"), Run("mixed", dtype=torch.bfloat16)], ids=str)
@kit.on_ranks(1, 2)
def test_the_plan_is_what_the_store_reserves_and_slots_are_as_large_as_a_group(run: Run) -> None:
    rank, size = kit.world()
    placed: dict[str, Any] = dict(zip(("parameters", "gradients", "optimizer"), PLACES[run.place], strict=True))
    slots, scratch = [], []
    with small_chunks():
        for expert_bytes in (GROUP, None):
            model = mixtures.qwen()
            step = step_for(zero_core.JointOptimizer(*pair(model.named_parameters())), cpu_step())
            planned = plan(
                model, step=step, shard_count=size, rank=rank, tile_numel=run.tile, reduce_dtype=torch.float32,
                parameter_dtype=run.dtype or torch.float32, expert_bytes=bytes_of(run, expert_bytes), **placed,
            )  # fmt: skip
            store = store_of(run)
            assert store is not None
            optimizer = sharded(run, model, expert_bytes, store=store)
            steps(optimizer, model, 0, 2)
            held = store.describe()
            assert held.held == planned.store.held and held.arena_bytes == planned.store.arena_bytes
            shapes = {
                t.uncut.uncut_shape for unit in held.units for t in unit.tiles if t.uncut and "experts" in t.uncut.name
            }
            assert shapes and {shape[0] for shape in shapes} == {4 if expert_bytes else 16}
            slots.append(held.gradient_slot_bytes)
            scratch.append(held.scratch_bytes - (2 << 20))  # of any update
            optimizer.close()
    assert 0 < scratch[0] < 0.5 * scratch[1]
    if run.place == "nvme":
        assert slots == [4 * 4 * 64 * 64, 4 * 16 * 64 * 64]
