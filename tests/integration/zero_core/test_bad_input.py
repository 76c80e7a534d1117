"""A user's mistake raises a named error with the fact, the values and the way out, and nothing hangs."""

import copy
import functools
import gc
import io
import logging
import math
import pickle
import re
import time
import weakref
from contextlib import closing, nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from zero_core.comm import watchdog
from zero_core.errors import (
    AlreadyShardedError,
    ChangedParameterError,
    CollectiveError,
    GradientError,
    ShardedParameterError,
    StageError,
    UnsupportedOptimizerError,
    ZeroError,
)
from zero_core.testing import RankPool


def sharded(**options):
    return kit.sharded(toys.Stack, toys.sgd, **options)


@pytest.mark.promise("bad-norm")
@pytest.mark.parametrize(
    ("name", "values", "error", "told"),
    [
        ("stage", (-1, 4, "3", None), StageError, "a stage of ZeRO: 0, 1, 2 or 3"),
        ("max_grad_norm", (0, -1.0, math.nan), ZeroError, r"max_grad_norm=.*: give a norm above 0, or None"),
        ("loss_scale", (0, -1.0, math.nan, math.inf), ValueError, "must be positive and finite"),
    ],
)
def test_a_value_that_an_option_cannot_have(name, values, error, told):
    for value in values:
        with pytest.raises(error, match=told):
            sharded(**{name: value})


@pytest.mark.advice(" on the whole ")
@pytest.mark.promise("two-optimizers")
def test_a_part_of_a_sharded_model_and_a_sharded_optimizer():
    model, optimizer = sharded()
    part = r"was given a part of a sharded Stack, without its blocks.0.norm.* on the whole Stack"
    with pytest.raises(AlreadyShardedError, match=part):
        zero_core.shard(model.embed, toys.sgd(model.embed.parameters()))
    with pytest.raises(AlreadyShardedError, match=r"optimizer is sharded already: build a new one for each zero_core"):
        zero_core.shard(toys.Stack(), optimizer)
    second = toys.Stack()
    for other in (nn.Sequential(model), toys.Stack()):
        with pytest.raises(ZeroError, match=r"lacks, of shapes .*: build it from model.parameters\(\) of"):
            zero_core.shard(other, toys.sgd(second.parameters()))
    zero_core.shard(second, toys.sgd(second.parameters()))


@pytest.mark.promise("elementwise-refused")
def test_an_optimizer_that_keeps_the_parameters_themselves():
    model = toys.Stack()
    with pytest.raises(UnsupportedOptimizerError, match=r"LBFGS keeps parameters in self\._params.*Or use another"):
        zero_core.shard(model, torch.optim.LBFGS(model.parameters()))
    toys.loss_of(model, toys.data(0, 0)).backward()  # the refused model is untouched
    assert model.head.weight.grad is not None


@pytest.mark.advice("Or pass param_dtype=")
@pytest.mark.promise("float64")
def test_parameters_that_a_float32_master_cannot_hold():
    model = toys.Stack().double()
    with pytest.raises(StageError, match=r"embed.weight is torch.float64.*pass param_dtype="):
        zero_core.shard(model, toys.sgd(model.parameters()))
    zero_core.shard(model, toys.sgd(model.parameters()), param_dtype=torch.float32)
    turning = toys.Stack()
    turning.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(UnsupportedOptimizerError, match=r"of torch.complex64, .*: give these to a second optimizer"):
        zero_core.shard(turning, toys.sgd(turning.parameters()))
    zero_core.shard(turning, toys.sgd(p for p in turning.parameters() if not p.is_complex()))


def test_values_of_a_quantised_dtype_are_dequantised_or_a_buffer():
    """Their scales are not among their bytes."""
    values = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    model = toys.Stack()
    model.table = nn.Parameter(values, requires_grad=False)
    with pytest.raises(ZeroError, match="dequantise it, or keep it as a buffer, before zero_core.shard"):
        zero_core.shard(model, toys.sgd(model.head.parameters()))
    model.table = nn.Parameter(values.dequantize(), requires_grad=False)
    model.register_buffer("codes", values)
    zero_core.shard(model, toys.sgd(model.head.parameters()))


@pytest.mark.promise("add-param-group")
def test_add_param_group_is_refused_with_the_reason():
    model = toys.Stack()
    given = toys.sgd(model.embed.parameters())
    given.add_param_group({"params": model.blocks.parameters()})
    optimizer = zero_core.shard(model, given)
    with pytest.raises(UnsupportedOptimizerError, match="the shards are cut already. Add the group .* before"):
        optimizer.add_param_group({"params": model.head.parameters()})
    assert len(optimizer.param_groups) == 2


