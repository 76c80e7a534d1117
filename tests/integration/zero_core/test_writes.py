"""What is written into parameters, in a forward or between steps, is kept on every rank, or refused by name."""

import copy
import io
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

import zero_core
from tests import kit
from tests.integration.zero_core import swapping, toys
from tests.swap import needs_swap
from zero_core.errors import ChangedParameterError, GradientError, ShardedParameterError


class Written(toys.Stack):
    """Before a block's forward computes, `write(block)` runs inside of it, if that is set."""

    def __init__(self, write=lambda block: None):
        self.write = write
        super().__init__()

    def make_block(self):
        class Block(toys.Block):
            calls = 0

            def forward(self, x):
                self.calls += 1
                write(self)
                return super().forward(x)

        write = self.write
        return Block()


def clamps(block):
    """Also into a frozen parameter, of the first block."""
    with torch.no_grad():
        block.up.weight.clamp_(-0.11, 0.11)
    block.norm.bias.detach().add_(0.01)
    if hasattr(block, "count"):
        block.count.detach().add_(1.0)


class Clamped(Written):
    def __init__(self):
        super().__init__(clamps)
        self.blocks[0].count = nn.Parameter(torch.zeros(()), requires_grad=False)


def clamps_data(block):
    """Moves no version counter."""
    block.up.weight.data.clamp_(-0.1, 0.1)


def clamps_data_later(block):
    if block.calls > 1:
        clamps_data(block)


def replaces(block):
    """Gives a parameter other memory, in every second forward."""
    if block.calls % 2:
        block.up.weight.data = block.up.weight.detach().clamp(-0.11, 0.11)


class Unseen(toys.Stack):
    def forward(self, x):
        clamps_data(self.blocks[1])  # outside of the block's forward
        return super().forward(x)


class Renormalised(nn.Module):
    """An embedding that keeps the norm of the rows it looks up, in a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, toys.WIDTH, max_norm=0.8)
        self.head = nn.Linear(toys.WIDTH, 3)

    def forward(self, x):
        return self.head(self.words((x.abs() * 4).long() % 11).mean(1))


FORWARDS = {
    "clamped": Clamped,
    "renormalised": Renormalised,
    "other memory": partial(Written, replaces),
    "data of another module": Unseen,
}


@pytest.mark.promise("writes-in-forward", "new-memory-in-forward", "views-write")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", FORWARDS)
@kit.on_ranks(1, 2)
def test_writes_inside_a_forward_are_kept(stage, name):
    """All ranks on the same batch, beside plain torch: the reference's masters would not see what a forward writes."""
    toys.beside(FORWARDS[name], steps=4, stage=stage)


@pytest.mark.promise("writes-in-forward", "writes-through-data")
@needs_swap
def test_writes_are_kept_where_the_store_copies_and_through_data_where_the_parameter_is_the_master():
    toys.beside(Clamped, steps=4, store=swapping.SwappingStore())
    toys.beside(partial(Written, clamps_data), steps=4)


@pytest.mark.promise("writes-in-forward")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_into_memory_that_a_store_lent_reach_its_tier(dtype):
    """A slot that another unit takes is not written back: what a forward wrote into it would be gone."""
    torch.manual_seed(1)
    model = Clamped().to(dtype)
    tiers = pytest.importorskip("zero_offload")
    store = tiers.TieredStore("nvme", "nvme", "nvme", nvme=tiers.MemoryByteStore(), step=tiers.TorchStep())
    optimizer = zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.0), store=store, prefetch_bytes=0)
    for step in range(2):
        kit.step(optimizer, toys.loss_of(model, toys.data(step, 0).to(dtype)))
    with zero_core.gathered(model, master=True):
        for block in model.blocks:
            assert float(block.up.weight.abs().max()) == float(torch.tensor(0.11).to(dtype))
    optimizer.close()


@pytest.mark.promise("ranks-write-differently")
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", ["round numbers", "another order", "renormalised"])
@kit.on_ranks(2)
def test_ranks_that_write_different_values_are_told_at_the_step(stage, name):
    rank, x, told = kit.world()[0], toys.data(0, 0), "wrote into head.weight"
    model, optimizer = kit.sharded(Renormalised if name == "renormalised" else toys.Stack, toys.sgd, stage=stage)
    with torch.no_grad():
        if name == "renormalised":
            model.words.weight.mul_(9.0)
            x, told = torch.full((2, 5), float(rank)), r"2 ranks wrote different values .*words.*max_norm"
        elif name == "another order":
            model.head.weight.copy_(torch.arange(3.0 * toys.WIDTH).roll(4 * rank).view(3, toys.WIDTH))
        else:
            model.head.weight.fill_(0.5 + rank)
    toys.loss_of(model, x).backward()
    with pytest.raises(ChangedParameterError, match=told):
        optimizer.step()


