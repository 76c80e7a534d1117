"""Options that change in param_groups during the run: equal to plain torch, or refused before anything is consumed."""

import pytest
import torch
from torch import nn

import zero_core
from tests import kit
from zero_core.errors import UnsupportedOptimizerError
from zero_core.optim.backward_updates import frozen

zero_offload = pytest.importorskip("zero_offload")

pytestmark = pytest.mark.promise("changed-options")


def make(kind: str, **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)


def train(model, optimizer, changes, steps=7):
    """Seven steps; `changes`: before step -> options to set in the only group."""
    for step in range(steps):
        optimizer.param_groups[0].update(changes.get(step, {}))
        kit.step(optimizer, model(torch.full((2, 4), step + 1.0)).square().sum().mul(0.01))


@pytest.mark.parametrize(
    ("kind", "given", "changes"),
    [
        ("SGD", {"momentum": 0.9}, {1: {"unknown": True}, 2: {"momentum": 0.5}, 4: {"momentum": 0.8, "foreach": True}}),
        ("AdamW", {"amsgrad": True}, {3: {"betas": (0.5, 0.9), "eps": 1e-3, "initial_lr": 1.0}}),
        ("AdamW", {}, {3: {"weight_decay": 0.1, "lr": 0.0}, 4: {"weight_decay": 0.0, "lr": 0.1}}),
    ],
)
@pytest.mark.parametrize("more", [{}, {"update_in_backward": True}])
def test_options_that_change_train_as_torch_does(kind, given, changes, more):
    plain, optimizer = make(kind, **given)
    train(plain, optimizer, changes)
    model, ours = sharded(make(kind, **given), **more)
    train(model, ours, changes)
    torch.testing.assert_close(kit.values(model)[0], plain.weight.data)


def sharded(made, store=False, **more):
    model, optimizer = made
    return model, zero_core.shard(model, optimizer, store=zero_offload.TieredStore() if store else None, **more)


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        ("Adam", {"amsgrad": True}, "amsgrad from False to True"),
        ("Adam", {"betas": (0.0, 0.5)}, r"betas from \(0.9, 0.999\) to \(0.0, 0.5\)"),
        ("SGD", {"momentum": 0.9}, "momentum from 0 to 0.9"),
    ],
)
@pytest.mark.parametrize("more", [{}, {"store": True}], ids=str)
def test_an_option_that_may_bring_other_states_is_refused_before_the_step(kind, change, named, more):
    model, optimizer = sharded(make(kind), **more)
    train(model, optimizer, {}, steps=2)
    group = optimizer.param_groups[0]
    before = {name: group.get(name) for name in change}
    group.update(change)
    model(torch.ones(2, 4)).sum().backward()
    before_it = kit.values(model)[0]
    with pytest.raises(UnsupportedOptimizerError, match=f"param group 0 changed {named} during the run.* Set it back"):
        optimizer.step()
    assert torch.equal(kit.values(model)[0], before_it)
    group.update(before)  # the way out
    optimizer.step()
    assert optimizer.step_count == 3
    assert not torch.equal(kit.values(model)[0], before_it)


def test_of_a_scheduler_that_brings_a_momentum_only_the_momentum_is_named():
    """OneCycleLR also notes initial_lr, max_momentum and more in the group, which no optimizer reads."""
    model, optimizer = sharded(make("SGD"), store=True)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=8)
    with pytest.raises(UnsupportedOptimizerError, match=r"^param group 0 changed momentum from 0 to 0\.95 during"):
        train(model, optimizer, {}, steps=1)


