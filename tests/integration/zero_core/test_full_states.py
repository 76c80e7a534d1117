"""`optimizer.full_state_dict()`: an optimizer's states as one dict in torch's format, to plain torch and back."""

import copy
import io
import pickle
from collections import defaultdict
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from zero_core.errors import UnsupportedOptimizerError, ZeroError


def amsgrad(parameters):
    return torch.optim.Adam(parameters, lr=1e-2, amsgrad=True)


def mixed(parameters):
    """Two groups of SGD, of which one has momentum."""
    parameters = list(parameters)
    groups = [{"params": parameters[::2], "momentum": 0.9}, {"params": parameters[1::2], "lr": 0.02}]
    return torch.optim.SGD(groups, lr=0.1)


OPTIMIZERS = {kind: getattr(torch.optim, kind) for kind in ("NAdam", "ASGD", "Rprop", "RMSprop", "Adadelta", "Adamax")}
OPTIMIZERS |= {"adamw": toys.adamw, "momentum": toys.sgd, "amsgrad": amsgrad, "mixed": mixed}
OPTIMIZERS["plain"] = partial(torch.optim.SGD, lr=0.1)
OPTIMIZERS["adagrad"] = partial(torch.optim.Adagrad, initial_accumulator_value=0.1)


class Thawed(toys.Unused):
    """With parameters that never step, parameters that are frozen from the start, and a number without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.blocks[1].requires_grad_(False)

    def forward(self, x):
        return super().forward(x) * self.scale


def twins(name, make=Thawed, **options):
    return kit.pair(make, OPTIMIZERS[name], **options)


def steps(model, optimizer, first, last):
    """The same data on every rank."""
    for step in range(first, last):
        kit.step(optimizer, toys.loss_of(model, toys.data(step, 0)))


def same(found, expected):
    """Of the same keys, types, dtypes and values."""
    assert type(found) is type(expected), (found, expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), (found.keys(), expected.keys())
        for key, value in expected.items():
            same(found[key], value)
    elif isinstance(expected, (list, tuple)):
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7, check_device=False)
        assert found.untyped_storage().nbytes() == found.nbytes
    else:
        assert found == expected


def shared(found):
    """Rank 0's, by way of a file, as a loop that resumes has it."""
    assert (found == {}) == (toys.world()[0] > 0), "one rank has the memory for it"
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def expected_of(theirs):
    """torch's Adagrad has states of frozen parameters too, which nothing steps."""
    found = theirs.state_dict()
    frozen = [n for n, p in enumerate(p for g in theirs.param_groups for p in g["params"]) if not p.requires_grad]
    return {**found, "state": {n: entry for n, entry in found["state"].items() if n not in frozen}}


ON_TWO_RANKS = [("adamw", 3), ("momentum", 2), ("NAdam", 1), ("adagrad", 0), ("mixed", 3), ("ASGD", 3)]


@pytest.mark.promise("full-state-dict")
@pytest.mark.parametrize(
    ("size", "name", "stage"), [*((1, name, 3) for name in OPTIMIZERS), *((2, *each) for each in ON_TWO_RANKS)]
)
@kit.on_ranks()
def test_states_go_to_torch_and_back(size, name, stage):
    dense, theirs, model, ours = twins(name, stage=stage)
    for first in (0, 2):
        found = shared(ours.full_state_dict())
        if found:
            assert found["step_count"] == first
            same({key: found[key] for key in ("state", "param_groups")}, expected_of(theirs))
            plain = copy.deepcopy(dense)
            loaded = OPTIMIZERS[name](plain.parameters())
            loaded.load_state_dict(found)
            steps(plain, loaded, first, first + 2)
        steps(model, ours, first, first + 2)
        steps(dense, theirs, first, first + 2)
        if found:
            same(expected_of(loaded), expected_of(theirs))
    _, _, model, again = twins(name, stage=3 - stage)
    steps(model, again, 5, 6)  # what it has by now is replaced
    model.load_state_dict(dense.state_dict())
    again.load_state_dict(shared(ours.full_state_dict()))
    assert again.step_count == 4
    for optimizer in (again, theirs):
        optimizer.param_groups[0]["lr"] *= 0.5
    steps(model, again, 4, 6)
    steps(dense, theirs, 4, 6)
    same({name: value.clone() for name, value in model.state_dict().items()}, dict(dense.state_dict()))
    again.load_state_dict(OPTIMIZERS[name](dense.parameters()).state_dict())  # of one that has not stepped
    last = again.full_state_dict()
    if last:
        same(last["state"], expected_of(OPTIMIZERS[name](dense.parameters()))["state"])


