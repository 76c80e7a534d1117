"""What one of 512 ranks on meta tensors sends in a step, and what it holds, equal the closed formulas at every stage.

Everything runs as ever, hooks and schedule and collectives, over a fake process group and tensors without memory. Put
in place of the real thing: first values (empty), the norm (1), and the swap of memory under a unit's views.
"""

import sys
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

import zero_core
from tests import kit, models
from zero_core import memory
from zero_core.comm.ranks import Ranks
from zero_core.optim.device_store import DeviceStore

WORLD = 512
AHEAD = 1 << 30


class NoValues:
    def __init__(self, model: nn.Module, kept: Any) -> None:
        pass

    def shard(self, layout: Any, parameters: Any, rank: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(layout.shard_numel, dtype=dtype, device="meta")

    def release(self) -> None:
        pass


class MetaStore(DeviceStore):
    def gradient_norm_squared(self) -> Tensor:
        return torch.ones((), dtype=torch.float64)


def prepare() -> None:
    """Let meta tensors pass where their memory or values would be asked for."""
    dist.init_process_group("fake", rank=7, world_size=WORLD, store=FakeStore())
    sharding: Any = sys.modules["zero_core.api.shard"]
    sharding.Initialiser = NoValues
    memory_of_units: Any = sys.modules["zero_core.unit_memory.unit_memory"]
    memory_of_units.put_under = lambda flat, memory: None
    memory_of_units.take_away = lambda flat: None

    def alone(self: Ranks, values: Tensor, what: str) -> Tensor:
        return values if values.is_meta else values.mul_(self.size)  # the fake group adds nothing up

    Ranks.numbers = lambda self, values: torch.tensor(values, dtype=torch.float64)
    Ranks.sum_everywhere = alone
    Ranks.agree = lambda self, value, what: True


def large_llama() -> nn.Module:
    """A Llama of 1.1 G parameters, as meta tensors."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=4))


def held(handle: zero_core.Handle) -> Counter[str]:
    """Bytes of everything that the store and the units hold now, by kind."""
    found: Counter[str] = Counter()
    for shard in handle.store._shards:
        found["parameters"] += 0 if shard.parameter is None else shard.parameter.nbytes
        found["optimizer"] += 0 if shard.master is shard.parameter else shard.master.nbytes
        found["gradients"] += shard._own.nbytes
        states = tree_leaves(dict(shard.optimizer.state))
        found["optimizer"] += sum(t.nbytes for t in states if isinstance(t, Tensor) and t.dim())
    for unit in handle.units:
        found["parameters"] += unit.nbytes if unit.residency.value in ("unsharding", "unsharded") else 0
        found["gradients"] += unit.gradient.kept.nbytes if unit.gradient.kept is not None else 0
    return found


def check(stage: int, dtype: torch.dtype, accumulate: int, no_sync: bool = False) -> None:
    """Two steps: what is sent equals the table, what is held the estimate up to padding."""
    options = {"stage": stage, "param_dtype": dtype, "prefetch_bytes": AHEAD, "device": "meta"}
    model, optimizer = kit.sharded(large_llama, torch.optim.AdamW, store=MetaStore(), **options)
    handle, tokens = zero_core.handle(model), torch.zeros(1, 8, dtype=torch.int64, device="meta")
    sent = kit.count_sent(handle.ranks)
    most: Counter[str] = Counter()
    for step in range(2):
        sent.clear()
        for micro in range(accumulate):
            with zero_core.no_sync(model) if no_sync and micro + 1 < accumulate else nullcontext():
                models.loss(model, tokens).backward()
            most |= held(handle)
        optimizer.step()
        optimizer.zero_grad()
        most |= held(handle) if step else Counter()
        compare_sent(handle, sent, stage, accumulate, no_sync)
    compare_held(handle, stage, dtype, accumulate, no_sync, most)


def compare_sent(handle: zero_core.Handle, found: Counter[str], stage: int, accumulate: int, no_sync: bool) -> None:
    padded = sum(unit.layout.numel for unit in handle.units)
    stay = turning_numel(handle) if stage == 3 else 0
    wanted = memory.movement(padded, WORLD, stage, accumulate=accumulate, no_sync=no_sync, resident_numel=stay)
    if stage == 0:  # one all-reduce of every unit
        assert set(found) == {"all_reduce"}, found
        assert found["all_reduce"] == wanted.total_numel, (found, wanted)
        return
    assert found["all_gather"] == wanted.gathered_numel, (stage, found, wanted)
    assert found["reduce_scatter"] == wanted.reduced_numel, (stage, found, wanted)
    assert sum(found.values()) == wanted.total_numel
    if accumulate == 1:
        assert wanted.total_numel == ((3 if stage == 3 else 2) * padded - stay) * (WORLD - 1) // WORLD


def turning_numel(handle: zero_core.Handle) -> int:
    """Elements that stay from a forward to its backward: the model's own, and the last blocks within AHEAD."""
    *blocks, root = sorted(handle.units, key=lambda unit: unit.name == "root")
    stay, left = root.layout.numel, AHEAD
    for unit in reversed(blocks):
        left -= unit.nbytes
        stay += unit.layout.numel if left >= 0 else 0
    return stay


def compare_held(handle: Any, stage: int, dtype: Any, accumulate: int, no_sync: bool, most: Counter[str]) -> None:
    exact = sum(p.numel() for p in handle.model.parameters())
    padded = sum(unit.layout.numel for unit in handle.units)
    largest = max(unit.layout.numel for unit in handle.units)
    options: dict[str, Any] = {"param_dtype": dtype, "accumulate": accumulate, "no_sync": no_sync}
    options |= {"largest_unit_numel": largest, "prefetch_bytes": AHEAD}
    least, estimate = (memory.estimate(numel, WORLD, stage, **options) for numel in (exact, padded))
    # A torch that cannot put the store's memory under the unit's storage copies it, which stage 0 keeps until the step.
    can_swap = sys.modules["zero_core.unit_memory.unit_memory"].CAN_SWAP
    copies = 0 if stage or can_swap else padded * dtype.itemsize
    for kind in ("parameters", "gradients", "optimizer"):
        low, high = (getattr(e, f"{kind}_bytes") for e in (least, estimate))
        high += copies if kind == "parameters" else 0
        assert low <= most[kind] <= high, (stage, dtype, accumulate, no_sync, kind, low, most[kind], high)
    # What is pooled: whole units and gradients on their way. Stages 0 to 2 keep whole parameters, stage 1 gradients.
    kept = 0 if stage == 3 else padded * dtype.itemsize
    kept += padded * (4 if accumulate > 1 else dtype.itemsize) if stage == 1 or no_sync else 0
    room = kept + estimate.unsharded_bytes + estimate.transient_bytes
    one_more = largest * 4  # a free buffer of another unit's size
    assert handle.engine.pool.nbytes <= room + one_more, (stage, dtype, accumulate, handle.engine.pool.nbytes, room)


def check_residency() -> None:
    """What stays unsharded between forward and backward is gathered once a step instead of twice."""
    model, optimizer = kit.sharded(large_llama, store=MetaStore(), resident_bytes=1 << 40, device="meta")
    sent = kit.count_sent(zero_core.handle(model).ranks)
    for _ in range(2):
        sent.clear()
        kit.step(optimizer, models.loss(model, torch.zeros(1, 8, dtype=torch.int64, device="meta")))
    padded = sum(unit.layout.numel for unit in zero_core.units(model))
    assert sent["all_gather"] == memory.movement(padded, WORLD, 3, resident_numel=padded).gathered_numel


def main() -> None:
    prepare()
    check_residency()
    for stage in (0, 1, 2, 3):
        for dtype, accumulate in ((torch.float32, 1), (torch.bfloat16, 1), (torch.bfloat16, 2)):
            check(stage, dtype, accumulate)
        check(stage, torch.bfloat16, 3, no_sync=True)
    dist.destroy_process_group()
    print("counted")


@pytest.mark.promise("counts-of-512-ranks", "estimate-table-1", "same-count")
def test_elements_sent_and_bytes_held_by_one_of_512_ranks_equal_the_formulas(interpreter):
    """In a process of its own: a process group is process-wide, and this one computes nothing."""
    pytest.importorskip("transformers")
    done = interpreter("from tests.integration.zero_core import test_counts\ntest_counts.main()", timeout_seconds=280)
    assert done.stdout.strip() == "counted", done.stderr[-3000:]