@pytest.mark.promise("zeroed-in-place")
@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_is_not_zeroed_in_place(stage):
    model, optimizer = sharded(stage=stage)
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 0.0  # no gradient yet
    toys.loss_of(model, toys.data(0, 0)).backward()
    with pytest.raises(GradientError, match=r"shards are freed.* Call optimizer.zero_grad\(\)"):
        model.zero_grad(set_to_none=False)
    optimizer.step()
    optimizer.zero_grad()
    assert model.head.weight.grad is None


@pytest.mark.promise("optimizer-not-assigned")
@pytest.mark.parametrize("call", ["step", "state_dict", "load_state_dict", "add_param_group"])
def test_the_optimizer_that_was_given_says_that_another_took_its_place(call):
    """`zero_core.shard(model, optimizer)` without `optimizer =` in front: nothing may look as if it worked."""
    model = toys.Stack()
    given = toys.adamw(model.parameters())
    returned = zero_core.shard(model, given)
    arguments = {"load_state_dict": [{}], "add_param_group": [{"params": [nn.Parameter(torch.zeros(1))]}]}.get(call, [])
    for _ in range(2):  # with and without gradients
        told = rf"{call}\(\) was called on the AdamW that was given to zero_core.shard.*write `optimizer = zero_core"
        with pytest.raises(ZeroError, match=told):
            getattr(given, call)(*arguments)
        toys.loss_of(model, toys.data(0, 0)).backward()
    returned.step()
    given.zero_grad()
    assert model.head.weight.grad is None and len(returned.param_groups) == 1


@pytest.mark.promise("optimizer-methods")
@pytest.mark.advice("of the optimizer that zero_core.shard returned")
@pytest.mark.parametrize("wrap", [lambda new, old: new, lambda new, old: functools.wraps(old.__func__)(new)])
def test_a_replaced_step_is_refused_and_runs_on_the_returned_optimizer(wrap):
    """It was left out in silence. A scheduler's own replacement is none."""

    def replaced(model, optimizer):
        real = optimizer.step

        def halved(closure=None):
            for p in model.parameters():
                p.grad.mul_(0.5)
            return real(closure)

        optimizer.step = wrap(halved, real)
        return optimizer

    dense, model = kit.twins(toys.Stack)
    for name in ("step", "zero_grad", "state_dict", "load_state_dict"):
        given = torch.optim.SGD(model.parameters(), lr=0.1)
        setattr(given, name, wrap(lambda *_: None, getattr(given, name)))
        told = rf"{name}\(\) of this SGD was replaced .*to {name} of the optimizer that zero_core.shard returned"
        for optimizer in (given, zero_core.JointOptimizer(given)):
            with pytest.raises(UnsupportedOptimizerError, match=told):
                zero_core.shard(model, optimizer)
    theirs, given = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (dense, model))
    torch.optim.lr_scheduler.ConstantLR(given, 1.0)
    given.zero_grad = given.zero_grad
    ours = replaced(model, zero_core.shard(model, given))
    theirs = replaced(dense, theirs)
    for each, optimizer in ((dense, theirs), (model, ours)):
        for step in range(2):
            kit.step(optimizer, toys.loss_of(each, toys.data(step, 0)))
    torch.testing.assert_close(model.state_dict(), dense.state_dict())