@pytest.mark.promise("full-state-bits")
@kit.on_ranks(1, 2)
def test_masters_of_16_bit_parameters_keep_their_bits(size):
    """bf16 parameters: the fp32 masters travel too, and go back to the weights that they were rounded to."""

    def step(model, optimizer, number):
        kit.step(optimizer, toys.loss_of(model, toys.data(number, 0).bfloat16()))

    _, _, model, ours = twins("adamw", toys.Stack, stage=size, param_dtype=torch.bfloat16)
    _, _, other, again = twins("adamw", toys.Stack, param_dtype=torch.bfloat16)
    for number in range(2):
        step(model, ours, number)
    found = shared(ours.full_state_dict())
    _, _, third, without = twins("adamw", toys.Stack, param_dtype=torch.bfloat16)
    without.load_state_dict({name: part for name, part in found.items() if name != "masters"})
    kept = [zero_core.full_state(each.head.weight, "exp_avg") for each in (third, model)]
    assert torch.equal(*kept)
    told = (
        r"masters in the state dict differ .*embed.weight.*: load the weights first, .*remove state_dict\['masters'\]"
    )
    with pytest.raises(ZeroError, match=told):
        again.load_state_dict(found)
    assert again.step_count == 0 and not any(any(unit.steps) for unit in again.engine.units)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(found)
    for number in range(2, 4):
        step(model, ours, number)
        step(other, again, number)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(zero_core.full_state(one, "master"), zero_core.full_state(two, "master"))
    if found:
        assert found["masters"].keys() == found["state"].keys()
        plain = toys.Stack().bfloat16()
        toys.adamw(plain.parameters()).load_state_dict(found)


@pytest.mark.advice(
    "checkpoint.save(folder, model, optimizer) on every rank", "training would go on with empty states. Load what"
)
@pytest.mark.promise("state-dict-in-part", "states-in-part")
@kit.on_ranks(1, 2)
def test_states_are_never_saved_in_part():
    _, _, model, ours = twins("plain", toys.Stack)
    steps(model, ours, 0, 1)
    ours.load_state_dict(ours.state_dict())  # there are none
    assert ours.step_count == 1
    _, _, model, ours = twins("plain", toys.Stack, param_dtype=torch.bfloat16)
    toys.loss_of(model, toys.data(0, 0).bfloat16()).backward()
    ours.step()
    with pytest.raises(UnsupportedOptimizerError, match="would lack fp32 masters"):
        ours.state_dict()
    _, _, model, ours = twins("adamw", toys.Stack)
    ours.load_state_dict(ours.state_dict())  # nothing is lost before the first step
    toys.loss_of(model, toys.data(0, 0)).backward()
    assert get_optimizer_state_dict(model, ours)["state"] == {}, "and nothing is stepped to find out"
    assert ours.step_count == 0
    ours.step()
    instead = r"checkpoint.save\(folder.*optimizer.full_state_dict\(\)"
    for save in (
        lambda: torch.save(ours.state_dict(), io.BytesIO()),
        lambda: get_optimizer_state_dict(model, ours),
        lambda: pickle.dumps(ours),
        lambda: copy.deepcopy(ours),
        lambda: ours.state[model.head.bias]["exp_avg"],
    ):
        with pytest.raises(UnsupportedOptimizerError, match=instead):
            save()
    found = zero_core.full_state(model.head.bias, "exp_avg")  # as the last one says
    zero_core.set_full_state(model.head.bias, "exp_avg", found)
    full = ours.full_state_dict(rank0_only=False)
    absent = copy.deepcopy(full)
    del absent["state"][3]["exp_avg_sq"]
    unknown = copy.deepcopy(full)
    unknown["state"][3]["projection"] = torch.zeros(7)
    unknown["param_groups"][0]["lr"] = 9.0
    for wrong, complaint in (
        (absent, r"but not \['exp_avg_sq'\]: .* Load"),
        (unknown, r"has a state 'projection' of shape \(7,\) for .*Remove this state, or use"),
    ):
        with pytest.raises(UnsupportedOptimizerError, match=complaint):
            ours.load_state_dict(wrong)
    assert ours.param_groups[0]["lr"] == 1e-2, "a refused state dict changes nothing"
    for call in (ours.full_state_dict, lambda: ours.load_state_dict(full)):
        model.head.register_full_backward_hook(lambda *_, call=call: call())
        with pytest.raises(ZeroError, match="inside forward or backward"):
            toys.loss_of(model, toys.data(1, 0)).backward()
        model.head._backward_hooks.clear()
        with zero_core.gathered(model), pytest.raises(ZeroError, match="inside zero_core.gathered"):
            call()
    ours.zero_grad()
    ours.load_state_dict(full)


