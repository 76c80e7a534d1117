"""Full gradients and states over a TieredStore, on every tier: what is written is stepped, and clipped by its norm.
Or by torch's own functions: the same bits in host memory and on NVMe, near plain torch's.

Units have several tiles, so that one parameter lies on several tiers. Fails if an edit misses the running norm, goes to
another tile, is lost on its way through slots, or reaches a discrete device in another order.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_core
from tests import kit
from tests.chunks import TILE, small_chunks
from tests.integration.zero_core import toys
from tests.integration.zero_core.test_full_states import same, shared, steps
from tests.integration.zero_offload.training import Model, loss_of, tiered
from tests.unit.zero_offload import simulated
from zero_core import full_gradient, full_state, set_full_gradient, set_full_state
from zero_offload import MemoryByteStore, OffloadError, TieredStore

CLIP = 0.5
MIXED = {"host": 0.4, "nvme": 0.3, "extra": 0.3}
CLASSIC = {"parameters": "device", "gradients": "host", "optimizer": "nvme"}
HALF = {"device": 0.5, "host": 0.5}


def store_of(placement: Any, **arguments: Any) -> TieredStore:
    tiers = {"extra": MemoryByteStore()}
    return tiered(placement, tile_numel=TILE, streams=simulated.streams(), tiers=tiers, **arguments)


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


def edit_discrete(placement: Any, stage: int) -> None:
    with simulated.simulated_device():
        edit(placement, stage)


EDITS = [(edit, place, stage, 1) for place in ("host", "nvme", MIXED) for stage in (0, 3)]
EDITS += [(edit, "host", 1, 2), (edit, MIXED, 3, 2)]
EDITS += [(edit_discrete, place, 3, 1) for place in ("host", "nvme", "device", HALF, CLASSIC)]


@pytest.mark.promise("full-values-tiers")
@pytest.mark.parametrize("run, placement, stage, size", EDITS, ids=lambda each: getattr(each, "__name__", str(each)))
def test_edits_are_those_of_plain_torch_bit_for_bit(
    ranks: Any, run: Any, placement: Any, stage: int, size: int
) -> None:
    ranks(size).run(run, placement, stage)


@pytest.mark.promise("full-values-tiers")
@pytest.mark.advice("Or round the values first")
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


# -- torch's own clipping ----------------------------------------------------------------------------------------------


def clip(model: nn.Module, step: int) -> Tensor:
    """Of all parameters; of some; of all to another norm; by value."""
    if step % 4 == 3:
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        return torch.zeros(())
    given = list(model.parameters())[: 3 if step % 4 == 1 else None]
    return nn.utils.clip_grad_norm_(given, 0.3, norm_type=torch.inf if step % 4 == 2 else 2.0)


def clipped(placement: Any, overlap: bool) -> list[Tensor]:
    dense, model = kit.twins(lambda: Model(64, 2))
    theirs = sgd(dense.parameters())
    with small_chunks():
        ours = zero_core.shard(model, sgd(model.parameters()), store=store_of(placement, overlap=overlap))
        for step in range(5):
            for each in (model, dense):
                loss_of(each, step, 0).backward()
            torch.testing.assert_close(clip(model, step), clip(dense, step), rtol=1e-5, atol=1e-6)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        found = [p.detach().clone() for p in model.parameters()]
        ours.close()
    torch.testing.assert_close(found, list(dense.parameters()), rtol=1e-5, atol=1e-6)
    return found


@pytest.mark.promise("stock-clipping-reads-none")
@pytest.mark.parametrize("placement", ["nvme", MIXED], ids=["nvme", "mixed"])
def test_clipping_gives_the_same_bits_on_every_tier_and_those_of_plain_torch_nearly(placement):
    host = clipped("host", overlap=True)
    for overlap in (True, False):
        for a, b in zip(clipped(placement, overlap), host, strict=True):
            assert torch.equal(a, b)


# -- optimizer.full_state_dict(): torch's format, and the same bits from any tier --------------------------------------


PLACEMENTS = (("host",), ("host", "host", {"host": 0.5, "nvme": 0.5}), ("nvme",))


def stored(build, place, dtype, stage):
    torch.manual_seed(0)
    model = toys.Frozen()
    store = tiered(*PLACEMENTS[place])
    return model, zero_core.shard(model, build(model.parameters()), store=store, stage=stage, param_dtype=dtype)


def run(model, optimizer, first, last):
    for step in range(first, last):
        data = toys.data(step, 0).to(next(model.parameters()).dtype)
        kit.step(optimizer, toys.loss_of(model, data))


def equal(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            equal(found[key], value)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected) and found.dtype == expected.dtype
    else:
        assert found == expected


def go_on(build, dtype):
    model, optimizer = stored(build, 0, dtype, 3)
    run(model, optimizer, 0, 2)
    found, weights = shared(optimizer.full_state_dict()), {n: v.clone() for n, v in model.state_dict().items()}
    run(model, optimizer, 2, 4)
    last = optimizer.full_state_dict()
    for place, stage in ((1, 2), (2, 3)):
        other, again = stored(build, place, dtype, stage)
        run(other, again, 0, 1)
        other.load_state_dict(weights)
        equal({name: value.clone() for name, value in other.state_dict().items()}, dict(weights))
        again.load_state_dict(found)
        run(other, again, 2, 4)
        equal(again.full_state_dict(), last)
        again.close()
    optimizer.close()
    if last and dtype == torch.float32:
        torch.manual_seed(0)
        dense = toys.Frozen()
        theirs = build(dense.parameters())
        steps(dense, theirs, 0, 4)
        same(last["state"], theirs.state_dict()["state"])


@pytest.mark.promise("full-state-bits")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "build, dtype", [(toys.adamw, torch.float32), (toys.adamw, torch.bfloat16), (toys.sgd, torch.bfloat16)]
)
def test_states_travel_between_tiers(ranks, build, dtype, size):
    ranks(size).run(go_on, build, dtype)