class Shrinking(torch.optim.SGD):
    """Has a method beside step(), as SophiaG has update_hessian(): it shrinks each parameter that has a gradient."""

    @torch.no_grad()
    def shrink(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(0.5)

    def needs_uncut(self, group, shape):
        return False


class ShrinkingInStep(Shrinking):
    def step(self, closure=None):
        self.shrink()
        return super().step(closure)


@pytest.mark.promise("optimizer-methods")
@pytest.mark.parametrize("kind", [Shrinking, ShrinkingInStep])
def test_another_method_of_the_optimizer_that_was_given_is_called_before_shard_or_in_step(kind):
    """It found no gradients, and did nothing in silence."""
    dense, model = kit.twins(toys.Stack)
    theirs, given = (kind(each.parameters(), lr=0.1) for each in (dense, model))
    for each, optimizer in ((dense, theirs), (model, given)):
        toys.loss_of(each, toys.data(0, 0)).backward()
        optimizer.shrink()
        optimizer.zero_grad()
    ours = zero_core.shard(model, given)
    for step in range(3):
        toys.loss_of(model, toys.data(step, 0)).backward()
        for each in (given, ours):
            with pytest.raises(ZeroError, match=r"shrink\(\) of Shrinking.* or from Shrinking"):
                each.shrink()
        assert not given.needs_uncut(given.param_groups[0], (2, 2))
        ours.step()
        ours.zero_grad()
        kit.step(theirs, toys.loss_of(dense, toys.data(step, 0)))
    kit.assert_same(model, dense)


@pytest.mark.promise("scheduler-on-given")
def test_a_scheduler_on_the_optimizer_that_was_given_works_and_does_not_warn(recwarn):
    model = toys.Stack()
    given = toys.sgd(model.parameters())
    before = torch.optim.lr_scheduler.ExponentialLR(given, 0.5)
    returned = zero_core.shard(model, given)
    after = torch.optim.lr_scheduler.ExponentialLR(given, 0.5)
    returned.step()
    before.step()
    after.step()
    assert returned.param_groups[0]["lr"] == 0.025
    assert not [str(w.message) for w in recwarn]


@pytest.mark.promise("sparse-gradients")
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_name_the_option(kind):
    told = r"0.weight has a gradient of layout torch.sparse_coo.*with sparse=False"
    for sparse in (True, False):
        model, optimizer = kit.sharded(nn.Sequential(kind(5, 3, sparse=sparse), nn.Linear(3, 1)))
        with pytest.raises(GradientError, match=told) if sparse else nullcontext():
            kit.step(optimizer, model(torch.tensor([[1, 2]])).sum())


def test_model_and_optimizer_the_wrong_way_round():
    model = toys.Stack()
    with pytest.raises(ZeroError, match=r"shard\(SGD, Stack\): it takes the module first"):
        zero_core.shard(toys.sgd(model.parameters()), model)


@pytest.mark.promise("grad-scaler")
def test_a_grad_scaler_beside_a_loss_scale_is_refused():
    model, optimizer = sharded(loss_scale=4.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(optimizer.scale_loss(toys.loss_of(model, toys.data(0, 0)))).backward()
    with pytest.raises(GradientError, match="scales the loss already. Leave the GradScaler out"):
        scaler.step(optimizer)


@pytest.mark.promise("freed-without-close")
@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_and_optimizer_that_nobody_names_are_freed_without_close(stage):
    model, optimizer = sharded(stage=stage)
    toys.loss_of(model, toys.data(0, 0)).backward()
    optimizer.step()
    alive = weakref.ref(model), weakref.ref(model.head.weight), weakref.ref(optimizer.engine)
    del model, optimizer
    gc.collect()
    assert [each() for each in alive] == [None, None, None]


@pytest.mark.promise("moved-to-itself")
@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to("cpu"),
        lambda model: model.to("cpu:0"),
        lambda model: model.to(torch.device("cpu", 0), torch.bfloat16, non_blocking=True),
        lambda model: model.to(torch.zeros((), dtype=torch.bfloat16)),
        torch.nn.Module.cpu,
        torch.nn.Module.bfloat16,
    ],
)
def test_a_model_that_is_moved_to_where_it_is(move):
    """The masters keep the bits that bfloat16 has not: nothing is written."""
    model, _ = sharded(param_dtype=torch.bfloat16)
    masters = kit.values(model, master=True)
    model.offset.data = model.offset.data.bfloat16()
    assert move(model) is model
    model(toys.data(0, 0).bfloat16())
    with zero_core.gathered(model, master=True):
        assert all(torch.equal(p, master) for p, master in zip(model.parameters(), masters, strict=True))


@pytest.mark.promise("thawed-later")
def test_a_parameter_that_was_frozen_when_the_model_was_sharded_is_not_trained_later():
    """In torch the optimizer would step it; here it has no states. One that is in no optimizer is as in torch."""
    model, other = toys.Frozen(), toys.Frozen()
    optimizer = zero_core.shard(model, toys.sgd(model.parameters()))
    zero_core.shard(other, toys.sgd([p for p in other.parameters() if p.requires_grad]))
    told = r"blocks\.0\.up\.weight requires a gradient, and did not .*Before zero_core.shard, call .*\.no_grad\(\)"
    for thaw in (lambda p: p.requires_grad_(True), lambda p: setattr(p, "requires_grad", True)):
        for each in (model, other):
            thaw(each.blocks[0].up.weight)
        with torch.no_grad():
            expected = model(toys.data(0, 0))
        with pytest.raises(ChangedParameterError, match=told):
            model(toys.data(0, 0))
        model.blocks[0].up.weight.requires_grad_(False)
        assert torch.equal(model(toys.data(0, 0)), expected)
    toys.loss_of(other, toys.data(0, 0)).backward()
    assert other.blocks[0].up.weight.grad.shape == (17, 13)
    optimizer.close()


