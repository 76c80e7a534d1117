"""torch.optim.Muon on several ranks at stages 1 to 3: each matrix lies whole with one rank, its owner.

The plain run is that of `test_muon`: a dense model that is given the batches of all ranks.
"""

import os
import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("zero_nvme")
pytest.importorskip("zero_optim_cpu")

import zero_core
import zero_optim_cpu
from tests import kit
from tests.chunks import TILE, small_chunks
from tests.integration.zero_offload.test_muon import (
    PLACES,
    STEPS,
    VOCABULARY,
    WIDTH,
    Run,
    apart,
    built,
    durable,
    is_matrix,
    loss_of,
    pair,
    plain,
    sharded,
    steps,
    store_of,
    tokens_of,
    train,
)
from tests.integration.zero_offload.training import Model
from zero_core import checkpoint
from zero_nvme import Slab
from zero_offload import MemoryByteStore, plan, step_for, write_checkpoint
from zero_offload.testing import CrashByteStore

pytestmark = [
    pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon"),
    pytest.mark.promise("muon-owners"),
]

STAGES = (1, 2, 3)


def train_all(runs: list[Run]) -> list[dict[str, Tensor]]:
    return [train(run) for run in runs]


@pytest.mark.parametrize("place", ["none", "host", "nvme", "mixed"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_own_matrices_have_the_bits_of_plain_torch(ranks: Any, size: int, place: str) -> None:
    expected = plain(Run(), size)
    for of_rank in ranks(size).run(train_all, [Run(place, stage) for stage in STAGES]):
        for stage, ours in zip(STAGES, of_rank, strict=True):
            assert not apart(ours, expected), f"stage {stage}"


OTHERS = [
    Run("mixed", dtype=torch.bfloat16),
    Run("halves", tile=64 * TILE, overlap=False),
    Run("nvme", 2, dtype=torch.bfloat16),
    Run("homes"),
    Run("whole", dtype=torch.bfloat16),
    Run("none", muon=(("nesterov", False), ("ns_steps", 3))),
    Run("mixed", clip=None, in_backward=True),
]


def test_other_tiers_dtypes_and_options_on_two_ranks(ranks: Any) -> None:
    expected = [plain(run, 2) for run in OTHERS]
    for of_rank in ranks(2).run(train_all, OTHERS):
        for run, ours, theirs in zip(OTHERS, of_rank, expected, strict=True):
            assert not apart(ours, theirs), run


# -- fed with our own gradients ----------------------------------------------------------------------------------------


def fed(run: Run, no_sync: bool = False, shape: tuple[int, int] | None = None, machines: int = 1) -> list[str]:
    """What differs from plain optimizers over whole masters, which step with the gradients that our ranks have."""
    with small_chunks():
        model, options = built(), {}
        if shape is not None:
            names = ("replicate", "shard")
            options["mesh"] = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
        names = [name for name, _ in model.named_parameters()]
        masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
        both = zero_core.JointOptimizer(*pair(zip(names, masters, strict=True)))
        rank, size = kit.world()
        with mock.patch.dict(os.environ, GROUP_RANK=str(rank * machines // size)):
            optimizer = sharded(run, model, pair(model.named_parameters()), secondary_shards=machines > 1, **options)
        for step in range(STEPS):
            for part in range(run.accumulate):
                held = zero_core.no_sync(model) if no_sync and part + 1 < run.accumulate else None
                loss = loss_of(model, tokens_of(run.accumulate * step + part, rank)) / run.accumulate
                if held is None:
                    loss.backward()
                else:
                    with held:
                        loss.backward()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad = zero_core.full_gradient(parameter)
            norm = float(torch.stack([m.grad.double().square().sum() for m in masters]).sum().sqrt())
            for master in masters:
                master.grad.mul_(min(1.0, run.clip / (norm + 1e-6)) if run.clip is not None else 1.0)
            both.step()
            optimizer.step()
            optimizer.zero_grad()
        ours = kit.named_values(model, master=True)
        optimizer.close()
    return apart(ours, dict(zip(names, (m.detach() for m in masters), strict=True)))


@pytest.mark.parametrize(
    "run, no_sync",
    [
        (Run("host", 3, accumulate=2), True),
        (Run("mixed", 2, accumulate=3), False),
        (Run("nvme", 1, accumulate=2), False),
    ],
    ids=str,
)
def test_accumulation_has_the_bits_of_plain_torch_with_our_gradients(ranks: Any, run: Run, no_sync: bool) -> None:
    assert ranks(2).run(fed, run, no_sync) == [[]] * 2


def test_replicas_of_shards_have_them_too(ranks: Any) -> None:
    assert ranks(4).run(fed, Run("host"), False, (2, 2)) == [[]] * 4


def test_machines_with_secondary_shards_have_them_too(ranks: Any) -> None:
    run = Run("mixed", dtype=torch.float32, accumulate=2)
    assert ranks(4).run(fed, run, False, None, 2) == [[]] * 4


# -- owners ------------------------------------------------------------------------------------------------------------


def held_by_rank(stage: int) -> tuple[set[str], int, dict[str, int]]:
    """Matrices that this rank has whole, elements of its shards, and what it sends of a step by collective."""
    model = built()
    optimizer = zero_core.shard(model, pair(model.named_parameters()), stage=stage, prefetch_bytes=0)
    ranks = zero_core.handle(model).ranks
    owned, numel = set(), 0
    for unit in zero_core.units(model):
        numel += unit.shard_numel
        for piece in unit.pieces:
            if piece.slot.uncut:
                assert piece.numel == piece.slot.numel
                owned.add(piece.slot.name)
    sent = kit.count_sent(ranks)
    steps(optimizer, model, 0, 1)
    optimizer.close()
    return owned, numel, dict(sent)


@pytest.mark.promise("owners-balance")
@pytest.mark.parametrize("size", [2, 4, 8])
def test_each_matrix_has_one_owner_and_the_bytes_of_all_ranks_are_those_of_equal_shards(ranks: Any, size: int) -> None:
    found = ranks(size).run(held_by_rank, 3)
    owned = [name for names, _, _ in found for name in names]
    expected = {name for name, p in built().named_parameters() if is_matrix(name, p)}
    assert len(owned) == len(set(owned)) and set(owned) == expected
    total = sum(numel for _, numel, _ in found)
    assert sum(sent["all_gather"] for _, _, sent in found) == 2 * (size - 1) * total
    assert sum(sent["reduce_scatter"] for _, _, sent in found) == (size - 1) * total
    for _, numel, sent in found:  # of one rank: what it owns goes to all others, and the rest of a gradient leaves it
        assert sent["all_gather"] == 2 * (size - 1) * numel
        assert sent["reduce_scatter"] == total - numel
    assert zero_core.memory.movement(total, size, 3).total_numel * size == sum(sum(s.values()) for _, _, s in found)


# -- curves ------------------------------------------------------------------------------------------------------------

MOVED, CURVE = 6, 20  # runs whose gradients are moved, and steps of each


def losses_of(run: Run) -> list[float]:
    """Of this rank's batch, before each step."""
    found, model = [], built()
    with small_chunks():
        optimizer = sharded(run, model, pair(model.named_parameters()))
        for step in range(CURVE):
            loss = loss_of(model, tokens_of(step, kit.world()[0]))
            found.append(float(loss.detach()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
    return found


def plain_losses(run: Run, seed: int | None) -> Tensor:
    """Of plain torch, which is given the batches of two ranks as one. seed: each gradient is moved by one ulp, up or
    down at random, and 0 stays."""
    found, model = [], built()
    optimizers, draws = pair(model.named_parameters()), torch.Generator().manual_seed(seed or 0)
    for step in range(CURVE):
        loss = loss_of(model, torch.cat([tokens_of(step, rank) for rank in range(2)]))
        found.append(float(loss.detach()))
        loss.backward()
        for p in model.parameters():
            if seed is not None:
                up = torch.rand(p.shape, generator=draws) < 0.5
                p.grad = torch.where(p.grad == 0, 0, torch.nextafter(p.grad, torch.where(up, torch.inf, -torch.inf)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.promise("muon-two-ranks-near")
def test_losses_on_two_ranks_differ_as_those_of_runs_whose_gradients_are_moved_by_one_ulp(ranks: Any) -> None:
    run = Run("mixed")
    exact = plain_losses(run, None)
    spread = max(float((plain_losses(run, seed) - exact).abs().max()) for seed in range(MOVED))
    ours = torch.tensor(ranks(2).run(losses_of, run), dtype=torch.float64).mean(0)
    assert exact[-1] < exact[0] - 1 and spread < 0.05
    assert float((ours - exact).abs().max()) <= 2 * spread


# -- states from before, and for later ---------------------------------------------------------------------------------


def states_of(model: nn.Module) -> dict[str, Tensor]:
    """Whole masters and momenta, by name."""
    momenta = {
        f"{name}.momentum": zero_core.full_state(p, "momentum_buffer")
        for name, p in model.named_parameters()
        if is_matrix(name, p)
    }
    return kit.named_values(model, master=True) | momenta


def saved(folder: str, run: Run) -> dict[str, Tensor]:
    with small_chunks():
        model = built()
        optimizer = sharded(run, model, pair(model.named_parameters()))
        steps(optimizer, model, 0, 2)
        checkpoint.save(folder, model, optimizer)
        found = states_of(model)
        optimizer.close()
    return found


def loaded(folder: str, run: Run) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """States as they were loaded, and masters one step later."""
    with small_chunks():
        torch.manual_seed(7)
        model = Model(WIDTH, 2, VOCABULARY)
        optimizer = sharded(run, model, pair(model.named_parameters()))
        checkpoint.load(folder, model, optimizer)
        found = states_of(model)
        steps(optimizer, model, 2, 3)
        later = kit.named_values(model, master=True)
        optimizer.close()
    return found, later


@pytest.mark.parametrize("sizes", [(2, 1), (1, 4), (4, 2)], ids=str)
def test_a_checkpoint_loads_on_another_number_of_ranks(ranks: Any, sizes: tuple[int, int], tmp_path: Any) -> None:
    before, after = sizes
    (found, *others) = ranks(before).run(saved, str(tmp_path), Run("mixed", dtype=torch.bfloat16))
    assert all(not apart(other, found) for other in others)
    (stayed, *_) = ranks(before).run(loaded, str(tmp_path), Run("none", 2, dtype=torch.bfloat16))
    assert not apart(stayed[0], found)
    for states, _ in ranks(after).run(loaded, str(tmp_path), Run("host", dtype=torch.bfloat16)):
        assert not apart(states, found)
    if after == 1:
        (there,) = ranks(1).run(loaded, str(tmp_path), Run("none", dtype=torch.bfloat16))
        (here,) = ranks(1).run(loaded, str(tmp_path), Run("host", dtype=torch.bfloat16))
        assert not apart(there[1], here[1])


def full_states() -> dict[str, Any]:
    with small_chunks():
        model, loads = built(), built()
        optimizer = sharded(Run("none"), model, pair(model.named_parameters()))
        steps(optimizer, model, 0, 2)
        full = optimizer.full_state_dict()
        again = sharded(Run("host"), loads, pair(loads.named_parameters()))
        again.load_state_dict(full)
        ours, theirs = (states_of(each) for each in (loads, model))
        assert not [name for name in apart(ours, theirs) if name.endswith("momentum")]
        again.close()
        zero_core.unshard(model)
    return full


def test_full_states_of_two_ranks_are_plain_torchs(ranks: Any) -> None:
    full = ranks(2).run(full_states)[0]
    both = zero_core.JointOptimizer(*pair(built().named_parameters()))
    both.load_state_dict(full)
    assert full["state"][0]["momentum_buffer"].shape == (4 * WIDTH, WIDTH)


@pytest.mark.promise("muon-states")
@kit.on_ranks(2)
def test_a_durable_run_of_two_ranks_goes_on_and_becomes_a_checkpoint(tmp_path: Any) -> None:
    rank, _ = kit.world()
    expected = plain(Run(), 2)
    with small_chunks():
        disk = Slab(tmp_path, name=f"run.{rank}", allow_memory=True)
        model, optimizer, _ = durable(disk)
        steps(optimizer, model, 0, 2)
        zero_core.commit(model)
        optimizer.close()
        disk.close()
        dist.barrier()  # the other rank's is closed too
        if rank == 0:
            both = zero_core.JointOptimizer(*pair(built().named_parameters()))
            slabs = [Slab(tmp_path, name=f"run.{place}", allow_memory=True) for place in range(2)]
            assert write_checkpoint(slabs, tmp_path / "kept", step=zero_optim_cpu.CpuStep(), optimizer=both)[0] == 2
            for each in slabs:
                each.close()
        dist.barrier()
        disk = Slab(tmp_path, name=f"run.{rank}", allow_memory=True)
        model, optimizer, resumed = durable(disk)
        assert resumed.step == 2
        steps(optimizer, model, 2, STEPS)
        assert not apart(kit.named_values(model, master=True), expected)
        optimizer.close()
        disk.close()
        assert not apart(loaded(str(tmp_path / "kept"), Run("host"))[1], expected)


def killed() -> dict[str, Tensor]:
    """Masters of a durable run that went on after a crash, which lost what no commit had made safe."""
    rank = kit.world()[0]
    with small_chunks():
        disk = CrashByteStore()
        model, optimizer, _ = durable(disk)
        steps(optimizer, model, 0, 2)
        zero_core.commit(model)
        optimizer.close()
        model, optimizer, resumed = durable(disk.crashed(random.Random(rank)))
        assert resumed.step == 2
        steps(optimizer, model, 2, STEPS)
        masters = kit.named_values(model, master=True)
        optimizer.close()
    return masters


def test_a_crashed_run_of_two_ranks_goes_on(ranks: Any) -> None:
    expected = plain(Run(), 2)
    assert not any(apart(masters, expected) for masters in ranks(2).run(killed))


# -- what it takes -----------------------------------------------------------------------------------------------------


def planned_and_held(run: Run) -> tuple[Any, Any, int, int]:
    with small_chunks():
        model = built()
        store = store_of(run)
        assert store is not None
        optimizers = pair(model.named_parameters())
        rank, size = kit.world()
        options: dict[str, Any] = dict(zip(("parameters", "gradients", "optimizer"), PLACES[run.place], strict=True))
        step = step_for(zero_core.JointOptimizer(*optimizers), zero_optim_cpu.CpuStep(threads=1))
        planned = plan(
            model, step=step, shard_count=size, rank=rank, stage=run.stage, tile_numel=run.tile,
            parameter_dtype=run.dtype or torch.float32, reduce_dtype=torch.float32, **options,
        )  # fmt: skip
        optimizer = zero_core.shard(
            model, optimizers, stage=run.stage, store=store, param_dtype=run.dtype, reduce_dtype=torch.float32
        )
        steps(optimizer, model, 0, 2)
        held, pool = store.describe(), zero_core.handle(model).engine.pool.peak_nbytes
        assert held.held == planned.store.held and held.arena_bytes == planned.store.arena_bytes
        buffers = planned.held["device", "buffers"] + planned.held.get(("device", "parameters"), 0)
        optimizer.close()
    return planned.shape.longest, sum(unit.spec.numel for unit in held.units), pool, buffers


@pytest.mark.promise("owners-plan")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("run", [Run("nvme"), Run("mixed", 2, dtype=torch.bfloat16)], ids=str)
def test_the_plan_of_each_rank_is_what_its_store_reserves(ranks: Any, size: int, run: Run) -> None:
    found = ranks(size).run(planned_and_held, run)
    numels = [numel for _, numel, _, _ in found]
    assert all(longest == pytest.approx(max(numels) * size / sum(numels)) for longest, *_ in found)
    for _, _, pool, buffers in found:
        assert pool <= buffers


@pytest.mark.promise("owners-plan")
def test_a_plan_is_of_the_rank_that_has_most_and_says_how_much_that_is() -> None:
    model = built()
    step = step_for(zero_core.JointOptimizer(*pair(model.named_parameters())), zero_optim_cpu.CpuStep(threads=1))
    of_ranks = [plan(model, step=step, shard_count=3, rank=rank, optimizer="nvme") for rank in range(3)]
    most = max(range(3), key=lambda rank: sum(run.unit.spec.numel * run.count for run in of_ranks[rank].store.runs))
    whole = plan(model, step=step, shard_count=3, optimizer="nvme")
    assert whole.held == of_ranks[most].held and whole.shape.rank == most
    assert ("trained elements of the rank with most", f"{whole.shape.longest:.3f} of the mean") in whole.facts()
    with pytest.raises(ValueError, match="rank=3 of shard_count=3"):
        plan(model, step=step, shard_count=3, rank=3)


# -- what else is done with shards -------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["none", "mixed"])
@kit.on_ranks(2)
def test_a_second_stage_sleep_and_writes(place: str) -> None:
    """From equal shards of AdamW to owners, and back: every master keeps its bits."""
    with small_chunks():
        model = built()
        zero_core.shard(model, torch.optim.AdamW(model.parameters()), store=store_of(Run(place)))
        before = kit.named_values(model, master=True)
        optimizer = sharded(Run(place), model, pair(model.named_parameters()))
        assert not apart(kit.named_values(model, master=True), before)
        steps(optimizer, model, 0, 1)
        stepped = kit.named_values(model, master=True)
        zero_core.sleep(model, MemoryByteStore() if place == "none" else None)
        zero_core.wake(model)
        assert not apart(kit.named_values(model, master=True), stepped)
        with zero_core.gathered(model), torch.no_grad():
            model.layers[1].up.weight[3, 5] = 7.0
        now = kit.named_values(model, master=True)
        assert apart(now, stepped) == ["layers.1.up.weight"]
        assert int((now["layers.1.up.weight"] != stepped["layers.1.up.weight"]).sum()) == 1
        average = zero_core.AveragedModel(model)
        average.update_parameters()
        with average.swapped_in():
            assert not apart(kit.named_values(model, master=True), now)
        average.close()
        zero_core.shard(model, torch.optim.AdamW(model.parameters()), store=store_of(Run(place)))
        assert not apart(kit.named_values(model, master=True), now)
        zero_core.unshard(model)
        assert not apart({name: p.detach() for name, p in model.named_parameters()}, now)


class Beside(nn.Module):
    """A matrix, and a long vector that is cut beside it."""

    def __init__(self, rows: int, columns: int, length: int) -> None:
        super().__init__()
        self.matrix, self.vector = nn.Parameter(torch.randn(rows, columns)), nn.Parameter(torch.randn(length))


def read_beside() -> list[str]:
    """Names of what is read otherwise than it was given. Rank 1 owns the matrix of the second block."""
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList([Beside(40, 40, 8), Beside(5, 10, 3000)])
    given = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = zero_core.shard(model, pair(model.named_parameters()))
    ranges = next(unit.layout.ranges for unit in zero_core.handle(model).engine.units if "1" in unit.name)
    assert ranges is not None and ranges[0][0] > ranges[1][0], "the shards do not lie in another order than the ranks"
    found = {name: zero_core.full_state(p, "master") for name, p in model.named_parameters()}
    whole = kit.named_values(model)
    optimizer.close()
    return apart(found, given) + apart(whole, given)


def test_a_vector_that_is_cut_is_read_in_its_order_whoever_owns_the_matrix_beside_it(ranks: Any) -> None:
    """Fails if its pieces are joined in the order of the ranks."""
    assert ranks(2).run(read_beside) == [[]] * 2