@pytest.mark.promise("functions-in-groups")
@kit.on_ranks(1, 2)
def test_functions_in_groups_stay_each_ranks_own(tmp_path):
    """As adan-pytorch's restart_cond. Ranks sent them, which pickle refuses, and one waited for the others."""
    _, _, model, ours = twins("adamw", toys.Stack)
    when = ours.param_groups[0]["when"] = lambda step: step % 4 == 0
    steps(model, ours, 0, 2)
    found = ours.full_state_dict(rank0_only=False)
    zero_core.checkpoint.save(tmp_path, model, ours)
    _, _, again, restored = twins("adamw", toys.Stack)
    restored.param_groups[0]["when"] = when
    again.load_state_dict(model.state_dict())
    restored.load_state_dict(found)
    same(restored.full_state_dict(rank0_only=False), found)
    zero_core.checkpoint.load(tmp_path, again, restored)
    assert restored.param_groups[0]["when"] is when


@pytest.mark.promise("load-plain-state", "dcp-state-dicts")
@kit.on_ranks(1, 2)
def test_a_state_dict_with_names_loads():
    """What torch.distributed.checkpoint makes of a plain model has names for numbers."""
    dense, theirs, model, ours = twins("adamw", toys.Stack)
    steps(dense, theirs, 0, 2)
    model.load_state_dict(dense.state_dict())
    set_optimizer_state_dict(model, ours, get_optimizer_state_dict(dense, theirs))
    found = ours.full_state_dict()
    if found:
        same(found["state"], theirs.state_dict()["state"])


@pytest.mark.advice("Set 'step' to 1 or more, or remove these states")
@pytest.mark.promise("load-plain-state")
@kit.on_ranks(1, 2)
@pytest.mark.parametrize("name", ["adamw", "adagrad", "NAdam"])
def test_states_whose_count_was_reset_are_refused(name):
    """torch goes on with them; shards would begin anew, as they do for the first step."""
    dense, theirs, model, ours = twins(name, toys.Stack)
    steps(dense, theirs, 0, 2)
    model.load_state_dict(dense.state_dict())
    state = theirs.state_dict()
    for each in state["state"].values():
        each["step"] = torch.zeros(())
    for _ in range(2):
        with pytest.raises(UnsupportedOptimizerError, match=r"'step' 0 and states of earlier steps, for 19 param"):
            ours.load_state_dict(state)
    for each in state["state"].values():
        each["step"] = torch.ones(())
    for each, own in ((dense, theirs), (model, ours)):
        own.load_state_dict(copy.deepcopy(state))
        kit.step(own, toys.loss_of(each, toys.data(2, 0)))
    kit.assert_same(model, dense, rtol=1e-5, atol=1e-6)


@pytest.mark.promise("full-state-dict")
def test_named_parameters_and_options_travel():
    dense, model = toys.Stack(), toys.Stack()
    theirs, plain = (torch.optim.AdamW(m.named_parameters(), lr=0.01, foreach=False) for m in (dense, model))
    ours = zero_core.shard(model, plain)
    for each, optimizer in ((dense, theirs), (model, ours)):
        steps(each, optimizer, 0, 1)
    found = ours.full_state_dict()
    same(found["param_groups"], theirs.state_dict()["param_groups"])
    theirs.load_state_dict(found)
    ours.load_state_dict(theirs.state_dict())
    seen = []
    ours.register_state_dict_post_hook(lambda optimizer, state: seen.append("saved"))
    ours.register_load_state_dict_pre_hook(lambda optimizer, state: {**state, "step_count": 7})
    ours.load_state_dict(ours.full_state_dict())
    assert seen == ["saved"] and ours.step_count == 7