@pytest.mark.promise("other-memory-gathered")
def test_other_memory_given_inside_gathered_is_read_and_let_go():
    model, _ = sharded()
    with zero_core.gathered(model):
        model.to("cpu:0")
        model.head.weight.data = torch.ones(3, toys.WIDTH)
    with torch.no_grad():
        model.head.weight.fill_(0.0)  # to the shards, and not past the forward below
        model.head.bias.fill_(0.0)
        assert torch.equal(model(toys.data(0, 0)), torch.ones(6, 3))  # the buffer alone


@pytest.mark.promise("changed-parameter", "moved-model")
def test_a_parameter_that_changes_between_steps():
    model, _ = sharded()
    weight = model.blocks[0].up.weight
    for other in (torch.zeros(2, 2), torch.zeros(weight.shape, dtype=torch.bfloat16)):
        with pytest.raises(ChangedParameterError, match=r"blocks.0.up.weight, .*, was .*\). Move, cast or resize"):
            weight.data = other
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        with pytest.raises(ChangedParameterError, match=rf"\({dtype}, was torch.float32\).*before zero_core.shard"):
            model.to(dtype)
    for replace, name in (
        (lambda: setattr(model.blocks[0].up, "weight", nn.Parameter(torch.zeros(2, 2))), "blocks.0.up.weight"),
        (lambda: model.to("meta"), "embed.weight"),  # torch replaces the parameters here instead of moving them
    ):
        replace()
        with pytest.raises(ChangedParameterError, match=f"{name} is not the parameter that was sharded"):
            model(toys.data(0, 0))


@pytest.mark.promise("changed-parameter")
@pytest.mark.parametrize("change", [torch.Tensor.bfloat16, lambda values: torch.zeros(17, 14)])
def test_a_parameter_that_a_forward_changes(change):
    """Inside its unit it is a plain Parameter, so nobody is asked: the next use of the unit finds out."""
    model, _ = sharded()

    def meddle(module, args, output):
        module.weight.data = change(module.weight.data)

    model.blocks[0].up.register_forward_hook(meddle)
    with torch.no_grad():
        model(toys.data(0, 0))
    with pytest.raises(ChangedParameterError, match=r"up.weight was \(17, 13\), .*: build the model again, and cast"):
        model(toys.data(0, 0))


@pytest.mark.advice("cannot be pickled: save model.state_dict()")
@pytest.mark.promise("sharded-copies")
def test_copying_and_pickling_are_refused_by_name():
    model, optimizer = sharded()
    for refused in (copy.deepcopy, pickle.dumps, lambda each: torch.save(each, io.BytesIO())):
        for part, told in (
            (model, r"a sharded Stack.*load model.state_dict\(\) into a new"),
            (model.blocks, "a sharded Block"),
            (model.blocks[0].up, r"blocks\.0\.up\.(weight|bias) is sharded"),
            (model.head.weight, "head.weight is sharded"),
        ):
            with pytest.raises(ShardedParameterError, match=told):
                refused(part)
        with pytest.raises(ShardedParameterError, match="a sharded Block"), zero_core.gathered(model):
            refused(model.blocks[1])
    with pytest.raises(ShardedParameterError, match="zero_core.gathered"):
        int(model.head.weight.data_ptr())
    with pytest.raises(UnsupportedOptimizerError, match="a ShardedOptimizer cannot be copied or pickled"):
        pickle.dumps(optimizer)
    kept = io.BytesIO()
    torch.save(model.state_dict(), kept)  # the way out that the texts name
    kept.seek(0)
    toys.Stack().load_state_dict(torch.load(kept, weights_only=True))


@pytest.mark.promise("nan-gradients")
@pytest.mark.parametrize("stage", [0, 3])
def test_nan_gradients_without_loss_scaling(stage):
    model, optimizer = sharded(stage=stage)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    (toys.loss_of(model, toys.data(0, 0)) * float("nan")).backward()
    with pytest.raises(GradientError, match=r"is nan at step 1; nothing was updated.*in fp16, give zero_core.shard"):
        optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    kit.step(optimizer, toys.loss_of(model, toys.data(0, 0)))
    assert optimizer.step_count == 1


