"""Gradients that enter a unit inside, by what it kept, and not through what its module returned.

Each program trains beside plain torch. A test fails if a node of the graph runs while its unit has no memory.
"""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

import zero_core
from tests import kit
from zero_core.errors import ZeroError

PLACES = ("attribute", "list", "buffer")


class Block(nn.Module):
    """Keeps what `around`, if given, computes with `plain`."""

    def __init__(self, around=None):
        super().__init__()
        self.k, self.v, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.RMSNorm(6)
        self.w, self.around = nn.Parameter(torch.ones(6)), around
        self.register_buffer("kept", torch.zeros(4, 6), persistent=False)

    def plain(self, x):
        return self.k(self.v(self.norm(x) * self.w).tanh())

    def inside(self, x):
        return self.plain(x) if self.around is None else self.around(self.plain, x)

    def forward(self, x, place="attribute", into=None):
        k = self.inside(x)
        if place == "list":
            into.append(k)
        else:
            if place == "attribute":
                self._buffers.pop("kept", None)
            self.kept = k
        return x + k.tanh()


class Model(nn.Module):
    """Returns its output and what its blocks kept."""

    def __init__(self, place="attribute", blocks=3, make=Block):
        super().__init__()
        self.place = place
        self.embed, self.head = nn.Linear(5, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(make() for _ in range(blocks))

    def forward(self, x):
        into, x = [], self.embed(x)
        for block in self.blocks:
            x = block(x, self.place, into)
        return self.head(x), into if self.place == "list" else [block.kept for block in self.blocks]


def size_of(tensor):
    return tensor.square().mean()


def last(model, x):
    size_of(model(x)[1][-1]).backward()


def first(model, x):
    size_of(model(x)[1][0]).backward()


def output(model, x):
    size_of(model(x)[0]).backward()


def with_the_output(model, x):
    y, kept = model(x)
    (size_of(y) + size_of(kept[0]) + size_of(kept[-1])).backward()


def after_the_output(model, x):
    y, kept = model(x)
    size_of(y).backward(retain_graph=True)
    (size_of(kept[0]) + size_of(kept[-1])).backward()


def before_the_output(model, x):
    y, kept = model(x)
    size_of(kept[-1]).backward(retain_graph=True)
    size_of(kept[0]).backward(retain_graph=True)
    size_of(y).backward()


def twice_differentiated(model, x):
    x.requires_grad_()
    loss = size_of(model(x)[1][1])
    (found,) = torch.autograd.grad(loss, x, create_graph=True)
    (size_of(found) * 10 + loss).backward()


FORMS = (last, first, with_the_output, after_the_output, before_the_output)


def data(step, rank=0):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(97 * step + rank))


def trains_as_torch(make, *forms, tolerance=1e-6, prepare=None, **options):
    """forms: what each rank does; one for all. Plain torch's model does in turn what all ranks do."""
    rank, size = kit.world()
    forms = forms * size if len(forms) == 1 else forms
    torch.manual_seed(0)
    dense = make()
    theirs = kit.sgd(dense.parameters())
    model, optimizer = kit.sharded(make, **{"stage": 3, **options})
    if prepare is not None:
        prepare(model)
    for step in range(2):
        forms[rank](model, data(step, rank))
        for each, form in enumerate(forms):
            form(dense, data(step, each))
        for p in dense.parameters():
            p.grad = None if p.grad is None else p.grad / size
        for each in (optimizer, theirs):
            each.step()
            each.zero_grad()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    for unit in zero_core.units(model) if options.get("stage", 3) == 3 else ():
        assert unit.flat.untyped_storage().nbytes() == 0, unit.name
    kit.assert_same(model, dense, rtol=tolerance, atol=tolerance)


def micro_batches(model, x):
    for form in (last, with_the_output):
        form(model, x)


def on_the_host(model, x):
    """With hooks on saved tensors around model and backward."""
    with save_on_cpu():
        after_the_output(model, x)
        twice_differentiated(model, x)


@pytest.mark.promise("gradient-enters-inside")
@kit.on_ranks(1, 2)
@pytest.mark.parametrize(("place", "ahead"), [*((place, True) for place in PLACES), (PLACES[0], False)])
def test_a_loss_of_what_a_block_kept(place, ahead):
    """Every form in the first place, and two in each of the others."""
    for form in FORMS if place == PLACES[0] else (last, after_the_output):
        trains_as_torch(lambda: Model(place), form, **({} if ahead else {"prefetch_bytes": 0}))