@pytest.mark.promise("optimizer-state-changed")
@pytest.mark.parametrize(
    "use",
    [
        lambda o, p: o.state.clear(),
        lambda o, p: o.state.pop(p, None),
        lambda o, p: o.state.update({}),
        lambda o, p: o.state.get(p),
        lambda o, p: o.state.values(),
        lambda o, p: o.state[p],
        lambda o, p: o.state.__setitem__(p, {}),
        lambda o, p: p in o.state,
        lambda o, p: len(o.state),
        lambda o, p: list(o.state),
        lambda o, p: dict(o.state),
        lambda o, p: o.state == {},
        lambda o, p: copy.deepcopy(o.state),
        lambda o, p: pickle.dumps(o.state),
        lambda o, p: setattr(o, "state", {}),
    ],
)
@pytest.mark.parametrize("whose", ["returned", "given"])
def test_states_are_not_read_or_changed_in_silence(use, whose):
    """Fails if a callback that resets optimizer.state, as restarts do, goes on with the old moments."""
    model = toys.Stack(1)
    given = toys.adamw(model.parameters())
    returned = zero_core.shard(model, given)
    for _ in range(2):  # before the first step too
        told = "(neither be read nor changed|state of optimizer AdamW was assigned).*To reset states, call optimizer.l"
        with pytest.raises(UnsupportedOptimizerError, match=told):
            use(returned if whose == "returned" else given, model.head.weight)
            returned.step()
        given.state = returned.state  # "leave state as it was"
        steps(model, returned, 0, 1)


@pytest.mark.advice("To reset states, call optimizer.load_state_dict({**optimizer.full_state_dict()")
@pytest.mark.promise("optimizer-state-changed")
@kit.on_ranks(1, 2)
def test_states_that_are_reset_as_advised_begin_anew_as_in_torch():
    dense, theirs, model, ours = twins("adamw", toys.Stack)
    for each, optimizer in ((dense, theirs), (model, ours)):
        steps(each, optimizer, 0, 2)
        if optimizer is theirs:
            optimizer.state = defaultdict(dict)
        else:
            optimizer.load_state_dict({**optimizer.full_state_dict(), "state": {}})
        steps(each, optimizer, 2, 4)
    if found := ours.full_state_dict():
        same(found["state"], theirs.state_dict()["state"])


class Later(torch.optim.SGD):
    """Averages gradients from step `after` on: as GrokFast, it makes the state then."""

    optimizer_contract = "elementwise"
    after = 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    if state["step"] > self.after:
                        state["mean"] = state.get("mean", torch.zeros_like(p)) * 0.9 + p.grad
                        p.sub_(group["lr"] * state["mean"])


@pytest.mark.promise("late-state")
@pytest.mark.parametrize("after", [3, 10])
@kit.on_ranks(1, 2)
def test_a_state_that_a_later_step_makes_is_not_lost_in_silence(tmp_path, after):
    """Fails if states are saved without it, or in a checkpoint that cannot be loaded."""

    def made(after):
        torch.manual_seed(0)
        model = toys.Stack(1)
        kind = type("Later", (Later,), {"after": after})
        return model, zero_core.shard(model, kind(model.parameters(), lr=0.05))

    model, optimizer = made(after)
    for step in range(after + 1):
        optimizer.full_state_dict()
        steps(model, optimizer, step, step + 1)
    told = "optimizer Later created the state 'mean' of .* after the first step"
    for save in (optimizer.full_state_dict, lambda: zero_core.checkpoint.save(tmp_path / "a", model, optimizer)):
        with pytest.raises(UnsupportedOptimizerError, match=told):
            save()
    zero_core.checkpoint.save(tmp_path / "weights", model)  # as is advised
    model, optimizer = made(0)
    zero_core.checkpoint.load(tmp_path / "weights", model)
    steps(model, optimizer, 0, 2)