@pytest.mark.promise("updates-in-backward-refused")
def test_updates_in_backward_refuse_what_they_cannot_honour():
    unused = {"stage": 0, "find_unused_parameters": True}
    options = {"max_grad_norm": 1.0}, {"loss_scale": "dynamic"}, {"stage": 1}, unused
    one = ".*Leave one of the two out"
    for option, said in zip(
        options, (f"max{one}", f"loss{one}", "stage=1.* Use stage 0, 2 or 3", f"find{one}"), strict=True
    ):
        with pytest.raises(StageError, match=f"cannot be combined with {said}"):
            sharded(update_in_backward=True, **option)
    model, _ = sharded(update_in_backward=True)
    toys.loss_of(model, toys.data(0, 0)).backward()
    with pytest.raises(GradientError, match="a gradient reached unit .*Leave update_in_backward out"):
        toys.loss_of(model, toys.data(0, 0)).backward()


@pytest.mark.advice("is not sharded: call zero_core.shard(model, optimizer)")
def test_a_model_that_is_not_sharded():
    for call in (zero_core.units, zero_core.handle):
        with pytest.raises(ZeroError, match=r"Stack is not sharded: call zero_core.shard\(model, optimizer\)"):
            call(toys.Stack())
        model, _ = sharded()
        for other in (nn.Sequential(model), model.embed):
            with pytest.raises(ZeroError, match=r"is not sharded: call .* first, and pass this model"):
                call(other)
        call(model)
    with pytest.raises(ZeroError, match="no sharded parameter: call zero_core.shard first"):
        with zero_core.gathered(toys.Stack()):
            pass


PASSES = {
    "step in a forward": ("forward", "after loss.backward", lambda model, optimizer: optimizer.step()),
    "step in a backward": ("backward", "after loss.backward", lambda model, optimizer: optimizer.step()),
    "zero_grad": ("backward", "between steps", lambda model, optimizer: optimizer.zero_grad()),
    "sleep": ("forward", "between steps", lambda model, optimizer: slept(model)),
}


def slept(model):
    zero_core.sleep(model, pytest.importorskip("zero_offload").MemoryByteStore())
    zero_core.wake(model)


@pytest.mark.advice(
    "zero_grad() inside backward: call it between steps", "sleep() inside forward or backward: call it between"
)
@pytest.mark.parametrize("name", PASSES)
def test_what_a_pass_refuses_is_called_after_it(name):
    where, when, call = PASSES[name]
    model, optimizer = sharded()
    on = model.head.register_forward_hook if where == "forward" else model.head.weight.register_hook
    hook = on(lambda *_: call(model, optimizer))
    with pytest.raises(ZeroError, match=rf"inside (forward or )?backward: call it {when}"):
        toys.loss_of(model, toys.data(0, 0)).backward()
    hook.remove()
    optimizer.zero_grad()
    kit.step(optimizer, toys.loss_of(model, toys.data(0, 0)))
    call(model, optimizer)


@pytest.mark.promise("queued-callbacks")
@kit.on_ranks(1, 2)
def test_a_callback_that_a_backward_queues_may_step_and_is_refused_gradients():
    """torch 2.15 has `torch.autograd.graph.queue_callback`; earlier ones have it by another name."""
    queue = getattr(torch.autograd.graph, "queue_callback", torch.autograd.Variable._execution_engine.queue_callback)

    def train(model, optimizer, callback):
        model.head.weight.register_hook(lambda gradient: queue(callback))
        for step in range(3):
            toys.loss_of(model, toys.data(step, 0)).backward()
            optimizer.zero_grad()

    dense, plain, model, optimizer = kit.pair(toys.Stack, toys.sgd)
    train(dense, plain, plain.step)
    train(model, optimizer, optimizer.step)
    kit.assert_bits(model.state_dict(), dense.state_dict())
    model, optimizer = sharded()
    with pytest.raises(GradientError, match=r"norm.* inside forward or backward: call it after loss.backward\(\)"):
        train(model, optimizer, lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))


@kit.on_ranks(1, 2)
def test_a_forward_after_a_backward_that_raised_gives_every_unit_back():
    model, _ = sharded()

    def fail(gradient):
        raise ArithmeticError("in the backward")

    loss = toys.loss_of(model, toys.data(0, 0))
    model.blocks[0].up.weight.register_hook(fail)
    with pytest.raises(ArithmeticError, match="in the backward"):
        loss.backward()
    with torch.no_grad():
        model(toys.data(0, 0))
    assert not any(unit.users for unit in zero_core.units(model))


def stop_taking_part():
    model, _ = sharded()
    if dist.get_rank() == 1:
        time.sleep(20)
    else:
        model(toys.data(0, 0))


@pytest.mark.promise("stopped-rank")
def test_a_rank_that_stops_is_named_with_unit_and_collective(ranks):
    with closing(RankPool(2, collective_timeout_seconds=4, start_method=ranks(2).start_method)) as pool:
        with pytest.raises(AssertionError, match=r"all_gather of unit 'embed' failed on rank 0 of 2"):
            pool.run(stop_taking_part)


