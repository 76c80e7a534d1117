"""What is left over between two stages of a model: removed modules, gradients, averages, failing ends.

Fails if something that belongs to the first stage reads memory that is gone, is lost in silence, or keeps the second
stage, which is complete, from its user.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from tests.integration.zero_core.test_second_stage import Adapted, adamw, batch, momentum, train
from zero_core.errors import AlreadyShardedError, ShardedParameterError, ZeroError

# -- modules that have left --------------------------------------------------------------------------------------------

USES: list[Callable[[Any], Any]] = [
    lambda head: head.weight + 0,
    lambda head: head.weight.clone(),
    lambda head: head.weight.data,
    lambda head: head.weight.tolist(),
    lambda head: head.weight.numpy(),
    lambda head: head.weight.data_ptr(),
    lambda head: head.weight.detach().sum(),
    lambda head: head.weight.data.zero_(),
    lambda head: head.weight.sum().backward(),
    lambda head: torch.nn.init.zeros_(head.weight),
    lambda head: head.shown.sum(),
    lambda head: head.state_dict(),
    lambda head: head.load_state_dict({"weight": torch.zeros(3, 13), "bias": torch.zeros(3)}),
    lambda head: head(torch.ones(2, 13)),
    lambda head: head.to(torch.float64),
    copy.deepcopy,
    pickle.dumps,
]


def test_a_module_that_was_removed_is_not_usable_and_says_so() -> None:
    """Its parameters have no memory, so that any use of them would end the process."""
    model, optimizer = kit.sharded(toys.Stack, adamw)
    model.head.shown = model.head.weight.detach()[1:]
    optimizer = zero_core.shard(model, adamw(model.parameters()))
    train(model, optimizer)
    head, model.head = model.head, nn.Linear(13, 3)
    second = zero_core.shard(model, momentum(model.parameters()))
    train(model, second)
    for use in USES:
        with pytest.raises(RuntimeError):  # a ZeroError, or torch's with its text
            use(head)
    with pytest.raises(ShardedParameterError, match=r"head.weight has no values any more: it was not in the Stack when"):
        head.weight.sum()
    assert "Sharded parameter of shape (3, 13)" in repr(head.weight) and head.weight.grad is None
    head.zero_grad()
    model.head = head
    for _ in range(2):
        with pytest.raises(AlreadyShardedError, match=r"head.weight, head.bias have no values any more"):
            zero_core.shard(model, adamw(model.parameters()))
    model.head = nn.Linear(13, 3)  # as the error says
    third = zero_core.shard(model, adamw(model.parameters()))
    train(model, third)
    third.close()


def test_an_adapter_that_was_merged_is_not_usable_and_unshard_keeps_what_was_removed() -> None:
    model, _ = kit.sharded(toys.Stack, adamw)
    model.head = Adapted(model.head)
    train(model, zero_core.shard(model, adamw(model.parameters())))
    adapter, model.head = model.head, model.head.merged()
    train(model, zero_core.shard(model, adamw(model.parameters())))
    with pytest.raises(ShardedParameterError, match="head.up has no values any more"):
        torch.linalg.norm(adapter.up)
    expected = model.head.weight.detach().clone()
    head, model.head = model.head, nn.Linear(13, 3)
    zero_core.unshard(model)
    assert torch.equal(head.weight, expected)