OPTIONS = {f"stage {stage}": {"stage": stage} for stage in (1, 2, 3)}
OPTIONS |= {"in time": {"prefetch_bytes": 0}, "updated in backward": {"update_in_backward": True}}


@pytest.mark.promise("gradient-enters-programs")
@pytest.mark.parametrize("options", OPTIONS)
@kit.on_ranks(1, 2)
def test_so_with_other_programs_and_at_stages_that_keep_parameters(size, options):
    forms = (with_the_output, micro_batches, on_the_host) if size == 1 else (with_the_output, before_the_output)
    for form in forms[:1] if options == "updated in backward" else forms:
        trains_as_torch(Model, form, **OPTIONS[options])


@pytest.mark.promise("gradient-enters-inside")
@kit.on_ranks(2)
@pytest.mark.parametrize("prefetch", [{}, {"prefetch_bytes": 0}], ids=["ahead", "in time"])
def test_ranks_whose_gradients_enter_at_different_blocks(prefetch):
    def both(model, x):
        y, kept = model(x)
        (size_of(y) + size_of(kept[1])).backward()

    for forms in ((output, first), (first, last), (last, both), (with_the_output, first), (both, output)):
        trains_as_torch(lambda: Model(blocks=5), *forms, **prefetch)


class Checkpointed(Model):
    def __init__(self, reentrant, segment=1):
        super().__init__(blocks=4)
        self.reentrant, self.segment = reentrant, segment

    def forward(self, x):
        x = self.embed(x)
        for start in range(0, len(self.blocks), self.segment):
            x = checkpoint(nn.Sequential(*self.blocks[start : start + self.segment]), x, use_reentrant=self.reentrant)
        return self.head(x), [block.kept for block in self.blocks]


def own_hooks(plain, x):
    """Hooks that keep the tensor itself, parameters too."""
    with saved_tensors_hooks(lambda tensor: [tensor], lambda kept: kept[0]):
        return plain(x)


def by_torch_func(plain, x):
    return vmap(grad(lambda row: plain(row).square().sum()))(x)


AROUND = {
    "a checkpoint inside": partial(checkpoint, use_reentrant=False),
    "a reentrant checkpoint inside": partial(checkpoint, use_reentrant=True),
    "hooks inside": own_hooks,
    "torch.func inside": by_torch_func,
}


class GradientOfRoot(Model):
    def forward(self, x):
        y, kept = super().forward(x)
        return y + grad(lambda y: self.head(y @ self.head.weight).square().sum())(y), kept


class Frozen(Model):
    def __init__(self):
        super().__init__()
        self.blocks[1].requires_grad_(False)


class Nested(Model):
    """A unit inside of a unit, one block twice, and a weight that two blocks share."""

    def __init__(self):
        super().__init__()
        self.blocks[1].v = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
        self.blocks[2].k.weight = self.blocks[0].k.weight

    def forward(self, x):
        x, kept = self.embed(x), []
        for k in (0, 1, 2, 1):
            x = self.blocks[k](x)
            kept.append(self.blocks[k].kept)
        return self.head(x), kept


INSIDE = {
    "checkpoints around blocks": partial(Checkpointed, False),
    "checkpoints around two blocks": partial(Checkpointed, False, 2),
    "reentrant checkpoints around blocks": partial(Checkpointed, True),  # of what is kept, torch has no graph either
    **{name: partial(Model, make=partial(Block, around)) for name, around in AROUND.items()},
    **{make.__name__: make for make in (GradientOfRoot, Frozen, Nested)},
}
NOT_IN = {"a reentrant checkpoint inside": (before_the_output,), "reentrant checkpoints around blocks": FORMS}


@pytest.mark.promise("gradient-enters-programs")
@kit.on_ranks(1, 2)
@pytest.mark.parametrize("name", INSIDE)
def test_so_with_checkpoints_hooks_transforms_and_functions_inside_of_a_unit(name):
    options = {"units": [Block, nn.Sequential]} if name == "Nested" else {}
    for form in (*FORMS, output):
        if form not in NOT_IN.get(name, ()):
            trains_as_torch(INSIDE[name], form, prefetch_bytes=0, tolerance=1e-5, **options)