def leave_the_order(way: str, stage: int, **options: bool) -> str:
    """The ranks take different paths; each returns what it was told."""
    watchdog.SECONDS = 0.3
    model, optimizer = sharded(stage=stage, **options)
    rank = dist.get_rank()
    try:
        toys.loss_of(model, toys.data(0, 0)).backward()
        if way == "forwards":
            with torch.no_grad():
                for _ in range(rank):
                    model(toys.data(0, 0))
            toys.loss_of(model, toys.data(0, 0)).backward()
        elif way == "parameters":
            with torch.no_grad():
                model.blocks[rank].up.weight.sum()  # of one size, and of two units
        else:
            model.blocks[1 - rank].forward = lambda x: x  # the block is skipped: layerdrop
            model.run = lambda block, x: x if block is model.blocks[1 - rank] else block(x)
            toys.loss_of(model, toys.data(0, 0)).backward()
        optimizer.step()
    except CollectiveError as error:
        return str(error)
    return "nothing raised"


@pytest.mark.promise("ranks-crossed", "graph-needs-values")
@pytest.mark.parametrize(("way", "stage"), [("parameters", 3), ("forwards", 3), ("layerdrop", 3), ("layerdrop", 0)])
def test_every_rank_is_told_where_the_ranks_crossed(ranks, way, stage):
    with closing(RankPool(2, collective_timeout_seconds=30, start_method=ranks(2).start_method)) as pool:
        if stage == 0:
            assert pool.run(partial(leave_the_order, find_unused_parameters=True), way, stage) == ["nothing raised"] * 2
        texts = pool.run(leave_the_order, way, stage)
    for rank, text in enumerate(texts):
        assert f"rank {rank} called" in text and f"where rank {1 - rank} called" in text, texts
        assert way == "forwards" or ("'blocks.0'" in text and "'blocks.1'" in text), texts
        assert "an image tower without an image, shard with find_unused_parameters=True at stage 0, 1 or 2" in text


def test_at_stage_3_every_rank_runs_every_unit():
    with pytest.raises(StageError, match=r"with stage=3: .*no rank may skip a unit\. Use stage 0, 1 or 2\. Or leave"):
        sharded(find_unused_parameters=True)
    sharded(stage=2, find_unused_parameters=True)[1].close()


@pytest.mark.promise("parameter-added")
@kit.on_ranks(2)
def test_an_adapter_that_no_rank_averages_is_refused() -> None:
    """Ranks would drift apart without an error."""
    model, optimizer = sharded()
    x = toys.data(0, 0)
    model.blocks[1].register_parameter("scale", nn.Parameter(torch.ones(3)))
    for forward in (lambda: model(x), lambda: model.blocks[1](torch.ones(2, toys.WIDTH))):
        with pytest.raises(ChangedParameterError, match=r"blocks.1.scale was added to the model .* Or freeze it"):
            forward()
    with torch.no_grad():
        model(x)
    model.blocks[1].scale.requires_grad_(False)
    kit.step(optimizer, toys.loss_of(model, x))


def read_the_state_late() -> list[str]:
    """Rank 0 comes when rank 1 was told something: what rank 1 was told, which must not end anything."""
    watchdog.SECONDS = 0.1
    told: list[str] = []
    store = dist.distributed_c10d._get_default_store()

    def emit(record: logging.LogRecord) -> None:
        told.append(record.getMessage())
        if "all_gather of 'embed'" in told[-1]:
            store.set("told", "")

    handler = logging.Handler()
    handler.emit = emit
    logging.getLogger("zero_core").addHandler(handler)
    try:
        model, _ = sharded()
        if dist.get_rank() == 0:
            store.wait(["told"])
            store.delete_key("told")
        model.state_dict()
    finally:
        watchdog.SECONDS = 5.0
        logging.getLogger("zero_core").removeHandler(handler)
    return told


@pytest.mark.promise("waits-alone")
def test_a_rank_that_waits_alone_says_in_which_call(ranks):
    _, told = ranks(2).run(read_the_state_late)
    one = next(text for text in told if "all_gather of 'embed'" in text)
    assert re.search(r"rank 1 of 2 has waited \d\d? s .*test_bad_input.py.*model.state_dict\(\)", one)


