"""torch.optim.Muon on several ranks at stages 1 to 3: each matrix lies whole with one rank, its owner.

The plain run is that of `test_muon`: a dense model that is given the batches of all ranks.
"""

import os
from dataclasses import replace
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
from examples.soap import SOAP
from tests import kit
from tests.chunks import TILE, small_chunks
from tests.integration.zero_offload import test_muon as muon
from tests.integration.zero_offload.test_muon import STEPS, Run, apart, begun, built, pair, plain, steps
from zero_core import checkpoint
from zero_nvme import Slab
from zero_offload import MemoryByteStore, plan, step_for, write_checkpoint

pytestmark = [
    pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon"),
    pytest.mark.promise("muon-owners"),
]

STAGES = (1, 2, 3)


def train_all(runs: list[Run]) -> list[dict[str, Tensor]]:
    return [muon.train(run) for run in runs]


OTHERS = [
    Run("mixed", dtype=torch.bfloat16),
    Run("halves", tile=64 * TILE, overlap=False),
    Run("nvme", 2, dtype=torch.bfloat16),
    Run("homes"),
    Run("whole", dtype=torch.bfloat16),
    Run("none", muon=(("nesterov", False), ("ns_steps", 3))),
    Run("mixed", clip=None, in_backward=True),
    *(Run(place, stage, kind=SOAP) for place, stage in (("none", 1), ("host", 3), ("nvme", 2), ("mixed", 3))),
]
ON_STAGES = [[Run(place, stage) for stage in STAGES] for place in ("none", "host", "nvme", "mixed")]


@pytest.mark.parametrize(
    "size, runs",
    [*((size, runs) for size in (2, 4) for runs in ON_STAGES), (2, OTHERS)],
    ids=lambda each: str(each)[:30],
)
def test_ranks_that_own_matrices_have_the_bits_of_plain_torch(ranks: Any, size: int, runs: list[Run]) -> None:
    expected = [plain(run, size) for run in runs]
    for of_rank in ranks(size).run(train_all, runs):
        for run, ours, theirs in zip(runs, of_rank, expected, strict=True):
            assert not apart(ours, theirs), run


