"""What trains while torch's default device or dtype is another one: no memory of ours takes it from there."""

from typing import Any

import pytest
import torch

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from zero_offload import MemoryByteStore, TieredStore, TorchStep, offload_activations


@pytest.mark.promise("default-device")
@pytest.mark.parametrize("tier", [None, "host", "nvme"])
def test_the_bits_are_those_without_a_default_device(tier: str | None, tmp_path: Any) -> None:
    """On meta, memory that does not name its device has no values. With a GPU it would be there."""

    def train(default: str) -> list[torch.Tensor]:
        store = tier and TieredStore(tier, tier, tier, nvme=MemoryByteStore(), step=TorchStep())
        torch.manual_seed(0)
        dense, batches = toys.Stack(), [toys.data(step, 0) for step in range(3)]
        with torch.device(default):
            model, optimizer = kit.sharded(dense, toys.adamw, store=store or None)
            offload_activations(model, store or None, "host")
            seen = []
            for x in batches:
                seen.append(toys.loss_of(model, x))
                seen[-1].backward()
                seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
                optimizer.step()
                optimizer.zero_grad()
            zero_core.checkpoint.save(tmp_path / default, model, optimizer)
            zero_core.checkpoint.load(tmp_path / default, model, optimizer)
            states = optimizer.full_state_dict()["state"]
            seen += [value for state in states.values() for value in state.values()]
            seen += [value.clone() for value in model.state_dict().values()]
            optimizer.close()
        return [value.detach() for value in seen]

    kit.assert_bits(train("meta"), train("cpu"))


@pytest.mark.promise("default-dtype")
@pytest.mark.parametrize("tier", [None, "host"])
@pytest.mark.parametrize("kind", ["AdamW", "NAdam", "RMSprop"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_bits_are_those_without_a_default_dtype(tier: str | None, kind: str, dtype: Any, tmp_path: Any) -> None:
    """The checkpoint's numbers too: in bfloat16, step 257 is step 256."""

    def train(default: torch.dtype) -> list[torch.Tensor]:
        store = tier and TieredStore(tier, tier, tier, step=TorchStep())
        torch.manual_seed(0)
        model, x = torch.nn.Linear(4, 3), torch.randn(2, 4)
        torch.set_default_dtype(default)
        try:
            optimizer = zero_core.shard(model, getattr(torch.optim, kind)(model.parameters()), store=store or None)
            for _ in range(257):
                model(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            folder = tmp_path / str(default)
            zero_core.checkpoint.save(folder, model, optimizer)
            zero_core.checkpoint.load(folder, model, optimizer)
            states = optimizer.full_state_dict()["state"]
            optimizer.close()
        finally:
            torch.set_default_dtype(torch.float32)
        return [value.float() for state in states.values() for value in state.values()]

    kit.assert_bits(train(dtype), train(torch.float32))
