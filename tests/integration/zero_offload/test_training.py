"""A real model through zero_core.shard: the same bits on host and nvme, near DeviceStore's, on 1 and 2 ranks.

Fails if a unit's hand-over, its gradients or the order of its updates depend on where its shards are.
"""

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_core
from tests import kit
from tests.chunks import TILE, small_chunks
from tests.integration.zero_core import toys
from tests.integration.zero_core.generating import generate_between
from tests.integration.zero_core.test_forward_in_backward import MODELS
from tests.integration.zero_core.test_graph_asks import FORMS, Model, first, size_of, trains_as_torch
from tests.integration.zero_offload.training import Case, Outcome, tiered, train
from zero_core.gradients.loss_scaling import LossScale
from zero_offload import MemoryByteStore, OffloadError, SwapError, TieredStore, TorchStep
from zero_offload.testing import FaultyByteStore

EVERYWHERE = ["nvme", {"host": 0.5, "nvme": 0.5}, {"parameters": "nvme", "gradients": "host", "optimizer": "nvme"}]


def equal(left: Outcome, right: Outcome, norms: bool = True) -> bool:
    return (
        left.losses == right.losses
        and (left.norms == right.norms or not norms)
        and all(torch.equal(left.parameters[name], right.parameters[name]) for name in right.parameters)
    )


@pytest.mark.promise("accumulation-tiers")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_same_bits_over_tiers(ranks: Any, size: int, accumulate: int) -> None:
    """Through slots in which none of eight tiles stays, two of them, and all."""
    expected = ranks(size).run(train, Case("host", overlap=False, accumulate=accumulate, layers=5))
    for number, (placement, slots) in enumerate(product(EVERYWHERE, (3, 6, 40))):
        case = Case(placement, overlap=number != 1, accumulate=accumulate, layers=5, store={"slots": slots})
        for mine, theirs in zip(ranks(size).run(train, case), expected, strict=True):
            assert equal(mine, theirs), (placement, slots)


IN_BACKWARD = {"max_grad_norm": None, "update_in_backward": True}


@pytest.mark.parametrize(
    ("size", "given", "found"),
    [
        # Parameters on the host: below stage 3 they are whole in memory anyway.
        *((2, {"stage": stage}, {"placement": EVERYWHERE[2] | {"parameters": "host"}}) for stage in (0, 1, 2)),
        *((size, {}, {"placement": place, "shard": IN_BACKWARD}) for size in (1, 2) for place in ("host", "nvme")),
    ],
)
def test_other_stages_and_updates_in_backward_have_the_same_bits(ranks: Any, size: int, given: Any, found: Any) -> None:
    shard = {"max_grad_norm": None} if "shard" in found else {}
    expected = ranks(size).run(train, Case("host", shard=shard, **given))
    for mine, theirs in zip(ranks(size).run(train, Case(**given, **found)), expected, strict=True):
        assert equal(mine, theirs, norms=not shard)


@pytest.mark.promise("units-on-some-ranks")
@pytest.mark.parametrize("stage", [0, 1, 2])
@kit.on_ranks(2)
def test_units_that_only_some_ranks_run_train_over_tiers(stage):
    store = TieredStore("host", "host", {"host": 0.5, "nvme": 0.5}, nvme=MemoryByteStore(), step=TorchStep())
    toys.train(toys.Sometimes, steps=9, stage=stage, store=store, find_unused_parameters=True)


def test_loss_scaling_skips_and_recovers(ranks: Any) -> None:
    """fp16 with a scale that overflows at first: those steps change nothing, with and without nvme alike."""

    def run(placement: str) -> Outcome:
        scaled = {"param_dtype": torch.float16, "loss_scale": LossScale(2.0**19)}
        return ranks(1).run(train, Case(placement, steps=6, shard=scaled))[0]

    expected, found = run("host"), run("nvme")
    assert not all(map(math.isfinite, expected.norms)) and math.isfinite(expected.norms[-1])
    assert found.losses == expected.losses
    assert all(torch.equal(found.parameters[name], value) for name, value in expected.parameters.items())