def groups_of_two(**options):
    """A weight and a bias, each in a group of its own."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}]
    return model, torch.optim.SGD(groups, **options)


@pytest.mark.parametrize(
    ("change", "group", "added", "removed"),
    [
        (lambda groups: groups[1]["params"].append(groups[0]["params"].pop()), 0, 0, 1),
        (lambda groups: groups[0].update(params=[*groups[1]["params"]]), 0, 1, 1),
        (lambda groups: groups[1]["params"].clear(), 1, 0, 1),
        (lambda groups: groups.append({**groups[0]}), 2, 1, 0),
    ],
)
@pytest.mark.parametrize("more", [{}, {"update_in_backward": True}, {"store": True}], ids=str)
def test_a_group_whose_parameters_change_is_refused_before_the_step(change, group, added, removed, more):
    model, optimizer = sharded(groups_of_two(), **more)
    before = [list(group["params"]) for group in optimizer.param_groups]
    train(model, optimizer, {}, steps=1)
    values = kit.values(model)[0]
    change(optimizer.param_groups)
    told = rf"param group {group} of optimizer SGD changed after zero_core.shard \(added: {added}, removed: {removed}\)"
    with pytest.raises(UnsupportedOptimizerError, match=told):
        train(model, optimizer, {}, steps=1)
    assert torch.equal(kit.values(model)[0], values)
    del optimizer.param_groups[2:]
    for group, parameters in zip(optimizer.param_groups, before, strict=True):
        group["params"][:] = parameters  # the way out
    if "update_in_backward" not in more:  # its backward was cut short
        train(model, optimizer, {}, steps=1)
        assert optimizer.step_count == 2
        assert not torch.equal(kit.values(model)[0], values)


@pytest.mark.advice("copies of the optimizer, with the earlier {}: remove the assignment")
@pytest.mark.parametrize("whose", ["returned", "given", "joint"])
@pytest.mark.parametrize(
    "groups", [lambda groups: groups[::-1], lambda groups: groups[:1], lambda groups: [dict(each) for each in groups]]
)
def test_other_groups_are_not_assigned_in_silence(groups, whose):
    """Fails if groups in another order train with one another's options, or options of a new dict are not read."""
    model, given = groups_of_two()
    if whose == "joint":
        given = zero_core.JointOptimizer(*(torch.optim.SGD([each]) for each in given.param_groups))
    optimizer = zero_core.shard(model, given)
    train(model, optimizer, {}, steps=1)
    values = kit.values(model)[0]
    told = "param_groups of optimizer SGD.* assigned after.* remove the .* write into a dict of it, as optimizer"
    with pytest.raises(UnsupportedOptimizerError, match=told):
        if whose == "joint":
            optimizer.param_groups[:] = groups(optimizer.param_groups)
        else:
            (optimizer if whose == "returned" else given).param_groups = groups(given.param_groups)
        optimizer.step()
    assert torch.equal(kit.values(model)[0], values)


class Scaled(torch.optim.SGD):
    """Reads numbers from itself and from its groups."""

    factor = 1.0

    def __init__(self, params, lr=0.1):
        super().__init__([{"params": list(params), "scale": 1.0}], lr=lr)
        self.scale, self.scales, self.steps = 1.0, {"all": [1.0]}, []

    @torch.no_grad()
    def step(self, closure=None):
        self.steps.append(True)
        for group in self.param_groups:
            scale = self.factor * self.scale * self.scales["all"][0] * group["scale"] * self.defaults["lr"]
            for p in group["params"]:
                p.sub_(p.grad, alpha=scale * len(self.steps))


class OfModel(Scaled):
    """Is built from a model, and raises AttributeError where it is given groups."""

    def __init__(self, model):
        super().__init__(model.parameters())


def scaled(of_model=False):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, OfModel(model) if of_model else Scaled(model.parameters())


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("scale", lambda o: setattr(o, "scale", 0.5)),
        ("factor", lambda o: setattr(o, "factor", 0.5)),
        ("scales", lambda o: setattr(o, "scales", {"all": [0.5]})),
        ("defaults", lambda o: setattr(o, "defaults", {"lr": 0.5})),
        ("defaults", lambda o: o.defaults.update(lr=0.5)),
        ("scales", lambda o: o.scales["all"].__setitem__(0, 0.5)),
        ("scales", lambda o: o.scales["all"].append(0.5)),
        ("scale", lambda o: delattr(o, "scale")),
    ],
)
@pytest.mark.parametrize("whose", ["returned", "given", "joint"])
def test_an_attribute_that_copies_read_is_not_set_in_silence(name, change, whose):
    model, given = scaled()
    optimizer = zero_core.shard(model, zero_core.JointOptimizer(given) if whose == "joint" else given)
    train(model, optimizer, {}, steps=2)
    values = kit.values(model)[0]
    if whose == "returned" and not hasattr(optimizer, name) and name != "factor":
        change = lambda o: setattr(o, name, 0.5)  # noqa: E731
    told = f"^{name} of optimizer Scaled was assigned after.*Set {name} before zero_core.shard. To change {name} during"
    with pytest.raises(UnsupportedOptimizerError, match=told):
        change(optimizer if whose == "returned" else given)
        train(model, optimizer, {}, steps=1)
    assert torch.equal(kit.values(model)[0], values)


