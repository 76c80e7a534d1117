"""What is left over between two stages of a model: removed modules, gradients, averages, failing ends."""

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from tests.integration.zero_core.test_second_stage import again, batch, train
from tests.integration.zero_core.toys import Refusing, adamw, sgd
from zero_core.errors import AlreadyShardedError, GradientError, ShardedParameterError, ZeroError
from zero_core.optim.device_store import DeviceStore

pytestmark = pytest.mark.promise("second-stage-refused")
USES: list[Callable[[Any], Any]] = [
    lambda head: head.weight + 0,
    lambda head: head.weight.data,
    lambda head: head.weight.tolist(),
    lambda head: head.weight.numpy(),
    lambda head: int(head.weight.data_ptr()),
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


@pytest.mark.advice("build their module again, and", "Next time, call zero_core.unshard or p.detach()")
@pytest.mark.promise("removed-parameter")
def test_a_module_that_was_removed_is_not_usable_and_says_so() -> None:
    """Its parameters have no memory, so that any use of them would end the process."""
    model, optimizer = kit.sharded(toys.Stack, adamw)
    model.head.shown = model.head.weight.detach()[1:]
    optimizer = again(model)
    train(model, optimizer)
    head, model.head = model.head, nn.Linear(13, 3)
    second = again(model, sgd)
    train(model, second)
    for use in USES:
        with pytest.raises(RuntimeError):  # a ZeroError, or torch's with its text
            use(head)
    with pytest.raises(ShardedParameterError, match="the values of head.weight were lost when the Stack"):
        head.weight.sum()
    assert "Sharded parameter of shape (3, 13)" in repr(head.weight) and head.weight.grad is None
    head.zero_grad()
    model.head = head
    for _ in range(2):
        with pytest.raises(AlreadyShardedError, match="head.weight, head.bias were lost when the Stack"):
            again(model)
    model.head = nn.Linear(13, 3)  # as the error says
    third = again(model)
    train(model, third)
    expected, head, model.head = kit.values(model), model.head, nn.Linear(13, 3)
    zero_core.unshard(model)  # before another stage, which would take the removed values
    assert torch.equal(head.weight, expected[-2])


@kit.on_ranks(1, 2)
def test_gradients_that_no_optimizer_had_are_not_lost() -> None:
    """Also where one rank alone has them; a first shard refuses the same."""
    torch.manual_seed(0)
    model = toys.Stack()
    first = zero_core.shard(model, adamw(model.head.parameters()))
    model(batch()).square().mean().backward()
    with torch._C.DisableTorchFunctionSubclass():
        for parameter in model.parameters() if kit.world()[0] else ():
            parameter.grad = None
    first.step()
    first.zero_grad()
    with pytest.raises(ZeroError, match=r"have gradients \(.*would lose: before .*\(\), call model.zero_grad"):
        again(model)
    assert kit.world()[0] > 0 or model.embed.weight.grad is not None
    model.zero_grad()
    second = again(model)
    train(model, second)


def test_unshard_keeps_gradients_that_no_optimizer_had() -> None:
    dense, model = kit.twins(toys.Stack)
    optimizer = zero_core.shard(model, adamw(model.head.parameters()))
    train(dense, adamw(dense.head.parameters()))
    train(model, optimizer)
    zero_core.unshard(model)
    for mine, theirs in zip(model.embed.parameters(), dense.embed.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


@kit.on_ranks(1, 2)
def test_what_was_stepped_and_not_zeroed_is_refused_in_the_next_stage_too() -> None:
    """torch would add the first stage's gradient to that of the second stage's first step."""
    model, first = kit.sharded(toys.Stack, adamw)
    model(batch()).square().mean().backward()
    first.step()
    for frozen, left in ((True, "embed.weight"), (False, "blocks")):
        model.blocks.requires_grad_(not frozen)
        optimizer = zero_core.shard(model, sgd(p for p in model.parameters() if p.requires_grad))
        model(batch()).square().mean().backward()
        with pytest.raises(GradientError, match=rf"of the last step\(\) were not zeroed \(that of {left}"):
            optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer)


def test_zeros_that_a_first_stage_left_are_refused_where_torch_would_step_them() -> None:
    model, first = kit.sharded(toys.Stack, adamw)
    model(batch()).square().mean().backward()
    first.step()
    first.zero_grad(set_to_none=False)
    second = again(model, sgd)
    model.head(torch.ones(4, 13)).square().mean().backward()
    with pytest.raises(GradientError, match="left gradients of zero for \\d+ parameters"):
        second.step()
    second.zero_grad()
    train(model, second)


def test_a_model_with_its_averages_swapped_in_is_not_taken() -> None:
    """The averages would become the model, and its weights would be lost."""
    model, optimizer = kit.sharded(toys.Stack, adamw)
    average = zero_core.AveragedModel(model)
    train(model, optimizer)
    expected = kit.values(model)
    with average.swapped_in():
        for call in (zero_core.unshard, again):
            with pytest.raises(ZeroError, match=r"inside AveragedModel.swapped_in.*leave the with block first"):
                call(model)
    kit.assert_bits(kit.values(model), expected)
    zero_core.unshard(model)  # as the error says
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected, strict=True))