@pytest.mark.promise("ranks-give-differently")
@pytest.mark.parametrize("what", ["blocks", "group", "stage", "norm", "scale"])
@kit.on_ranks(2)
def test_ranks_that_shard_different_things_are_told_before_they_cross(what):
    rank = kit.world()[0]
    torch.manual_seed(0)
    model = toys.Stack(blocks=3 + rank if what == "blocks" else 3)
    parameters = list(model.parameters())[: -1 if what == "group" and rank else None]
    differing = {"stage": {"stage": 2}, "norm": {"max_grad_norm": 1.0}, "scale": {"loss_scale": 8.0}}
    options = {name: value + rank for name, value in differing.get(what, {}).items()}
    told = rf"^the ranks gave shard\(\) different things: on rank {rank} a model of .* all 2 must give the same$"
    with pytest.raises(ZeroError, match=told):
        zero_core.shard(model, toys.sgd(parameters), **options)


@pytest.mark.promise("ranks-give-differently")
@pytest.mark.advice("average the metric over the ranks, by torch.distributed.all_reduce")
@pytest.mark.parametrize(("stage", "what"), [(2, "rate"), (3, "rate"), (3, "tensor"), (3, "norm")])
@kit.on_ranks(2)
def test_ranks_that_step_with_different_options_are_told_and_go_on_with_the_same(stage, what):
    """Fails if each rank updates its slice at a rate that follows from its own loss, or clips to a norm of its own."""
    rank, rate = kit.world()[0], torch.tensor(0.1) if what == "tensor" else 0.1
    dense, plain, model, optimizer = kit.pair(toys.Stack, partial(torch.optim.AdamW, lr=rate), stage=stage)
    metric = torch.tensor(1.0 + rank)
    if what == "norm":
        optimizer.max_grad_norm = float(metric)
    else:
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        schedule.step(1.5)
        schedule.step(metric)
    for each in (dense, model):
        toys.loss_of(each, toys.data(0, 0)).backward()
    with pytest.raises(UnsupportedOptimizerError, match=rf"^the 2 ranks step with different options \(rank {rank}: m"):
        optimizer.step()
    dist.all_reduce(metric)
    optimizer.max_grad_norm = None if metric == 3.0 else 1.0 + rank
    for each in (plain, optimizer):
        each.param_groups[0]["lr"] = 0.1
        each.step()
    kit.assert_same(model, dense)


@pytest.mark.promise("steps-in-gathered")
@kit.on_ranks(1, 2)
def test_steps_and_checkpoints_inside_gathered_are_refused(tmp_path):
    model, optimizer = sharded()
    plain = toys.sgd(model.parameters())
    inside = ZeroError, "this call inside zero_core.gathered, where .* leave the with block first"
    for use, (error, match) in {
        plain.step: (GradientError, "step.. of a plain SGD inside zero_core.gathered would .*set p.grad yourself"),
        optimizer.step: inside,
        lambda: zero_core.checkpoint.save(tmp_path, model, optimizer): inside,
    }.items():
        with zero_core.gathered(model):
            toys.loss_of(model, toys.data(0, 0)).backward()
            with pytest.raises(error, match=match):
                use()
        optimizer.zero_grad()
    kit.step(optimizer, toys.loss_of(model, toys.data(0, 0)))


@pytest.mark.promise("steps-in-gathered")
def test_a_plain_optimizer_inside_gathered_steps_gradients_that_were_given_to_it():
    model, optimizer = sharded()
    plain = toys.sgd(model.parameters())
    with zero_core.gathered(model):
        before = model.head.weight.detach().clone()
        (gradient,) = torch.autograd.grad(toys.loss_of(model, toys.data(0, 0)), [model.head.weight])
        model.head.weight.grad = gradient
        plain.step()
        plain.zero_grad()
    torch.testing.assert_close(model.head.weight.detach().clone(), before - 0.1 * gradient)  # as the error advises
    kit.step(optimizer, toys.loss_of(model, toys.data(0, 0)))


LINEAR = nn.Linear(toys.WIDTH, toys.WIDTH)
COMPILED = {
    "scripted block": lambda: torch.jit.script(toys.Block()),
    "traced block": lambda: torch.jit.trace(toys.Block(), torch.ones(2, toys.WIDTH)),
    "scripted part": lambda: nn.Sequential(torch.jit.script(LINEAR), nn.Tanh()),
}


def scripted(make):
    """A stack with blocks that torch compiles, or of which a part is compiled."""
    return type("Scripted", (toys.Stack,), {"make_block": lambda self: make()})()


@pytest.mark.promise("torchscript")
@pytest.mark.parametrize("compiled", COMPILED)
def test_torchscript_modules_with_parameters_are_refused_by_name(compiled):
    model = scripted(COMPILED[compiled])
    with pytest.raises(ZeroError, match=r"'blocks\.0(\.0)?' is a TorchScript .*compile each block with torch.compile"):
        zero_core.shard(model, toys.sgd(model.parameters()))


