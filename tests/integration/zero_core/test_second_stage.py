"""A sharded model is sharded again: another optimizer, other parameters trained, modules added and removed."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from tests.integration.zero_core.toys import Refused, Refusing, adamw, sgd
from zero_core.errors import AlreadyShardedError, ChangedParameterError, StoreError, ZeroError
from zero_core.util.freed_memory import HostMemory

pytestmark = pytest.mark.promise("second-stage")


def batch(seed: int = 0) -> Tensor:
    rank, _ = kit.world()
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * rank + seed))


def train(model: Any, optimizer: Any, steps: int = 3) -> None:
    dtype = next(model.parameters()).dtype
    for seed in range(steps):
        kit.step(optimizer, model(batch(seed).to(dtype)).square().mean())


def freeze(model: Any, *but: str) -> None:
    """Only parameters whose names have one of `but` are trained from here on."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in but))


@pytest.mark.parametrize(
    ("stages", "dtype"),
    [((3, 3), None), ((3, 3), torch.bfloat16), ((0, 3), None), ((3, 1), torch.bfloat16), ((2, 0), torch.bfloat16)],
)
@kit.on_ranks(1, 2)
def test_a_second_stage_is_that_of_a_model_built_from_the_masters(stages: Any, dtype: Any) -> None:
    first, second = stages
    model, optimizer = kit.sharded(toys.Stack, adamw, stage=first, param_dtype=dtype)
    train(model, optimizer)
    masters = kit.named_values(model, master=True)
    freeze(model, "blocks.1", "head")
    other = zero_core.shard(model, sgd(kit.trained(model)), stage=second, param_dtype=dtype)
    anew = toys.Stack()
    anew.load_state_dict(masters, strict=False)
    freeze(anew, "blocks.1", "head")
    control = zero_core.shard(anew, sgd(kit.trained(anew)), stage=second, param_dtype=dtype)
    for known, expected in zip(zero_core.units(model), zero_core.units(anew), strict=True):
        assert known.name == expected.name and known.dtype == expected.dtype
        kit.assert_bits(*([each.master(k) for k in range(len(each.parameters))] for each in (known, expected)))
    train(model, other)
    train(anew, control)
    kit.assert_bits(kit.values(model, master=True), kit.values(anew, master=True))