@pytest.mark.promise("inference-in-flight")
@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 20])
def test_evaluation_under_inference_mode_over_nvme(prefetch_bytes):
    """What the tier makes meanwhile is written by its own thread afterwards, which inference tensors do not allow."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    everything = dict.fromkeys(("parameters", "gradients", "optimizer"), "nvme")
    store = TieredStore(nvme=MemoryByteStore(), step=TorchStep(), tile_numel=1 << 20, **everything)
    optimizer = zero_core.shard(
        model, torch.optim.AdamW(model.parameters()), store=store, prefetch_bytes=prefetch_bytes
    )
    for _ in range(2):
        kit.step(optimizer, model(torch.ones(2, 8)).square().mean())
        with torch.inference_mode():  # updates are still under way
            assert model(torch.ones(2, 8)).isfinite().all()
    optimizer.close()


@pytest.mark.promise("inference-writes")
def test_a_write_in_a_forward_under_inference_mode_reaches_states_on_nvme():
    """The store reads the master's tile to change it, into memory that its own threads go on writing to."""

    class Clamping(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(*(Clamping(8, 8) for _ in range(2)))
    store = TieredStore("device", "device", "nvme", nvme=MemoryByteStore(), step=TorchStep(), tile_numel=1 << 20)
    optimizer = zero_core.shard(model, torch.optim.AdamW(model.parameters()), store=store)
    with torch.inference_mode():
        model(torch.ones(2, 8))
        model[0].bias.copy_(model[0].bias * 0 + 2)  # outside of its forward: the values go straight to the store
    with zero_core.gathered(model, master=True):
        assert all(layer.weight.abs().max() == 0.1 for layer in model)
        assert model[0].bias.tolist() == [2.0] * 8
    optimizer.close()


@pytest.mark.promise("shared-memory")
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_an_attribute_over_a_parameter_follows_it_on_a_tier(tier: str) -> None:
    """Fails if the attribute shows the memory that the parameter had, or another than the one that was read."""

    class Shown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
            self.kept = [self.first.weight.detach(), self.last.weight.data]

        def forward(self, x: Tensor) -> Tensor:
            return (self.last(torch.tanh(self.first(x))) @ self.kept[1]) @ self.kept[0].t()

    def run(model: nn.Module, optimizer: Any) -> list[Tensor]:
        found = []
        for _ in range(4):
            found.append(kit.step(optimizer, model(torch.linspace(-1, 1, 32).view(4, 8)).square().sum()))
        return found

    dense, model = Shown(), Shown()
    expected = run(dense, torch.optim.Adam(dense.parameters(), lr=0.02))
    store = TieredStore(tier, tier, tier, nvme=MemoryByteStore(), step=TorchStep())
    optimizer = zero_core.shard(
        model, torch.optim.Adam(model.parameters(), lr=0.02), store=store, units=[nn.Linear], resident_bytes=0
    )
    torch.testing.assert_close(run(model, optimizer), expected, rtol=1e-4, atol=1e-5)
    optimizer.close()


def nvme() -> TieredStore:
    return TieredStore("nvme", "nvme", "nvme", MemoryByteStore(), TorchStep())


@pytest.mark.promise("generation-synced")
@pytest.mark.parametrize("size", [2, 3])
def test_generation_of_unequal_length_from_nvme(ranks: Any, small_chunks: None, size: int) -> None:
    """The text of the plain model, and the same bits: fails if a rank that is done reads other shards."""
    pytest.importorskip("transformers")
    ranks(size).run(generate_between, 3, {"param_dtype": torch.bfloat16, "prefetch_bytes": 60_000}, nvme)


# -- where it cannot begin --------------------------------------------------------------------------------------------


@pytest.mark.promise("io-error-attach")
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("after", [0, 2])
def test_a_disk_that_fails_at_shard_leaves_the_model_as_it_was(after: int, deferred: bool) -> None:
    if deferred:
        with zero_core.deferred_init(seed=0):
            model = toys.Stack()
    else:
        model = toys.Stack()
    before = [None if p.is_meta else p.detach().clone() for p in model.parameters()]
    optimizer = toys.adamw(model.parameters())
    disk = FaultyByteStore(MemoryByteStore())
    disk.fail("write", after=after)
    with pytest.raises(SwapError, match="writing"):
        zero_core.shard(model, optimizer, store=tiered("nvme", nvme=disk))
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert parameter.is_meta if value is None else torch.equal(parameter, value)
    sharded = zero_core.shard(model, optimizer, store=tiered("nvme"))
    kit.step(sharded, toys.loss_of(model, toys.data(0, 0)))
    with zero_core.gathered(model):
        assert deferred or not all(torch.equal(p, v) for p, v in zip(model.parameters(), before, strict=True))
    sharded.close()


@pytest.mark.promise("second-store")
def test_a_store_that_a_model_has_is_refused_to_another_and_stays_open() -> None:
    torch.manual_seed(0)
    first, second = toys.Stack(), toys.Stack()
    store = tiered("host")
    optimizer = zero_core.shard(first, toys.sgd(first.parameters()), store=store)
    with pytest.raises(OffloadError, match="has a model already: make a new TieredStore for this model"):
        zero_core.shard(second, toys.sgd(second.parameters()), store=store)
    before = [p.detach().clone() for p in first.parameters()]
    toys.loss_of(first, toys.data(0, 0)).backward()
    optimizer.step()
    assert not all(torch.equal(p.detach(), q) for p, q in zip(first.parameters(), before, strict=True))
    other = zero_core.shard(second, toys.sgd(second.parameters()), store=tiered("host"))
    toys.loss_of(second, toys.data(0, 0)).backward()
    other.step()
    optimizer.close(), other.close()


def store(place):
    return tiered(place, tile_numel=TILE)


@pytest.mark.promise("gradient-enters-inside")
@kit.on_ranks(1, 2)
@pytest.mark.parametrize("place", ["host", "nvme"])
def test_a_loss_of_what_a_block_kept_on_every_tier(place):
    with small_chunks():
        for number, form in enumerate(FORMS):
            ahead = {} if number % 2 else {"prefetch_bytes": 0}
            trains_as_torch(Model, form, store=store(place), tolerance=1e-5, **ahead)


def through_the_output(model, x):
    size_of(model(x)[0]).backward()


@pytest.mark.promise("gradient-enters-memory")
def test_a_unit_that_is_opened_late_is_in_the_plan():
    """What is skipped on the way to it is opened and closed in the order that was planned."""

    def most(form):
        model, optimizer = kit.sharded(lambda: Model(blocks=6), stage=3, store=store("nvme"), prefetch_bytes=0)
        units, found = zero_core.units(model), []

        def count(module, *args):
            found.append(sum(unit.nbytes for unit in units if unit.residency.unsharded))

        for block in model.blocks:
            block.k.register_full_backward_hook(count)
        form(model, torch.ones(4, 5))
        optimizer.zero_grad()
        return max(found), model, optimizer

    with small_chunks():
        for form in FORMS:
            assert most(form)[0] <= most(through_the_output)[0]
        assert most(first)[0] > 0


@pytest.mark.promise("forward-in-backward")
@kit.on_ranks(1, 2)
@pytest.mark.parametrize("place", ["host", "nvme"])
def test_forwards_inside_a_backward_train_as_plain_torch(place):
    with small_chunks():
        for name in ("adjoint", "reversible", "equilibrium", "hook inside a block", "energy"):
            toys.train(MODELS[name], steps=2, build=toys.adamw, store=store(place), tolerance=1e-4)