@pytest.mark.promise("torchscript")
def test_a_torchscript_module_without_parameters_is_a_part_like_any_other():
    toys.train(lambda: scripted(lambda: nn.Sequential(toys.Block(), torch.jit.script(nn.Tanh()))), steps=2)


@pytest.mark.advice("Or script a plain model that loads")
@pytest.mark.promise("torchscript")
@pytest.mark.parametrize("path", ["", "blocks.1", "head", "blocks.1.up"])
def test_a_sharded_module_is_not_compiled_to_torchscript(path):
    model, _ = sharded()
    with pytest.raises(ShardedParameterError, match=r"torch\.jit\.script of a sharded"):
        torch.jit.script(model.get_submodule(path))
    plain = toys.Block()
    plain.load_state_dict(model.blocks[1].state_dict())
    x = torch.ones(2, toys.WIDTH)
    torch.testing.assert_close(torch.jit.script(plain)(x), model.blocks[1](x))


@pytest.mark.advice("write nn.Parameter(p.detach().clone())")
@pytest.mark.promise("parameter-over-sharded")
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    "change",
    [
        torch.nn.utils.weight_norm,
        torch.nn.utils.parametrizations.weight_norm,
        lambda module: nn.Parameter(module.weight),
        lambda module: nn.Parameter(module.weight.data),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_parameter_made_over_a_sharded_one_is_refused(stage, change):
    model, _ = sharded(stage=stage)
    expected = model.head.weight.detach().clone()
    copy_of_it = nn.Parameter(model.head.weight.detach().clone())
    assert copy_of_it.is_leaf and copy_of_it.requires_grad and torch.equal(copy_of_it, expected)
    with pytest.raises(ShardedParameterError, match=r"nn\.Parameter\(p\) of head\.weight.* before zero_core\.shard"):
        change(model.head)


@pytest.mark.advice("Remove this line, and pass reduce_dtype= to zero_core.shard for the dtype")
@pytest.mark.promise("grad-dtype")
@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_another_dtype_of_gradients_is_refused_by_name(stage):
    """In plain torch p.grad has that dtype. Here it would have the parameter's, without reduce_dtype=."""
    model = toys.Stack().bfloat16()
    model.head.weight.grad_dtype = torch.float32
    with pytest.raises(GradientError, match=r"= torch\.float32 for head\.weight: .*bfloat16. Remove this line, and"):
        kit.sharded(model, stage=stage)
    model.head.weight.grad_dtype = torch.bfloat16
    model.embed.bias.requires_grad_(False).grad_dtype = torch.float32
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = zero_core.shard(model, toys.sgd(trained), stage=stage)  # one that no step changes may have its own
    for wanted in (torch.float32, None):
        for grad in (True, False):
            with pytest.raises(GradientError, match=rf"p\.grad_dtype = {wanted} for head\.weight"):
                with torch.set_grad_enabled(grad):
                    model.head.weight.grad_dtype = wanted
    model.head.weight.grad_dtype = torch.bfloat16  # as it is
    toys.loss_of(model, toys.data(0, 0).bfloat16()).backward()
    assert model.head.weight.grad.dtype == model.head.weight.grad_dtype == torch.bfloat16
    optimizer.step()
    plain, model = kit.twins(lambda: toys.Stack().bfloat16())
    for parameter in plain.parameters():
        parameter.grad_dtype = torch.float32
    kit.sharded(model, toys.sgd, stage=stage, reduce_dtype=torch.float32)
    for step in range(3):
        for each in (plain, model):
            toys.loss_of(each, toys.data(step, 0).bfloat16()).backward()
    toys.same_gradients(model, plain, rtol=0, atol=0)


@pytest.mark.promise("optimizer-in-backward")
@pytest.mark.parametrize("stage", [0, 3])
def test_an_optimizer_that_torch_steps_in_backward_is_refused_by_name(stage):
    """It would find no gradient, and step nothing."""
    model = toys.Stack()
    _apply_optimizer_in_backward(torch.optim.SGD, model.head.parameters(), {"lr": 0.1})
    with pytest.raises(UnsupportedOptimizerError, match=r"was called for head\.weight: .*pass update_in_backward=True"):
        kit.sharded(model, stage=stage)
    model, optimizer = kit.sharded(toys.Stack, stage=stage)
    with pytest.raises(UnsupportedOptimizerError, match="was called for head.weight"):
        _apply_optimizer_in_backward(torch.optim.SGD, model.head.parameters(), {"lr": 0.1})
    kit.step(optimizer, toys.loss_of(model, toys.data(0, 0)))