@pytest.mark.promise("writes-through-data")
@pytest.mark.parametrize(
    ("size", "options"), [(2, {"stage": 3}), (2, {"stage": 0}), (1, {"param_dtype": torch.bfloat16})]
)
@pytest.mark.parametrize("write", [clamps_data, clamps_data_later])
@kit.on_ranks()
def test_writes_inside_a_forward_through_data_are_refused(size, options, write):
    """At once, or where they begin later, into a weight that two blocks share."""
    model = Written(write)
    if write is clamps_data_later:
        model.blocks[2].up.weight = model.blocks[0].up.weight
    model, optimizer = kit.sharded(model, toys.sgd, **options)
    x = toys.data(0, 0).to(options.get("param_dtype", torch.float32))
    if write is clamps_data_later:
        kit.step(optimizer, toys.loss_of(model, x))
    toys.loss_of(model, x).backward()
    with pytest.raises(ChangedParameterError, match=r"forward of blocks\.\d.* writes into .* through parameter.data"):
        optimizer.step()


@torch.jit.script
def scripted(ws: list[torch.Tensor], by: float = 0.5):
    for w in ws:
        w.mul_(by)


WRITES = {
    "detach": lambda w: w.detach().zero_(),
    "data": lambda w: w.data.zero_(),
    "row": lambda w: w.detach()[1].fill_(3.0),
    "unbind": lambda w: [row.add_(1.0) for row in w.detach().unbind(0)],
    "chunk": lambda w: w.data.chunk(2)[0].mul_(2.0),
    "rows": lambda w: [row.add_(1.0) for row in w.data],
    "foreach": lambda w: torch._foreach_mul_([w.data], 0.5),
    "reshaped": lambda w: w.detach().view(-1)[:3].neg_(),
    "twice": lambda w: (lambda d: (d[0].zero_(), d[1].fill_(1.0)))(w.data),
    "cpu": lambda w: w.detach().cpu().mul_(0.5),
    "to": lambda w: w.data.to("cpu").mul_(0.5),
    "out": lambda w: torch.add(torch.ones(()), torch.zeros(()), out=w.data[0, 0]),
    "scripted": lambda w: (scripted([w.data]), scripted([*w.data])),
    "scripted row": lambda w: scripted([w.detach()[1]], by=0.25),
}


@pytest.mark.advice("Use a clone, and write it back with copy_(tensor)")
@pytest.mark.promise("outside-writes", "views-write", "native-values")
@kit.on_ranks(1, 2)
def test_views_of_every_kind_write_through():
    for name, write in WRITES.items():
        dense, _, model, optimizer = kit.pair(toys.Stack, toys.sgd, seed=1)
        for each in (model, dense):
            with torch.no_grad():
                write(each.head.weight)
        with zero_core.gathered(model):
            assert torch.equal(model.head.weight, dense.head.weight), name
        for each in (model, dense):
            for value in each.state_dict().values():
                value.mul_(0.5)
            for view in [p.data for p in each.parameters()]:  # several at once
                view.add_(0.25)
        kit.assert_bits(kit.values(model), list(dense.parameters()))
        optimizer.close()


@pytest.mark.promise("outside-writes")
@kit.on_ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_write_keeps_all_bits_of_masters_whose_values_stay(stage):
    model, optimizer = kit.sharded(toys.Stack, stage=stage, param_dtype=torch.bfloat16)
    kit.step(optimizer, toys.loss_of(model, toys.data(0, 0).bfloat16()))
    weight = model.head.weight
    expected, values = zero_core.full_state(weight, "master"), weight.detach().clone()
    with torch.no_grad():
        weight.clamp_(-0.125, 0.125)
        weight.data[0, 0] = 7.0
    expected[values > 0.125], expected[values < -0.125], expected[0, 0] = 0.125, -0.125, 7.0
    assert torch.equal(zero_core.full_state(weight, "master"), expected)
    assert not torch.equal(expected, expected.bfloat16().float())


@pytest.mark.promise("old-views")
def test_what_takes_other_memory_is_copied_or_refused():
    model, _ = kit.sharded(toys.Stack)
    for write in (lambda p: p.unsqueeze_(0), lambda p: p.as_strided_((3,), (1,))):
        with pytest.raises(ChangedParameterError, match="Use a clone"), torch.no_grad():
            write(model.head.weight)
    with pytest.raises(ShardedParameterError, match="no memory here"), torch.no_grad():
        model.head.weight.set_(torch.zeros(6).untyped_storage())
    with torch.no_grad():  # as a parametrized attribute that is assigned
        model.head.weight.set_(torch.eye(3, toys.WIDTH))
    assert torch.equal(model.head.weight.to_sparse().to_dense(), torch.eye(3, toys.WIDTH))


