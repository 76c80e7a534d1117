"""Full gradients and states over a TieredStore, on every tier: what is written is stepped, and clipped by its norm.

Units have several tiles, so that one parameter lies on several tiers. Fails if an edit misses the running norm, goes to
another tile, is lost on its way through slots, or reaches a discrete device in another order.
"""

from typing import Any

import pytest
import torch

import zero_core
from tests import kit
from tests.chunks import TILE, small_chunks
from tests.integration.zero_offload.training import Model, loss_of
from tests.unit.zero_offload import simulated
from zero_core import full_gradient, full_state, set_full_gradient, set_full_state
from zero_offload import MemoryByteStore, OffloadError, TieredStore

pytestmark = pytest.mark.promise("full-values-tiers")

CLIP = 0.5
MIXED = {"host": 0.4, "nvme": 0.3, "extra": 0.3}
CLASSIC = {"parameters": "device", "gradients": "host", "optimizer": "nvme"}
HALF = {"device": 0.5, "host": 0.5}


def store_of(placement: Any, **arguments: Any) -> TieredStore:
    kinds = ("parameters", "gradients", "optimizer")
    by_kind = (
        placement if isinstance(placement, dict) and set(placement) & set(kinds) else dict.fromkeys(kinds, placement)
    )
    tiers = {"extra": MemoryByteStore()}
    options = {"tile_numel": TILE, "streams": simulated.streams(), "tiers": tiers, **arguments}
    return TieredStore(**by_kind, nvme=MemoryByteStore(), **options)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Rates are powers of two: torch's kernels and the store's step round alike."""
    return torch.optim.SGD(parameters, lr=2**-6, momentum=0.5)


def edit(placement: Any, stage: int = 3) -> None:
    rank, size = kit.world()
    dense, model = kit.twins(lambda: Model(64, 2))
    theirs = sgd(dense.parameters())
    with small_chunks():
        ours = zero_core.shard(
            model, sgd(model.parameters()), stage=stage, max_grad_norm=CLIP, store=store_of(placement)
        )
        for step in range(3):
            for micro in range(1 + step % 2):
                loss_of(model, 2 * step + micro, rank).backward()
                for each in range(size):
                    (loss_of(dense, 2 * step + micro, each) / size).backward()
            for a, b in zip(model.parameters(), dense.parameters(), strict=True):
                assert b.grad is not None
                found = full_gradient(a)
                torch.testing.assert_close(found, b.grad, rtol=1e-5 * (size > 1), atol=1e-7 * (size > 1))
                set_full_gradient(a, b.grad.mul_(0.3).add_(0.001))
                assert torch.equal(full_gradient(a), b.grad)
            norm = sum(float(p.grad.double().square().sum()) for p in dense.parameters()) ** 0.5
            for p in dense.parameters():
                p.grad.mul_(min(1.0, CLIP / (norm + 1e-6)))
            for each in (ours, theirs):
                each.step()
                each.zero_grad()
            assert abs(ours.grad_norm - norm) <= 1e-9 * norm
            for a, b in zip(model.parameters(), dense.parameters(), strict=True):
                momentum = theirs.state[b]["momentum_buffer"]
                assert torch.equal(full_state(a, "momentum_buffer"), momentum)
                assert torch.equal(full_state(a, "master"), b.detach())
                set_full_state(a, "momentum_buffer", momentum.mul_(0.5))
        ours.close()


@pytest.mark.parametrize("placement", ["host", "nvme", MIXED], ids=str)
@pytest.mark.parametrize("stage", [0, 3])
def test_edits_on_every_tier_are_those_of_plain_torch_bit_for_bit(placement: Any, stage: int) -> None:
    edit(placement, stage)


@pytest.mark.parametrize("placement", ["host", MIXED], ids=str)
def test_edits_on_two_ranks(ranks: Any, placement: Any) -> None:
    ranks(2).run(edit, placement, 1 if placement == "host" else 3)


@pytest.mark.parametrize("placement", ["host", "nvme", "device", HALF, CLASSIC], ids=str)
def test_edits_with_a_discrete_device(placement: Any) -> None:
    with simulated.simulated_device():
        edit(placement)


@pytest.mark.advice("or round the values first")
@pytest.mark.parametrize("placement", ["host", "nvme", "device", HALF], ids=str)
def test_sixteen_bit_gradients_take_fp32_values_where_there_is_room(placement: Any) -> None:
    """The first gradient of a step is kept in bf16; with memory for one micro-batch there is no more room for it."""
    for accumulate in (None, 1, 2):
        with simulated.simulated_device(), small_chunks():
            torch.manual_seed(0)
            model = Model(64, 1)
            store = store_of(placement, accumulate=accumulate)
            ours = zero_core.shard(model, sgd(model.parameters()), param_dtype=torch.bfloat16, store=store)
            loss_of(model, 0, 0).backward()
            weight = model.layers[0].up.weight
            found = full_gradient(weight)
            others = {name: full_gradient(p) for name, p in model.named_parameters() if p is not weight}
            set_full_gradient(weight, found * 0.5)  # exact in bf16
            assert torch.equal(full_gradient(weight), found * 0.5)
            if accumulate == 1:
                with pytest.raises(
                    OffloadError, match=r"rounded to torch.bfloat16.*accumulate=2.*values.to\(torch.bfloat16"
                ):
                    set_full_gradient(weight, found * 0.3)
                assert torch.equal(full_gradient(weight), found * 0.5)
                rounded = (found * 0.3).to(torch.bfloat16)
                set_full_gradient(weight, rounded)
                assert torch.equal(full_gradient(weight), rounded.float())
            else:
                set_full_gradient(weight, found * 0.3)
                assert torch.equal(full_gradient(weight), found * 0.3)
            assert all(torch.equal(full_gradient(p), others[n]) for n, p in model.named_parameters() if n in others)
            squares = sum(float(full_gradient(p).double().square().sum()) for p in model.parameters())
            ours.step()
            assert ours.grad_norm == pytest.approx(squares**0.5, rel=1e-12)
            ours.close()