@pytest.mark.advice("an option of a parameter group, which step() reads from self.param_groups")
@pytest.mark.advice("before zero_core.shard. To change")
@pytest.mark.parametrize("more", [{}, {"store": True, "optimizer_contract": "by itself"}], ids=str)
@pytest.mark.parametrize("of_model", [False, True])
def test_an_option_in_place_of_an_attribute_changes_as_in_torch(of_model, more):
    """Fails if the lists of the copies are one, which each copy's steps, trial ones too, would make longer."""
    plain, theirs = scaled(of_model)
    model, given = scaled(of_model)
    for optimizer in (theirs, given):
        optimizer.scale = 0.5
    ours = sharded((model, given), **more)[1]
    ours.max_grad_norm = None  # its own
    for each, optimizer in ((plain, theirs), (model, ours)):
        train(each, optimizer, {2: {"scale": 0.5}})
    torch.testing.assert_close(kit.values(model)[0], plain.weight.data)


def test_what_a_joint_optimizer_has_of_its_members_is_assigned_to_these():
    members = [torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1) for _ in range(2)]
    for optimizer in (both := zero_core.JointOptimizer(*members), zero_core.JointOptimizer(both)):
        for name in ("param_groups", "state"):
            with pytest.raises(ValueError, match=f"no {name} of its own: assign {name} of one of its"):
                setattr(optimizer, name, type(getattr(optimizer, name))())
    members[1].param_groups = [{**members[1].param_groups[0], "lr": 0.5}]
    assert [group["lr"] for group in both.param_groups] == [0.1, 0.5]


@pytest.mark.advice("To change its options later, give p its own group before")
def test_a_parameter_that_stops_or_gets_other_options_later_trains_as_advised():
    def trained(made):
        model, optimizer = made
        for step in range(4):
            optimizer.param_groups[1]["lr"] = 0.2 if step < 2 else 0.05
            model.weight.requires_grad_(step < 2)
            kit.step(optimizer, model(torch.full((2, 4), step + 1.0)).square().sum().mul(0.01))
        return model.state_dict()["weight"]

    torch.testing.assert_close(trained(sharded(groups_of_two(momentum=0.9))), trained(groups_of_two(momentum=0.9)))


class Rows(torch.optim.SGD):
    """Needs a matrix whole that is larger than an option says."""

    def needs_uncut(self, group, shape):
        return len(shape) == 2 and shape[0] > group["largest"]


@pytest.mark.parametrize(("first", "then"), [(50, 2), (2, 50)])
def test_an_option_that_decides_what_is_needed_whole_stays(first, then):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = Rows([{"params": list(model.parameters()), "largest": first}], lr=0.1)
    optimizer = zero_core.shard(model, optimizer)
    train(model, optimizer, {}, steps=1)
    values = kit.values(model)[0]
    with pytest.raises(
        UnsupportedOptimizerError, match="an option of param group 0 of optimizer Rows changed .* Set it back"
    ):
        train(model, optimizer, {0: {"largest": then}}, steps=1)
    assert torch.equal(kit.values(model)[0], values)
    train(model, optimizer, {0: {"largest": first}}, steps=1)  # the way out
    assert optimizer.step_count == 2


@pytest.mark.promise("whole-on-gpu")
def test_tensors_among_options_are_those_of_the_step():
    """The update may run while a schedule writes the next step's: a tensor has to be a copy, inside of a tuple too."""
    rate, betas = torch.tensor(0.1), (torch.tensor(0.9), torch.tensor(0.99))
    (taken,) = frozen([{"params": [], "lr": rate, "betas": betas}])
    for each in (rate, *betas):
        each.fill_(3.0)
    assert torch.stack([taken.options["lr"], *taken.options["betas"]]).tolist() == pytest.approx([0.1, 0.9, 0.99])