def writes_views(block):
    with torch.no_grad():
        for view in getattr(block, "views", ()):
            view.mul_(0.9)


@pytest.mark.promise("views-write")
@kit.on_ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("made", ["detach", "data", "row"])
def test_a_forward_writes_into_views_of_its_own_parameters(stage, made):
    """The memory that the forward reads has the new values, and is still there."""
    make = {"detach": lambda p: p.detach(), "data": lambda p: p.data, "row": lambda p: p.detach()[1]}[made]
    dense, theirs, model, optimizer = kit.pair(partial(Written, writes_views), toys.sgd, stage=stage)
    for step in range(2):
        for each, of in ((optimizer, model), (theirs, dense)):
            for block in of.blocks:
                block.views = [make(block.up.weight), make(block.down.weight)]
            kit.step(each, toys.loss_of(of, toys.data(step, 0)))
    torch.testing.assert_close(kit.values(model), [p.detach() for p in dense.parameters()])


def pickled(value, **how):
    torch.save(value, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, **how)


@pytest.mark.promise("old-views")
def test_a_backward_through_views_that_the_units_own_forward_wrote_is_refused():
    """As functional_call has it inside of torch.func: the unit has new values, and the views those from before."""
    model = kit.sharded(Clamped, toys.sgd, stage=3)[0]
    values = {name: p.detach() for name, p in model.named_parameters()}
    with pytest.raises(ChangedParameterError, match="is used after a step"):
        torch.func.grad(lambda values: toys.loss_of(partial(functional_call, model, values), toys.data(0, 0)))(values)


@pytest.mark.promise("old-views")
def test_a_view_from_before_a_step_is_refused():
    model, optimizer = kit.sharded(toys.Stack, toys.sgd)
    view, copied, state = model.head.weight.data, model.head.weight.detach().clone(), model.state_dict()
    toys.loss_of(model, toys.data(0, 0)).backward()
    optimizer.step()
    for use in (lambda: view.norm(), lambda: view[0].zero_(), lambda: pickled(view)):
        with pytest.raises(ChangedParameterError, match="is used after a step.* Take a new view, or call view.clone"):
            use()
    assert view.shape == copied.shape
    assert torch.equal(state["head.weight"], copied), "a state dict is a snapshot"
    assert type(pickled(state["head.weight"])) is torch.Tensor
    with pytest.raises(ChangedParameterError, match="is used after a step"):
        state["head.weight"].zero_()
    model.head.weight.data.zero_()
    assert float(model.head.weight.detach().abs().sum()) == 0.0


def stepped():
    """A sharded model with gradients, and a weight of it."""
    model = kit.sharded(toys.Stack, toys.sgd)[0]
    toys.loss_of(model, toys.data(0, 0)).backward()
    return model, model.head.weight


@pytest.mark.promise("old-views")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.untyped_storage().fill_(0),
        lambda t: t.untyped_storage().__setitem__(0, 1),
        lambda t: t.untyped_storage().copy_(torch.zeros(39).untyped_storage()),
        lambda t: t.untyped_storage().resize_(0),
        lambda t: t.storage().fill_(0.0),
        lambda t: t.storage().__setitem__(0, 1.0),
    ],
)
def test_the_storage_of_a_view_is_read_only(write):
    """Plain torch writes into the parameter. Here the write would be lost."""
    model, weight = stepped()
    expected, gradient = weight.detach().clone(), weight.grad.clone()
    for tensor in (weight.data, weight.data[0], model.state_dict()["head.weight"], weight.grad, weight.grad[0]):
        with pytest.raises(ShardedParameterError, match=r"storage, \d+ bytes, .* write into the view itself, with"):
            write(tensor)
    with pytest.raises(ShardedParameterError, match=r"storage, \d+ bytes, .* write into the view itself, with"):
        weight.storage()[0] = 1.0
    assert torch.equal(weight.detach(), expected) and torch.equal(weight.grad, gradient)


@pytest.mark.promise("old-views")
def test_a_view_is_read_copied_and_saved_as_a_plain_tensor():
    model = kit.sharded(toys.Stack, toys.sgd)[0]
    view, expected = model.head.weight.data, model.head.weight.detach().clone()
    for other in (pickled(view), copy.deepcopy(view)):
        assert type(other) is torch.Tensor and torch.equal(other, expected)
    with pytest.raises(ValueError, match="read-only"):
        view.numpy()[0, 0] = 1.0
    storage = view.untyped_storage()
    assert storage.nbytes() == expected.nbytes and storage.data_ptr() == view.data_ptr()
    for each in (storage, storage.clone(), copy.deepcopy(storage), pickled(storage, weights_only=False)):
        assert each.tolist() == expected.untyped_storage().tolist()
    assert storage.clone().fill_(0)[0] == 0 and torch.equal(view, expected)
    view.zero_()
    assert not storage[0]