class Recurrent(Block):
    """Writes in place into tensors before autograd saves them."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(6, 6, batch_first=True)

    def inside(self, x):
        self.written = self.gru(super().inside(x)[:, None])[0][:, 0].mul_(2).add_(self.w)
        return self.written.sin()


@pytest.mark.promise("gradient-enters-programs")
@pytest.mark.parametrize("later", [False, True])
def test_torch_func_around_a_model_that_writes_in_place(later):
    """Raises as torch does for a write after the save, and for none before it."""
    dense, _, model, _ = kit.pair(lambda: Model(make=Recurrent), stage=3)

    def gradients(model):
        def loss(values):
            found = functional_call(model, values, (data(0),))[0]
            if later:
                model.blocks[1].written.mul_(2)
            return size_of(found)

        try:
            return [*grad(loss)(dict(model.named_parameters())).values()]
        except RuntimeError as error:
            return str(error).split(":")[0]

    wanted, found = (gradients(each) for each in (dense, model))
    assert later == isinstance(wanted, str)
    assert found == wanted if later else torch.testing.assert_close(found, wanted) is None


@pytest.mark.promise("graph-needs-values")
def test_torch_func_refuses_the_users_hooks_as_torch_does():
    model, _ = kit.sharded(GradientOfRoot, stage=3)
    with save_on_cpu(), pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
        model(data(0))


@pytest.mark.promise("gradient-enters-programs")
@pytest.mark.parametrize("which", ["blocks", "model", "earlier blocks", "earlier model"])
def test_compiled_blocks_and_models(which):
    def compiled(model):
        for module in [model] if "model" in which else model.blocks:
            module.compile(backend="aot_eager")

    def make():
        model = Model()
        if "earlier" in which:
            compiled(model)
        return model

    torch._dynamo.reset()
    for form in (last, with_the_output):
        trains_as_torch(make, form, prepare=compiled if "earlier" not in which else None, tolerance=1e-5)
    torch._dynamo.reset()


@pytest.mark.promise("graph-needs-values")
def test_a_parameter_that_was_written_between_raises_what_torch_raises():
    for change in (lambda m: m.blocks[1].v.weight.mul_(2), lambda m: m.blocks[2].kept.mul_(2)):
        messages = []
        for model in (Model(), kit.sharded(Model, stage=3)[0]):
            y, kept = model(data(0))
            loss = size_of(y) + size_of(kept[-1])
            with torch.no_grad():
                change(model)
            with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
                loss.backward()
            messages.append(str(raised.value).split(": ")[0])
        assert messages[0] == messages[1]


@pytest.mark.promise("graph-needs-values")
def test_a_graph_of_a_model_that_was_sharded_again_names_it():
    model, _ = kit.sharded(Model, stage=3)
    loss = size_of(model(data(0))[1][0])
    zero_core.shard(model, kit.sgd(model.parameters()), stage=2)
    with pytest.raises(ZeroError, match="Model"):
        loss.backward()


@pytest.mark.promise("graph-needs-values")
def test_a_graph_that_outlives_its_model():
    dense, _, model, optimizer = kit.pair(Model, stage=3)
    x, y = data(0).requires_grad_(), data(0).requires_grad_()
    size_of(dense(x)[1][0]).backward()
    loss = size_of(model(y)[1][0])
    del model, optimizer
    gc.collect()
    loss.backward()
    torch.testing.assert_close(y.grad, x.grad)


@pytest.mark.promise("no-activation-outlives")
def test_no_activation_outlives_its_graph():
    model, _ = kit.sharded(lambda: Model("list", make=partial(Block, by_torch_func)), stage=3)
    y, kept = model(data(0))
    alive = weakref.ref(kept[0])
    gc.collect()
    gc.disable()
    try:
        del y, kept
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.promise("ctrl-c-saved-hooks")
@pytest.mark.parametrize("where", ["block", "root"])
def test_ctrl_c_leaves_the_hooks_of_others_as_they_were(where):
    model, optimizer = kit.sharded(Model, stage=3)

    def interrupt(module, args):
        raise KeyboardInterrupt

    handle = (model if where == "root" else model.blocks[1].k).register_forward_pre_hook(interrupt)
    top = torch._C._autograd._top_saved_tensors_default_hooks
    with save_on_cpu():
        before = top(True)
        with pytest.raises(KeyboardInterrupt):
            model(data(0))
        assert top(True)[0] is before[0]
    assert top(True) is None
    handle.remove()
    first(model, data(0))
    assert zero_core.full_gradient(model.blocks[0].k.weight).abs().sum() > 0
