"""zero_core.Muon over a mixture whose stacked experts are in groups: the bits of plain Muon over the uncut stacks.

What groups compute differs from the stock forward by rounding. So plain optimizers over whole masters step with the
gradients that our ranks have. Fails if a group is not stepped as the matrices that it has, or its states are not the
rows of the stack's.
"""

import math
import random
from dataclasses import replace
from functools import partial
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
from tests.integration.zero_offload import test_muon as muon
from tests.integration.zero_offload.test_muon import STEPS, Run, apart, states_of
from zero_core import checkpoint
from zero_core.errors import UnsupportedOptimizerError
from zero_offload import GenerationError, write_checkpoint
from zero_offload.testing import CrashByteStore

pytestmark = pytest.mark.promise("muon-experts")

NAME = f"{STACKS[1]}.gate_up_proj"

pair = partial(muon.pair, kind=zero_core.Muon)


def bytes_of(run: Run, expert_bytes: int | None) -> int | None:
    """`expert_bytes` that make the same groups in the run's dtype as these do in fp32."""
    return expert_bytes and expert_bytes * (run.dtype or torch.float32).itemsize // 4


def sharded(run: Run, model: nn.Module, expert_bytes: int | None = GROUP, options: Any = ()) -> Any:
    return muon.sharded(run, model, pair(model.named_parameters(), options), expert_bytes=bytes_of(run, expert_bytes))


def begun(run: Run, expert_bytes: int | None = GROUP, seed: int = 0) -> tuple[nn.Module, Any]:
    model = mixtures.qwen(seed)
    return model, sharded(run, model, expert_bytes)


def number_of(step: int) -> int:
    """Of a batch. On one rank the first has two tokens, so most experts have a gradient of zeros in it."""
    return share(step + 1)[0]


def steps(optimizer: Any, model: nn.Module, first: int, last: int) -> list[float]:
    return [float(kit.step(optimizer, loss_of(model, number_of(step)))) for step in range(first, last)]


def fed(run: Run, **options: Any) -> list[str]:
    """What differs from plain optimizers, which step with the gradients that our ranks have."""
    model, plain = mixtures.qwen(), mixtures.qwen()
    loss_of(plain, number_of(0)).backward()
    assert bool((plain.get_parameter(NAME).grad.flatten(1).norm(dim=1) == 0).any()), "experts without tokens"

    def shard() -> Any:
        optimizer = sharded(run, model, options=options)
        assert len(grouped(model)) == 8
        return optimizer

    run = replace(run, kind=zero_core.Muon, muon=tuple(options.items()))
    return muon.fed(run, model, shard, lambda model, number: loss_of(model, number_of(number)))


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
    assert torch.equal(momentum, states[f"{NAME}.momentum_buffer"]) and momentum.shape == (16, 64, 64)


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
        optimizer = zero_core.shard(model, brought, store=muon.store_of(Run("mixed")), expert_bytes=GROUP)
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
    return muon.durable(disk, Run(kind=zero_core.Muon), mixtures.qwen(), expert_bytes=expert_bytes)


@pytest.mark.promise("experts-same-bits")
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
        assert write_checkpoint([kept], tmp_path, step=zero_optim_cpu.CpuStep(), optimizer=both)[0] == 2
        model, optimizer = begun(Run("host"), 60_000, seed=1)
        checkpoint.load(tmp_path, model, optimizer)
        assert not apart(states_of(model), second)
        optimizer.close()


# -- what it takes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [Run("nvme"), Run("mixed", dtype=torch.bfloat16)], ids=str)
@kit.on_ranks(1, 2)
def test_the_plan_is_what_the_store_reserves_and_slots_are_as_large_as_a_group(run: Run) -> None:
    slots, scratch = [], []
    with small_chunks():
        for expert_bytes in (GROUP, None):
            model = mixtures.qwen()
            both = pair(model.named_parameters())
            _, held, optimizer = muon.as_planned(run, model, both, expert_bytes=bytes_of(run, expert_bytes))
            steps(optimizer, model, 0, 2)
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


# -- optimizers of the user's that say of rows of a stack that they are stepped apart, or not ------------------------


class Scaled(torch.optim.Optimizer):
    """Moves each matrix of a stack by its momentum over a norm. `says`: what it says of rows."""

    def __init__(self, params: Any, lr: float = 0.02, says: bool = True) -> None:
        super().__init__(params, {"lr": lr, "says": says})

    def needs_uncut(self, group: Any, shape: tuple[int, ...]) -> bool:
        return True

    def steps_rows(self, group: Any, shape: tuple[int, ...]) -> bool:
        return bool(group["says"] and len(shape) == 3)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 0.1)
                    axes = tuple(range(max(0, p.ndim - 2), p.ndim))
                    p.sub_(mean / (torch.linalg.vector_norm(mean, dim=axes, keepdim=True) + 1e-7), alpha=group["lr"])


class Shaped(Scaled):
    """Keeps a state of another shape than the parameter's."""

    needs_uncut = Scaled.needs_uncut  # of this step too

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for state in self.state.values():
            state["count"] = torch.ones(2, 2)


def beside(model: nn.Module, kind: Any, **options: Any) -> list[torch.optim.Optimizer]:
    stacks = [p for p in model.parameters() if p.ndim == 3]
    others = [p for p in model.parameters() if p.ndim != 3]
    return [kind(stacks, **options), zero_optim_cpu.AdamW(others, threads=1)]


@pytest.mark.promise("steps-rows")
@pytest.mark.parametrize("kind, options", [(Scaled, {"says": False}), (Shaped, {})])
def test_rows_that_an_optimizer_does_not_step_apart_are_refused(kind: Any, options: dict[str, Any]) -> None:
    model = mixtures.qwen()
    before = muon.parameters_of(model)
    with pytest.raises(UnsupportedOptimizerError, match="as one tensor, but its experts are sharded in groups: pass"):
        zero_core.shard(model, beside(model, kind, **options), expert_bytes=GROUP)
    assert not apart(muon.parameters_of(model), before)
    ways = [({**options, "says": False}, None), (options, None)]  # it does not say so, and experts are not cut
    for given, expert_bytes in ways:
        optimizer = zero_core.shard(model, beside(model, kind, **given), expert_bytes=expert_bytes)
        assert math.isfinite(steps(optimizer, model, 0, 1)[0])
        optimizer.close()
        model = mixtures.qwen()


@pytest.mark.promise("steps-rows")
@pytest.mark.parametrize("place", ["none", "nvme"])
def test_an_optimizer_of_the_users_may_step_rows_apart(place: str) -> None:
    model = mixtures.qwen()
    plain = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters() if p.ndim == 3}
    theirs = Scaled(plain.values())
    with small_chunks():
        optimizer = zero_core.shard(model, beside(model, Scaled), store=muon.store_of(Run(place)), expert_bytes=GROUP)
        assert len(grouped(model)) == 8
        for step in range(STEPS):
            loss_of(model, number_of(step)).backward()
            for name, master in plain.items():
                master.grad = zero_core.full_gradient(model.get_parameter(name))
            theirs.step()
            optimizer.step()
            optimizer.zero_grad()
        assert not apart(kit.named_values(model), {name: p.detach() for name, p in plain.items()})
        optimizer.close()