class Unclosable(DeviceStore):
    def close(self) -> None:
        super().close()
        raise OSError("the disk is gone")


@pytest.mark.parametrize("second", ["shard", "unshard"])
def test_what_fails_when_the_first_stage_ends_is_told_and_the_second_is_there(second: str) -> None:
    model, first = kit.sharded(toys.Stack, adamw, store=Unclosable())
    train(model, first)
    expected, called = kit.values(model), []

    def leaving() -> None:
        raise OSError("the file is gone")

    first.engine.leaving += [lambda: called.append("the other one"), leaving]
    with pytest.warns(UserWarning, match="the earlier shards of Stack") as told:
        optimizer = (
            zero_core.unshard(model) if second == "unshard" else zero_core.shard(model, adamw(model.parameters()))
        )
    text = "".join(str(each.message) for each in told)
    assert "the file is gone" in text and "the disk is gone" in text
    assert told[0].filename == __file__ and called == ["the other one"]
    assert all(torch.equal(a.detach(), b) for a, b in zip(model.parameters(), expected, strict=True))
    if second == "shard":
        assert zero_core.handle(model).optimizer is optimizer
        train(model, optimizer)
        optimizer.close()


def test_an_interrupt_in_the_middle_stays_one_and_notes_what_was_given_up() -> None:
    model, optimizer = kit.sharded(toys.Stack, adamw)
    train(model, optimizer)
    expected = kit.values(model)
    with mock.patch.object(toys, "Refused", KeyboardInterrupt), pytest.raises(KeyboardInterrupt) as stopped:
        again(model, sgd, store=Refusing(3))
    if hasattr(stopped.value, "add_note"):  # from Python 3.11 on
        assert "the model is in its earlier shards, with all values" in "".join(stopped.value.__notes__)
    kit.assert_bits(kit.values(model), expected)
    train(model, optimizer)


def test_in_inference_mode_the_parameters_can_be_trained_after_all() -> None:
    dense, model = kit.twins(toys.Stack)
    for build in (adamw, sgd):
        with torch.inference_mode():
            optimizer = zero_core.shard(model, build(model.parameters()))
        train(dense, build(dense.parameters()))
        train(model, optimizer)
    with torch.inference_mode():
        zero_core.unshard(model)
    kit.assert_bits(model.state_dict(), dense.state_dict())
    assert not any(parameter.is_inference() for parameter in model.parameters())
    train(dense, adamw(dense.parameters()))
    train(model, adamw(model.parameters()))
    kit.assert_bits(model.state_dict(), dense.state_dict())


def test_what_a_user_said_of_copies_of_a_module_stands_again_after_unshard() -> None:
    model = toys.Stack()
    model.__dict__["__deepcopy__"] = model.blocks[0].__dict__["__reduce_ex__"] = lambda *given: "the user's"
    optimizer = again(model)
    with pytest.raises(ShardedParameterError):
        copy.deepcopy(model)
    optimizer = again(model)
    train(model, optimizer)
    zero_core.unshard(model)
    assert copy.deepcopy(model) == "the user's" and model.blocks[0].__reduce_ex__(2) == "the user's"
    del model.__dict__["__deepcopy__"], model.blocks[0].__dict__["__reduce_ex__"]
    assert not any("__" in key for module in model.modules() for key in vars(module))
