"""What is written into parameters, in a forward or between steps, is kept on every rank, or refused by name.

Each test fails if a write is lost, undone by an older view, or becomes a mixture of what several ranks wrote.
"""

from __future__ import annotations

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
from zero_core.precision import digest

SIZES = pytest.mark.parametrize("size", [1, 2])
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Clamped(toys.Stack):
    """A forward that writes into a block's weight before it uses it, and into a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].calls = nn.Parameter(torch.zeros(()), requires_grad=False)

    def make_block(self):
        class Clamping(toys.Block):
            def forward(self, x):
                with torch.no_grad():
                    self.up.weight.clamp_(-0.11, 0.11)
                self.norm.bias.detach().add_(0.01)
                if hasattr(self, "calls"):
                    self.calls.detach().add_(1.0)
                return super().forward(x)

        return Clamping()


class Renormalised(nn.Module):
    """An embedding that keeps the norm of the rows it looks up, in a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, toys.WIDTH, max_norm=0.8)
        self.head = nn.Linear(toys.WIDTH, 3)

    def forward(self, x):
        return self.head(self.words((x.abs() * 4).long() % 11).mean(1))


def train(make, options):
    """Beside plain torch, all ranks on the same batch: the reference's masters would not see what a forward writes."""
    model, dense = kit.twins(make, seed=1)
    theirs = toys.sgd(dense.parameters())
    optimizer = zero_core.shard(model, toys.sgd(model.parameters()), **options)
    for step in range(4):
        losses: list[float] = []
        for each, stepped in ((model, optimizer), (dense, theirs)):
            losses.append(float(kit.step(stepped, toys.loss_of(each, toys.data(step, 0)))))
        assert losses[0] == pytest.approx(losses[1], rel=1e-5), step
    with zero_core.gathered(model):
        for (name, ours), other in zip(model.named_parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@STAGES
@SIZES
@pytest.mark.parametrize("make", [Clamped, Renormalised])
def test_writes_inside_a_forward_are_kept(ranks, size, stage, make):
    ranks(size).run(train, make, {"stage": stage})


def test_writes_inside_a_forward_are_kept_where_the_store_copies():
    train(Clamped, {"store": swapping.SwappingStore()})


@kit.on_ranks(1, 2)
def test_writes_inside_a_forward_reach_the_fp32_masters():
    torch.manual_seed(0)
    model = Clamped().bfloat16()
    optimizer = zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for _ in range(2):
        kit.step(optimizer, toys.loss_of(model, toys.data(0, 0).bfloat16()))
    with zero_core.gathered(model, master=True):
        assert float(model.blocks[0].up.weight.abs().max()) == float(torch.tensor(0.11).bfloat16())
        assert float(model.blocks[0].calls) == 2.0


def renormalise_differently(options):
    model = Renormalised()
    with torch.no_grad():
        model.words.weight.mul_(9.0)
    optimizer = zero_core.shard(model, toys.sgd(model.parameters()), **options)
    toys.loss_of(model, torch.full((2, 5), float(toys.world()[0]))).backward()
    with pytest.raises(ChangedParameterError, match=r"2 ranks wrote different values .*words.*max_norm"):
        optimizer.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_that_write_different_values_are_told_at_the_step(ranks, stage):
    ranks(2).run(renormalise_differently, {"stage": stage})


def round_numbers(rank):
    return torch.full((3, toys.WIDTH), 0.5 + rank)  # whose low bits are zeros


def another_order(rank):
    return torch.arange(3.0 * toys.WIDTH).roll(4 * rank).view(3, toys.WIDTH)


@pytest.mark.parametrize("values", [round_numbers, another_order])
@kit.on_ranks(2)
def test_round_numbers_and_another_order_are_different_values(values):
    model, optimizer = kit.sharded(toys.Stack, toys.sgd)
    with torch.no_grad():
        model.head.weight.copy_(values(toys.world()[0]))
    toys.loss_of(model, toys.data(0, 0)).backward()
    with pytest.raises(ChangedParameterError, match=r"wrote into head.weight"):
        optimizer.step()


@kit.on_ranks(2)
def test_ranks_that_initialise_differently_are_told_at_the_step():
    model = toys.Stack()
    optimizer = zero_core.shard(model, toys.sgd(model.parameters()))
    torch.manual_seed(toys.world()[0])
    nn.init.normal_(model.head.weight)
    toys.loss_of(model, toys.data(0, 0)).backward()
    with pytest.raises(ChangedParameterError, match=r"wrote into head.weight"):
        optimizer.step()


class Replaced(toys.Stack):
    """A forward that gives a parameter other memory."""

    def make_block(self):
        class Replacing(toys.Block):
            def forward(self, x):
                self.up.weight.data = self.up.weight.detach().clamp(-0.11, 0.11)
                return super().forward(x)

        return Replacing()


@pytest.mark.parametrize("stage", [0, 3])
@SIZES
def test_memory_that_a_forward_gives_a_parameter_is_read_and_let_go(ranks, size, stage):
    ranks(size).run(train, Replaced, {"stage": stage})


class Unseen(toys.Stack):
    def forward(self, x):
        self.blocks[1].up.weight.data.clamp_(-0.1, 0.1)  # moves no version counter, and outside of the block's forward
        return super().forward(x)


class UnseenInside(toys.Stack):
    def make_block(self):
        class Clamping(toys.Block):
            def forward(self, x):
                self.up.weight.data.clamp_(-0.1, 0.1)
                return super().forward(x)

        return Clamping()


@pytest.mark.parametrize(
    ("size", "options"), [(2, {"stage": 3}), (2, {"stage": 0}), (1, {"param_dtype": torch.bfloat16})]
)
@kit.on_ranks()
def test_writes_inside_a_forward_through_data_are_refused(size, options):
    model, optimizer = kit.sharded(UnseenInside, toys.sgd, **options)
    toys.loss_of(model, toys.data(0, 0).to(options.get("param_dtype", torch.float32))).backward()
    with pytest.raises(ChangedParameterError, match=r"the forward of blocks\.\d.* writes into a parameter through its"):
        optimizer.step()


class UnseenLater(toys.Stack):
    """Writes from its second forward on, and into a weight that two blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight

    def make_block(self):
        class Clamping(toys.Block):
            forwards = 0

            def forward(self, x):
                self.forwards += 1
                if self.forwards > 1:
                    self.up.weight.data.clamp_(-0.1, 0.1)
                return super().forward(x)

        return Clamping()


@kit.on_ranks(2)
def test_writes_through_data_that_begin_later_are_refused():
    model, optimizer = kit.sharded(UnseenLater, toys.sgd)
    kit.step(optimizer, toys.loss_of(model, toys.data(0, 0)))
    toys.loss_of(model, toys.data(0, 0)).backward()
    with pytest.raises(ChangedParameterError, match="writes into a parameter through its"):
        optimizer.step()


def clamped_over_nvme(dtype):
    torch.manual_seed(1)
    model = Clamped().to(dtype)
    tiers = pytest.importorskip("zero_offload")
    store = tiers.TieredStore(
        parameters="nvme",
        gradients="nvme",
        optimizer="nvme",
        nvme=tiers.MemoryByteStore(),
        step=tiers.TorchStep(),
    )
    optimizer = zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.0), store=store, prefetch_bytes=0)
    for step in range(2):
        kit.step(optimizer, toys.loss_of(model, toys.data(step, 0).to(dtype)))
    with zero_core.gathered(model, master=True):
        for block in model.blocks:
            assert float(block.up.weight.abs().max()) == float(torch.tensor(0.11).to(dtype))
    optimizer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_into_memory_that_a_store_lent_reach_its_tier(dtype):
    """A slot that another unit takes is not written back: what a forward wrote into it would be gone."""
    clamped_over_nvme(dtype)


@needs_swap
def test_writes_through_data_are_kept_where_the_parameter_is_the_master():
    train(UnseenInside, {})


@SIZES
def test_writes_through_data_of_another_module_are_kept(ranks, size):
    ranks(size).run(train, Unseen, {})


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
}


@kit.on_ranks(1, 2)
@pytest.mark.parametrize("name", WRITES)
def test_views_of_every_kind_write_through(name):
    dense, model = kit.twins(toys.Stack, seed=1)
    optimizer = zero_core.shard(model, toys.sgd(model.parameters()))
    for each in (model, dense):
        with torch.no_grad():
            WRITES[name](each.head.weight)
    with zero_core.gathered(model):
        assert torch.equal(model.head.weight, dense.head.weight)
    optimizer.close()


class Aliased(toys.Stack):
    """A block's forward writes into views of its own parameters that were made before it began."""

    def make_block(self):
        class Aliasing(toys.Block):
            views = ()

            def forward(self, x):
                with torch.no_grad():
                    for view in self.views:
                        view.mul_(0.9)
                return super().forward(x)

        return Aliasing()


@kit.on_ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("made", ["detach", "data", "row"])
def test_a_forward_writes_into_views_of_its_own_parameters(stage, made):
    """The memory that the forward reads has the new values, and is still there."""
    make = {"detach": lambda p: p.detach(), "data": lambda p: p.data, "row": lambda p: p.detach()[1]}[made]
    dense, model = kit.twins(Aliased)
    theirs, optimizer = toys.sgd(dense.parameters()), kit.sharded(model, toys.sgd, stage=stage)[1]
    for step in range(2):
        for each, of in ((optimizer, model), (theirs, dense)):
            for block in of.blocks:
                block.views = [make(block.up.weight), make(block.down.weight)]
            kit.step(each, toys.loss_of(of, toys.data(step, 0)))
    torch.testing.assert_close(kit.values(model), [p.detach() for p in dense.parameters()])


def test_a_backward_through_views_that_the_units_own_forward_wrote_is_refused():
    """As functional_call has it inside of torch.func: the unit has new values, and the views those from before."""
    model = kit.sharded(Clamped, toys.sgd, stage=3)[0]
    values = {name: p.detach() for name, p in model.named_parameters()}
    with pytest.raises(ChangedParameterError, match="is used after a step"):
        torch.func.grad(lambda values: toys.loss_of(partial(functional_call, model, values), toys.data(0, 0)))(values)


def test_a_view_from_before_a_step_is_refused():
    model, optimizer = kit.sharded(toys.Stack, toys.sgd)
    view, copied, state = model.head.weight.data, model.head.weight.detach().clone(), model.state_dict()
    toys.loss_of(model, toys.data(0, 0)).backward()
    optimizer.step()
    for use in (lambda: view.norm(), lambda: view[0].zero_(), lambda: pickled(view)):
        with pytest.raises(ChangedParameterError, match="is used after a step.* Take a new view, or clone"):
            use()
    assert view.shape == copied.shape
    assert torch.equal(state["head.weight"], copied), "a state dict is a snapshot"
    assert type(pickled(state["head.weight"])) is torch.Tensor
    with pytest.raises(ChangedParameterError, match="is used after a step"):
        state["head.weight"].zero_()
    model.head.weight.data.zero_()
    assert float(model.head.weight.detach().abs().sum()) == 0.0


def pickled(value, **how):
    torch.save(value, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, **how)


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
            with pytest.raises(ChangedParameterError, match="the memory of a view of a Sharded .* with copy_"):
                replace(view)


@kit.on_ranks(2)
def test_a_collective_reads_a_parameter_and_is_not_given_one_to_write():
    """It writes when it is waited for, which no view sees. Fails if it reads where there is no memory, too."""
    dense, model = kit.twins(toys.Stack)
    optimizer = kit.sharded(model, toys.sgd)[1]
    toys.loss_of(model, toys.data(0, 0)).backward()
    weight = model.head.weight
    assert all(hasattr(getattr(dist.ProcessGroup, name), "__wrapped__") for name in ("broadcast", "allgather"))
    for tensor in (weight, weight.data, weight.detach()[0]):
        for collective in (dist.all_reduce, lambda tensor: dist.broadcast(tensor, 0)):
            with pytest.raises(ChangedParameterError, match=r"torch\.distributed\), which would be lost"):
                collective(tensor)
    with pytest.raises(GradientError, match=r"held gradient, which has no memory|torch\.distributed"):
        dist.all_reduce(weight.grad)
    for tensor in (weight, weight.data):
        found = [torch.zeros(3, toys.WIDTH) for _ in range(2)]
        dist.all_gather(found, tensor)
        assert all(torch.equal(each, dense.head.weight.detach()) for each in found)
    optimizer.step()


SIZED = {
    "data": lambda w: w.data.shape,
    "detach": lambda w: w.detach().size(),
    "row": lambda w: w.data[0].shape,
    "itself": lambda w: w.shape,
    "values": lambda w: w.data.max(0).values.shape,
    "added": lambda w: w.data.shape + torch.Size([1]),
}


@pytest.mark.parametrize("name", SIZED)
def test_the_shape_of_a_view_is_a_size(name):
    """gpytorch asks p.data.shape.numel()."""
    dense, model = kit.twins(toys.Stack)
    kit.sharded(model, toys.sgd)
    for mode in (torch.enable_grad(), torch.no_grad()):
        with mode:
            ours, theirs = SIZED[name](model.head.weight), SIZED[name](dense.head.weight)
        assert type(ours) is torch.Size and ours == theirs and ours.numel() == theirs.numel()
    svd, expected = torch.linalg.svd(model.head.weight.data), torch.linalg.svd(dense.head.weight.data)
    torch.testing.assert_close(svd.S, expected.S)


def test_a_view_pickles_and_copies_as_a_plain_tensor():
    model = kit.sharded(toys.Stack, toys.sgd)[0]
    view = model.head.weight.data
    for other in (pickled(view), copy.deepcopy(view)):
        assert type(other) is torch.Tensor and torch.equal(other, view)


def test_an_array_of_a_sharded_parameter_is_read_only():
    model = kit.sharded(toys.Stack, toys.sgd)[0]
    array = model.head.weight.detach().numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 1.0


STORED = {
    "filled": lambda w: w.data.untyped_storage().fill_(0),
    "an element": lambda w: w.detach().untyped_storage().__setitem__(0, 1),
    "copied": lambda w: w.data[0].untyped_storage().copy_(torch.zeros(39).untyped_storage()),
    "resized": lambda w: w.data.untyped_storage().resize_(0),
    "typed": lambda w: w.data.storage().fill_(0.0),
    "an element of a typed one": lambda w: w.storage().__setitem__(0, 1.0),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", STORED)
def test_the_storage_of_a_view_is_read_only(name):
    """Plain torch writes into the parameter. Here the write would be lost."""
    model = kit.sharded(toys.Stack, toys.sgd)[0]
    weight = model.head.weight
    expected = weight.detach().clone()
    with pytest.raises(ShardedParameterError, match=r"storage of 156 bytes .* write into the view itself, with copy_"):
        STORED[name](weight)
    assert torch.equal(weight.detach(), expected)


def test_the_storage_of_a_view_is_read_and_saved():
    model = kit.sharded(toys.Stack, toys.sgd)[0]
    view, expected = model.head.weight.data, model.head.weight.detach().clone()
    storage = view.untyped_storage()
    assert storage.nbytes() == expected.nbytes and storage.data_ptr() == view.data_ptr()
    for each in (storage, storage.clone(), copy.deepcopy(storage), pickled(storage, weights_only=False)):
        assert each.tolist() == expected.untyped_storage().tolist()
    assert torch.equal(pickled(view), expected)
    assert storage.clone().fill_(0)[0] == 0 and torch.equal(view, expected)
    view.zero_()
    assert not storage[0]


@pytest.mark.parametrize("name", ["filled", "typed"])
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_so_is_that_of_a_state_dict_and_of_a_gradient(name):
    model = kit.sharded(toys.Stack, toys.sgd)[0]
    toys.loss_of(model, toys.data(0, 0)).backward()
    expected = model.head.weight.grad.clone()
    write = {"filled": lambda t: t.untyped_storage().fill_(0), "typed": lambda t: t.storage().fill_(0.0)}[name]
    for tensor in (model.state_dict()["head.weight"], model.head.weight.grad, model.head.weight.grad[0]):
        with pytest.raises(ShardedParameterError, match="would be lost: write into the view itself"):
            write(tensor)
    assert torch.equal(model.head.weight.grad, expected)


@pytest.mark.parametrize("take", [torch.from_dlpack, np.from_dlpack])
def test_dlpack_is_given_a_clone(take):
    """torch and NumPy would write into the copy through it."""
    model = kit.sharded(toys.Stack, toys.sgd)[0]
    toys.loss_of(model, toys.data(0, 0)).backward()
    weight = model.head.weight
    for tensor in (weight.data, weight.detach()[0], model.state_dict()["head.weight"]):
        with pytest.raises(ShardedParameterError, match=r"DLPack was given the memory of .* Give it a clone"):
            take(tensor)
    for tensor in (weight.grad, weight.grad[0]):
        with pytest.raises(GradientError, match=r"the memory of a copy of head\.weight\.grad.* Give it a clone"):
            take(tensor)
    assert torch.equal(torch.as_tensor(take(weight.detach().clone())), weight.detach())
    assert torch.equal(torch.as_tensor(take(weight.grad.clone())), weight.grad)


@torch.jit.script
def scripted_write(w: torch.Tensor, by: float = 0.5):
    return w.mul_(by)


@torch.jit.script
def scripted_writes(ws: list[torch.Tensor]):
    for w in ws:
        w.add_(1.0)


SCRIPTED = {
    "data": lambda w: scripted_write(w.data),
    "row": lambda w: scripted_write(w.detach()[1], by=0.25),
    "list": lambda w: scripted_writes([*w.data]),
}


@kit.on_ranks(1, 2)
@pytest.mark.parametrize("name", SCRIPTED)
def test_a_function_under_torchscript_writes_through(name):
    dense, model = kit.twins(toys.Stack, seed=1)
    optimizer = zero_core.shard(model, toys.sgd(model.parameters()))
    for each in (model, dense):
        SCRIPTED[name](each.head.weight)
    with zero_core.gathered(model):
        assert torch.equal(model.head.weight, dense.head.weight)
    optimizer.close()


@kit.on_ranks(1, 2)
def test_writes_into_a_state_dict_and_into_several_views_at_once():
    dense, model = kit.twins(toys.Stack, seed=1)
    zero_core.shard(model, toys.sgd(model.parameters()))
    for each in (model, dense):
        state = each.state_dict()
        for name in state:
            state[name].mul_(0.5)
        views = [p.data for p in each.parameters()]
        for view in views:
            view.add_(0.25)
    with zero_core.gathered(model):
        for ours, other in zip(model.parameters(), dense.parameters(), strict=True):
            assert torch.equal(ours, other)


def test_writes_inside_a_forward_are_kept_on_a_torch_that_cannot_swap(monkeypatch):
    monkeypatch.setattr(zero_core.runtime.residency, "CAN_SWAP", False)
    train(Clamped, {})
    train(Renormalised, {"stage": 0})


def test_an_array_over_parameters_leaves_a_torch_that_cannot_swap_training(monkeypatch):
    """A storage that numpy has seen is not resizable, so its memory stays."""
    monkeypatch.setattr(zero_core.runtime.residency, "CAN_SWAP", False)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model = copy.deepcopy(plain)
    optimizer = zero_core.shard(model, toys.sgd(model.parameters()))
    torch_optimizer = toys.sgd(plain.parameters())
    for step in range(3):
        with zero_core.gathered(model):
            arrays = [parameter.detach().numpy().copy() for parameter in model.parameters()]
        assert all((a == p.detach().numpy()).all() for a, p in zip(arrays, plain.parameters(), strict=True)), step
        for each, own in ((model, optimizer), (plain, torch_optimizer)):
            each(torch.ones(3, 4)).sum().backward()
            own.step()
            own.zero_grad()


def test_a_checksum_sees_values_that_change_places():
    model = kit.sharded(nn.Linear(64, 64), toys.sgd)[0]
    (unit,) = zero_core.units(model)
    unit.unshard()
    before = digest(unit.flat)
    for moved in (unit.flat.roll(2), unit.flat.view(-1, 2).flip(0).reshape(-1)):
        unit.flat.data.copy_(moved)
        assert not torch.equal(digest(unit.flat), before)