@pytest.mark.promise("old-views")
def test_new_memory_for_a_view_is_refused():
    model = toys.Stack()
    zero_core.shard(model, toys.sgd(model.parameters()))
    for view in (model.head.weight.data, model.head.weight.detach()[0]):
        for replace in (
            lambda view: setattr(view, "data", torch.zeros(3)),
            lambda view: view.resize_(1),
            lambda view: view.t_(),
            lambda view: view.set_(torch.zeros(3)),
            lambda view: torch.zeros(3).set_(view),
            lambda view: view.share_memory_(),
        ):
            with pytest.raises(ChangedParameterError, match="a view of head.weight cannot be replaced .* with copy_"):
                replace(view)


@pytest.mark.promise("old-views")
@kit.on_ranks(2)
def test_a_collective_reads_a_parameter_and_is_not_given_one_to_write():
    """It writes when it is waited for, which no view sees. Fails if it reads where there is no memory, too."""
    dense, _, model, optimizer = kit.pair(toys.Stack, toys.sgd)
    toys.loss_of(model, toys.data(0, 0)).backward()
    weight = model.head.weight
    assert all(hasattr(getattr(dist.ProcessGroup, name), "__wrapped__") for name in ("broadcast", "allgather"))
    for tensor in (weight, weight.data, weight.detach()[0]):
        for collective in (dist.all_reduce, lambda tensor: dist.broadcast(tensor, 0)):
            with pytest.raises(
                ChangedParameterError, match=r"view of head\.weight cannot .* or a collective\)\. Use a clone"
            ):
                collective(tensor)
    with pytest.raises(GradientError, match=r"a sharded parameter, which has none|torch\.distributed"):
        dist.all_reduce(weight.grad)
    for tensor in (weight, weight.data):
        found = [torch.zeros(3, toys.WIDTH) for _ in range(2)]
        dist.all_gather(found, tensor)
        assert all(torch.equal(each, dense.head.weight.detach()) for each in found)
    optimizer.step()


@pytest.mark.promise("view-size")
def test_the_shape_of_a_view_is_a_size():
    """gpytorch asks p.data.shape.numel()."""

    def sizes(w):
        views = w.data.shape, w.detach().size(), w.data[0].shape, w.data.max(0).values.shape
        return [*views, w.shape, w.data.shape + torch.Size([1])]

    dense, _, model, _ = kit.pair(toys.Stack, toys.sgd)
    for mode in (torch.enable_grad(), torch.no_grad()):
        with mode:
            found, expected = sizes(model.head.weight), sizes(dense.head.weight)
        assert {type(size) for size in found} == {torch.Size} and found == expected
        assert [size.numel() for size in found] == [size.numel() for size in expected]
    svd, expected = torch.linalg.svd(model.head.weight.data), torch.linalg.svd(dense.head.weight.data)
    torch.testing.assert_close(svd.S, expected.S)


@pytest.mark.advice("Pass a clone, from_dlpack(p")
@pytest.mark.promise("old-views")
@pytest.mark.parametrize("take", [torch.from_dlpack, np.from_dlpack])
def test_dlpack_is_given_a_clone(take):
    """torch and NumPy would write into the copy through it."""
    model, weight = stepped()
    for tensor in (weight.data, weight.detach()[0], model.state_dict()["head.weight"]):
        with pytest.raises(ShardedParameterError, match=r"would share memory with a copy, .* Pass a clone"):
            take(tensor)
    for tensor in (weight.grad, weight.grad[0]):
        with pytest.raises(GradientError, match=r"would share memory with a copy.* Pass a clone"):
            take(tensor)
    assert torch.equal(torch.as_tensor(take(weight.detach().clone())), weight.detach())
    assert torch.equal(torch.as_tensor(take(weight.grad.clone())), weight.grad)


@pytest.mark.promise("numpy-before-2-12")
def test_an_array_over_parameters_leaves_a_torch_that_cannot_swap_training(monkeypatch):
    """A storage that numpy has seen is not resizable, so its memory stays."""
    monkeypatch.setattr(zero_core.unit_memory.unit_memory, "CAN_SWAP", False)
    dense, theirs, model, optimizer = kit.pair(toys.Stack, toys.sgd)
    for step in range(3):
        with zero_core.gathered(model):
            arrays = [parameter.detach().numpy().copy() for parameter in model.parameters()]
        for array, parameter in zip(arrays, dense.parameters(), strict=True):
            np.testing.assert_allclose(array, parameter.detach().numpy(), rtol=1e-5, atol=1e-6)
        for each, own in ((model, optimizer), (dense, theirs)):
            kit.step(own, toys.loss_of(each, toys.data(step, 0)))