def fed(run: Run, no_sync: bool, shape: tuple[int, int] | None, machines: int) -> list[str]:
    """What differs from plain optimizers, which step with the gradients that our ranks have."""
    rank, size = kit.world()
    model, options = built(), {}
    if shape is not None:
        options["mesh"] = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))

    def shard() -> Any:
        with mock.patch.dict(os.environ, GROUP_RANK=str(rank * machines // size)):
            return muon.sharded(run, model, pair(model.named_parameters()), secondary_shards=machines > 1, **options)

    return muon.fed(run, model, shard, no_sync=no_sync)


@pytest.mark.parametrize(
    "size, run, no_sync, shape, machines",
    [
        (2, Run("host", 3, accumulate=2), True, None, 1),
        (2, Run("mixed", 2, accumulate=3), False, None, 1),
        (4, Run("host"), False, (2, 2), 1),
        (2, Run("nvme", 1, accumulate=2), False, None, 1),
        (4, Run("mixed", dtype=torch.float32, accumulate=2), False, None, 2),
    ],
    ids=str,
)
def test_accumulation_replicas_and_machines_have_the_bits_of_plain_torch_with_our_gradients(
    ranks: Any, size: int, run: Run, no_sync: bool, shape: Any, machines: int
) -> None:
    assert ranks(size).run(fed, run, no_sync, shape, machines) == [[]] * size


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
    expected = {name for name, p in built().named_parameters() if muon.is_matrix(name, p)}
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
    with small_chunks():
        model, optimizer = begun(run)
        found = [float(kit.step(optimizer, muon.own_loss_of(model, step))) for step in range(CURVE)]
        optimizer.close()
    return found


def plain_losses(run: Run, seed: int | None) -> Tensor:
    """Of plain torch, which is given the batches of two ranks as one. seed: each gradient is moved by one ulp, up or
    down at random, and 0 stays."""
    found, model = [], built()
    optimizers, draws = pair(model.named_parameters()), torch.Generator().manual_seed(seed or 0)
    for step in range(CURVE):
        loss = muon.loss_of(model, torch.cat([muon.tokens_of(step, rank) for rank in range(2)]))
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


STATES = {None: ("momentum_buffer",), SOAP: ("left", "right", "exp_avg")}


def saved(folder: str, run: Run) -> dict[str, Tensor]:
    with small_chunks():
        model, optimizer = begun(run)
        steps(optimizer, model, 0, 2)
        checkpoint.save(folder, model, optimizer, tile_numel=3 * muon.WIDTH**2)  # so that a state takes several boxes
        found = muon.states_of(model, STATES[run.kind])
        optimizer.close()
    return found


def loaded(folder: str, run: Run) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """States as they were loaded, and masters one step later."""
    with small_chunks():
        model, optimizer = begun(run)
        checkpoint.load(folder, model, optimizer)
        found = muon.states_of(model, STATES[run.kind])
        steps(optimizer, model, 2, 3)
        later = kit.named_values(model, master=True)
        optimizer.close()
    return found, later


@pytest.mark.promise("muon-states", "soap")
@pytest.mark.parametrize(
    "sizes, kind", [((2, 1), None), ((1, 4), None), ((4, 2), None), ((2, 1), SOAP), ((1, 1), SOAP)]
)
def test_a_checkpoint_loads_on_another_number_of_ranks(ranks: Any, sizes: Any, kind: Any, tmp_path: Any) -> None:
    before, after = sizes
    run = Run("mixed", dtype=torch.bfloat16, kind=kind)
    (found, *others) = ranks(before).run(saved, str(tmp_path), run)
    assert all(not apart(other, found) for other in others)
    for size, place, stage in ((before, "none", 2), (after, "host", 3), (after, "whole", 3)):
        for states, _ in ranks(size).run(loaded, str(tmp_path), replace(run, place=place, stage=stage)):
            assert not apart(states, found), place
    names = torch.distributed.checkpoint.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    of = "optim.state.layers.0.up."
    kept = sorted(name.removeprefix(of) for name in names if name.startswith(f"{of}bias."))
    assert kept == ["bias.exp_avg", "bias.exp_avg_sq", "bias.step"]
    assert (f"{of}weight.momentum_buffer" in names) is (kind is None)
    assert kind is None or names[f"{of}weight.left"].size == (4 * muon.WIDTH, 4 * muon.WIDTH)


def full_states() -> dict[str, Any]:
    with small_chunks():
        model, optimizer = begun(Run("none"))
        steps(optimizer, model, 0, 2)
        full = optimizer.full_state_dict()
        loads, again = begun(Run("host"))
        again.load_state_dict(full)
        ours, theirs = (muon.states_of(each) for each in (loads, model))
        assert not [name for name in apart(ours, theirs) if name.endswith("momentum")]
        again.close()
        zero_core.unshard(model)
    return full


def test_full_states_of_two_ranks_are_plain_torchs(ranks: Any) -> None:
    full = ranks(2).run(full_states)[0]
    both = zero_core.JointOptimizer(*pair(built().named_parameters()))
    both.load_state_dict(full)
    assert full["state"][0]["momentum_buffer"].shape == (4 * muon.WIDTH, muon.WIDTH)


@pytest.mark.promise("muon-states")
@kit.on_ranks(2)
def test_a_durable_run_of_two_ranks_goes_on_and_becomes_a_checkpoint(tmp_path: Any) -> None:
    rank, _ = kit.world()
    expected = plain(Run(), 2)
    with small_chunks():
        disk = Slab(tmp_path, name=f"run.{rank}", allow_memory=True)
        model, optimizer, _ = muon.durable(disk)
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
        model, optimizer, resumed = muon.durable(disk)
        assert resumed.step == 2
        steps(optimizer, model, 2, STEPS)
        assert not apart(kit.named_values(model, master=True), expected)
        optimizer.close()
        disk.close()
        assert not apart(loaded(str(tmp_path / "kept"), Run("host"))[1], expected)


# -- what it takes -----------------------------------------------------------------------------------------------------


def planned_and_held(run: Run) -> tuple[Any, int, int, int]:
    with small_chunks():
        model = built()
        planned, held, optimizer = muon.as_planned(run, model, pair(model.named_parameters()))
        steps(optimizer, model, 0, 2)
        pool = zero_core.handle(model).engine.pool.peak_nbytes
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
        zero_core.shard(model, torch.optim.AdamW(model.parameters()), store=muon.store_of(Run(place)))
        before = kit.named_values(model, master=True)
        optimizer = muon.sharded(Run(place), model, pair(model.named_parameters()))
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
        zero_core.shard(model, torch.optim.AdamW(model.parameters()), store=muon.store_of(Run(place)))
        assert not apart(kit.named_values(model, master=True), now)
        zero_core.unshard(model)
        assert not apart({name: p.detach() for name, p in model.named_parameters()}, now)


class Beside(nn.Module):
    """A matrix, and a long vector that is cut beside it."""

    def __init__(self, rows: int, columns: int, length: int) -> None:
        super().__init__()
        self.matrix, self.vector = nn.Parameter(torch.randn(rows, columns)), nn.Parameter(torch.randn(length))


@kit.on_ranks(2)
def test_a_vector_that_is_cut_is_read_in_its_order_whoever_owns_the_matrix_beside_it() -> None:
    """Fails if its pieces are joined in the order of the ranks. Rank 1 owns the matrix of the second block."""
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
    assert not apart(found, given) and not apart(whole, given)