class Tied(toys.Tied):
    """With a tied weight, and a plain tensor over a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.shown = self.head.weight.detach()


@pytest.mark.parametrize(("stage", "dtype"), [(0, None), (1, None), (3, None), (3, torch.bfloat16)])
@kit.on_ranks(1, 2)
def test_unshard_gives_a_plain_model(stage: int, dtype: Any) -> None:
    model, optimizer = kit.sharded(Tied, adamw, stage=stage, param_dtype=dtype)
    objects = list(model.parameters())
    freeze(model, "blocks", "head")
    train(model, optimizer)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    x = batch().to(dtype or torch.float32)
    expected = model(x).detach()
    zero_core.unshard(model, device="cpu")
    assert all(one is other for one, other in zip(objects, model.parameters(), strict=True))
    assert all(type(parameter) is nn.Parameter and parameter.grad is None for parameter in objects)
    assert model.blocks[2].up.weight is model.blocks[0].up.weight
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["embed.weight", "embed.bias"]
    kit.assert_bits(model.state_dict(), state)
    assert model.head.weight.dtype is (dtype or torch.float32) and torch.equal(model(x).detach(), expected)
    with torch.no_grad():
        model.head.weight.add_(1)
    assert torch.equal(model.shown, model.head.weight)
    twin = copy.deepcopy(model)
    assert not any("_zero" in key for each in (*model.modules(), *model.parameters()) for key in vars(each))
    again = zero_core.shard(model, sgd(kit.trained(model)), stage=stage)
    train(model, again, steps=1)
    if kit.world()[1] == 1 and dtype is None:
        train(twin, sgd(kit.trained(twin)), steps=1)
        kit.assert_bits(model.state_dict(), twin.state_dict())


@pytest.mark.advice("with more room. Or leave the model in its shards")
@kit.on_ranks(1, 2)
def test_without_room_for_the_whole_model_it_stays_in_its_shards(size: int) -> None:
    """Also where one rank alone has none."""
    model, optimizer = kit.sharded(toys.Stack)
    with pytest.MonkeyPatch.context() as patch:
        room = 10 if kit.world()[0] == size - 1 else 1 << 40
        patch.setattr("zero_core.api.shard.available_bytes", lambda device: room)
        with pytest.raises(ZeroError, match="unshard.. needs [0-9,]+ bytes on cpu"):
            zero_core.unshard(model)
    with pytest.raises(ZeroError, match="device=meta, which has no memory: name another device"):
        zero_core.unshard(model, device="meta")
    train(model, optimizer)


@pytest.mark.advice("build a plain torch optimizer, and run", "use the optimizer that the last shard() returned")
@pytest.mark.promise("second-stage-refused")
def test_what_belongs_to_the_first_stage_says_that_it_is_over() -> None:
    model, first = kit.sharded(toys.Stack, adamw)
    average = zero_core.AveragedModel(model)
    view, loss = model.head.weight.data, model(batch()).sum()
    behind = zero_core.handle(model)
    second = again(model)
    for call in (first.step, first.zero_grad, first.state_dict, first.full_state_dict, average.update_parameters):
        with pytest.raises(ZeroError, match=r"no longer has, because shard\(\) was called again: use the optimizer"):
            call()
    with pytest.raises(ZeroError, match=r"because shard\(\) was called again"):
        behind.settle()
    with pytest.raises(ZeroError, match=r"because shard\(\) was called again|closed"):
        loss.backward()
    with pytest.raises(ChangedParameterError, match="it holds the old values"):
        view.sum()
    first.close()
    train(model, second)
    zero_core.unshard(model)
    with pytest.raises(ZeroError, match="because zero_core.unshard removed them"):
        second.step()
    train(model, adamw(model.parameters()), steps=1)  # as the error says


def again(model: Any, build: Any = adamw, **options: Any) -> Any:
    return zero_core.shard(model, build(model.parameters()), **options)


@pytest.mark.promise("second-stage-refused")
@kit.on_ranks(1, 2)
def test_gradients_that_wait_are_not_lost() -> None:
    """Also where one rank alone has them."""
    model, optimizer = kit.sharded(toys.Stack, stage=1)
    (model(batch()) if kit.world()[0] == 0 else model(batch()) * 0).sum().backward()
    for call in (zero_core.unshard, again):
        with pytest.raises(ZeroError, match=r"have gradients .* would lose: .* call model.zero_grad"):
            call(model)
    optimizer.step()  # without zero_grad(): nothing waits
    zero_core.unshard(model)


@pytest.mark.advice("inside forward or backward: call it between steps")
@pytest.mark.promise("second-stage-refused")
def test_a_model_in_use_is_not_taken() -> None:
    model, optimizer = kit.sharded(toys.Stack)
    refused = []

    def inside(module: Any, args: Any) -> None:
        with pytest.raises(ZeroError, match="inside forward or backward") as error:
            zero_core.unshard(model)
        refused.append(error)

    with model.blocks[0].register_forward_pre_hook(inside):
        model(batch())
    assert refused
    with zero_core.gathered(model), pytest.raises(ZeroError, match="leave the with block first"):
        again(model)
    train(model, optimizer)
    zero_core.sleep(model, to=HostMemory())
    with pytest.raises(ZeroError, match="call zero_core.wake"):
        zero_core.unshard(model)
    zero_core.wake(model)
    again(model).close()
    told = r"cannot read the values of a sharded model: .* after the last use .* Build it again"
    with pytest.raises(AlreadyShardedError, match=told):
        again(model)


@pytest.mark.promise("second-stage-refused")
def test_a_part_of_a_model_and_two_models_are_not_taken_and_a_wrapper_takes_its_place() -> None:
    """As PEFT puts a model of its own around."""
    inner, _ = kit.sharded(toys.Stack)
    outer = nn.Sequential(inner)
    train(outer, again(outer))
    with pytest.raises(ZeroError, match="is not sharded"):
        zero_core.handle(inner)
    model, _ = kit.sharded(toys.Stack)
    other, _ = kit.sharded(toys.Stack)
    with pytest.raises(AlreadyShardedError, match="a part of a sharded .*, without .*: call zero_core.shard on"):
        again(model.blocks)
    both = nn.ModuleList([model, other])
    with pytest.raises(
        AlreadyShardedError, match="sharded separately .*: call zero_core.unshard on each of these models"
    ):
        again(both)
    zero_core.unshard(model)
    zero_core.unshard(other)
    again(both).close()


@pytest.mark.promise("second-stage-refused")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("at", [0, 2, 99])
def test_a_store_that_fails_leaves_the_model_in_its_earlier_shards(at: int, dtype: Any) -> None:
    """With everything where nothing was given up, and with all values in any case."""
    model, optimizer = kit.sharded(Tied, adamw, param_dtype=dtype)
    twin, control = kit.sharded(Tied, adamw, param_dtype=dtype)
    for each, its in ((model, optimizer), (twin, control)):
        train(each, its)
    before = kit.values(model, master=True)
    with pytest.raises(Refused if at == 0 else StoreError) as failure:
        again(model, sgd, store=Refusing(at), param_dtype=dtype)
    if at:
        assert "the model is in its earlier shards, with all values. The optimizer states" in str(failure.value)
    kit.assert_bits(kit.values(model, master=True), before)
    train(model, optimizer)
    train(twin, control)
    if at == 0:
        kit.assert_bits(kit.values(model), kit.values(twin))
    else:
        again(model, param_dtype=dtype).close()


@pytest.mark.promise("second-stage-refused")
@kit.on_ranks(2)
def test_ranks_that_lose_values_say_which() -> None:
    """What was given up is in slices of other cuts then, of which no rank has all."""
    model, optimizer = kit.sharded(toys.Stack, adamw)
    train(model, optimizer)
    with pytest.raises(StoreError, match="Other ranks may have lost values too: build the model again on all ranks"):
        again(model, sgd, store=Refusing(1))
    with pytest.raises(Refused):  # nothing had moved
        again(model, sgd, store=Refusing(0))
    train(model, optimizer)
    with pytest.raises(StoreError, match=r"had left their shards. On this rank their values are lost: build"):
        again(model, sgd, store=Refusing(3))
    with pytest.raises(ZeroError, match=r"values were lost when shard\(\) failed: build the model again"):
        optimizer.step()
    with pytest.raises(ZeroError):
        model(batch())
    anew, its = kit.sharded(toys.Stack, adamw)
    train(anew, its)


@kit.on_ranks(1, 2)
def test_a_checkpoint_of_the_second_stage_has_what_the_first_one_trained(tmp_path: Any) -> None:
    """What is frozen now is not what the model was built with. Fails if `trained_only` leaves it out."""
    model, optimizer = kit.sharded(toys.Stack, adamw)
    freeze(model, "blocks")
    train(model, optimizer)
    freeze(model, "head")
    second = zero_core.shard(model, adamw(kit.trained(model)))
    train(model, second)
    zero_core.checkpoint.save(tmp_path, model, second, trained_only=True)
    expected = kit.values(model)
    torch.manual_seed(0)
    anew = toys.Stack()
    freeze(anew, "head")
    its = zero_core.shard(anew, adamw(kit.trained(anew)))
    zero_core.checkpoint.load(tmp_path, anew, its)
    kit.assert_bits(kit.values(anew), expected)
    train(model, second)
    train(anew, its)
    kit.assert_bits(kit.values(anew), kit.values(model))
