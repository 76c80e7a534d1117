"""Stacked experts in groups from one stage to the next: frozen, moved to other shards, averaged, saved and loaded.

Fails if rows of a stacked parameter are lost, swapped or left behind anywhere on these ways.
"""

import copy

import pytest
import torch
from torch import nn

import zero_core
from tests import kit
from tests.integration.zero_core import mixtures, toys
from tests.integration.zero_core.mixtures import GROUP, STACKS, adamw, close, grouped, loss_of, made

pytestmark = pytest.mark.promise("experts-train")

NAME = f"{STACKS[1]}.gate_up_proj"


def trained(model, **options):
    """One step of a model in groups; its optimizer."""
    optimizer = zero_core.shard(model, adamw(model.parameters()), **{"expert_bytes": GROUP, **options})
    kit.step(optimizer, loss_of(model, 0))
    return optimizer


@kit.on_ranks(1, 2)
def test_frozen_experts_are_read_only_and_others_train():
    dense = mixtures.qwen()
    for name, parameter in dense.named_parameters():
        parameter.requires_grad_("experts" not in name)
    model = copy.deepcopy(dense)
    optimizer = zero_core.shard(model, adamw(p for p in model.parameters() if p.requires_grad), expert_bytes=GROUP)
    assert len(grouped(model)) == 8
    gradients = mixtures.trained_plainly(dense)
    assert not any("experts" in name for name in gradients)
    for step in range(3):
        kit.step(optimizer, loss_of(model, mixtures.share(step)[0]))
    mixtures.assert_same_values(model, dense)
    optimizer.close()


def test_experts_that_nobody_trains_have_whole_gradients_as_in_torch():
    dense, model, handle = made(lambda parameters: None)
    for _ in range(2):
        loss_of(dense, 0).backward()
        loss_of(model, 0).backward()
    close(model.get_parameter(NAME).grad, dense.get_parameter(NAME).grad)
    with pytest.raises(zero_core.ZeroError, match="have gradients"):
        zero_core.shard(model, adamw(model.parameters()))
    model.zero_grad()
    assert model.get_parameter(NAME).grad is None
    handle.close()


def test_freezing_in_the_run_stops_the_gradients_of_the_groups():
    dense, model, optimizer = made()
    torch_optimizer = adamw(dense.parameters())
    for frozen in (True, False):
        for net, each in ((dense, torch_optimizer), (model, optimizer)):
            net.get_submodule(STACKS[0]).requires_grad_(not frozen)
            kit.step(each, loss_of(net, 0))
    mixtures.assert_same_values(model, dense)
    optimizer.close()


@pytest.mark.advice(
    "or pass expert_bytes=None to zero_core.shard, which",
    "a hook on {}, whose experts are computed",
    "has hooks for its gradient, which arrives",
)
def test_hooks_and_memory_in_common_are_refused_with_the_way_out():
    model = mixtures.qwen()
    cut = model.get_parameter(NAME)
    handle = cut.register_hook(lambda gradient: gradient)
    with pytest.raises(zero_core.ZeroError, match=f"{NAME} has hooks .* expert_bytes=None"):
        zero_core.shard(model, adamw(model.parameters()), expert_bytes=GROUP)
    handle.remove()
    model.alias = cut.detach()
    with pytest.raises(zero_core.ZeroError, match=f"shares the memory of {NAME}.* expert_bytes=None"):
        zero_core.shard(model, adamw(model.parameters()), expert_bytes=GROUP)
    zero_core.shard(model, adamw(model.parameters()), expert_bytes=None).close()
    model = mixtures.qwen()
    cut = model.get_parameter(NAME)
    model.alias = cut.detach().clone()
    optimizer = zero_core.shard(model, adamw(model.parameters()), expert_bytes=GROUP)
    for register in (cut.register_hook, cut.register_post_accumulate_grad_hook):
        with pytest.raises(zero_core.ZeroError, match=f"a hook on {NAME}.* expert_bytes=None"):
            register(lambda *args: None)
    loss_of(model, 0).backward()
    zero_core.set_full_gradient(cut, zero_core.full_gradient(cut) * 0)
    assert not zero_core.full_gradient(cut).any()
    with pytest.raises(zero_core.ZeroError, match="copy the model before"):
        copy.deepcopy(model.get_submodule(STACKS[0]))
    optimizer.close()


def test_other_values_for_one_call_are_those_that_are_computed_with():
    dense, model, handle = made(lambda parameters: None)
    values = {NAME: torch.full((16, 64, 64), 0.01)}
    tokens = mixtures.batch(0)
    found, wanted = (
        torch.func.functional_call(net, values, (), {"input_ids": tokens, "use_cache": False}).logits
        for net in (model, dense)
    )
    close(found.detach(), wanted.detach())
    handle.close()


@pytest.mark.parametrize("before, after", [(GROUP, None), (None, GROUP), (GROUP, 60_000), (60_000, GROUP)])
@kit.on_ranks(1, 2)
def test_a_second_stage_may_cut_otherwise(before, after):
    model = mixtures.qwen()
    trained(model, expert_bytes=before)
    values, count = kit.named_values(model, master=True), len(grouped(model))
    optimizer = zero_core.shard(model, adamw(model.parameters()), expert_bytes=after)
    assert len(grouped(model)) != count
    for name, found in kit.named_values(model, master=True).items():
        assert torch.equal(found, values[name]), name
    twin = mixtures.qwen()
    twin.load_state_dict(values)
    close(kit.step(optimizer, loss_of(model, 1)), loss_of(twin, 1).detach())
    optimizer.close()


@kit.on_ranks(1, 2)
def test_unsharded_it_is_the_stock_model():
    model = mixtures.qwen()
    trained(model)
    values, cut, units = kit.named_values(model), model.get_parameter(NAME), zero_core.units(model)
    zero_core.unshard(model)
    assert model.get_parameter(NAME) is cut and type(cut) is nn.Parameter and "_zero_home" not in vars(cut)
    assert "forward" not in vars(model.get_submodule(STACKS[0]))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, values[name]), name
    assert cut.untyped_storage().nbytes() == cut.nbytes
    assert all(p.untyped_storage().data_ptr() == cut.untyped_storage().data_ptr() for p in _rows(units, cut))
    kit.step(adamw(model.parameters()), loss_of(model, 0))


def _rows(units, cut):
    return [p for unit in units for p, whole in zip(unit.parameters, unit.wholes, strict=True) if whole is cut]


@pytest.mark.parametrize("at", [3, 7, 99])
@pytest.mark.parametrize("staged", [False, True])
def test_after_a_failed_shard_the_experts_are_what_they_were(at, staged):
    model = mixtures.qwen()
    if staged:
        trained(model)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises((zero_core.ZeroError, toys.Refused)):
        zero_core.shard(model, adamw(model.parameters()), expert_bytes=60_000, store=toys.Refusing(at))
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name]), name
    optimizer = zero_core.shard(model, adamw(model.parameters()), expert_bytes=GROUP)
    twin = mixtures.qwen()
    twin.load_state_dict(values)
    close(kit.step(optimizer, loss_of(model, 1)), loss_of(twin, 1).detach())
    optimizer.close()


def test_an_average_of_weights_has_them_whole():
    _, model, optimizer = made()
    average = zero_core.AveragedModel(model)
    average.update_parameters()
    first = kit.named_values(model)
    kit.step(optimizer, loss_of(model, 0))
    average.update_parameters()
    second = kit.named_values(model)
    with average.swapped_in():
        for name, value in kit.named_values(model).items():
            close(value, (first[name] + second[name]) / 2)
    average.close()
    optimizer.close()


@pytest.mark.promise("checkpoint-experts")
@kit.on_ranks(1, 2)
def test_state_dicts_of_model_and_optimizer_go_to_torch_and_back():
    model = mixtures.qwen()
    optimizer = trained(model)
    weights, states = {n: v.clone() for n, v in model.state_dict().items()}, optimizer.full_state_dict()
    twin = mixtures.qwen(seed=1)
    twin.load_state_dict(weights)
    plain = adamw(twin.parameters())
    other = mixtures.qwen(seed=2)
    second = zero_core.shard(other, adamw(other.parameters()), expert_bytes=60_000)
    other.load_state_dict(weights)
    second.load_state_dict(states)
    for name, value in other.state_dict().items():
        assert torch.equal(value, weights[name]), name
    if kit.world()[0] == 0:
        plain.load_state_dict(states)
    kit.step(second, loss_of(other, 1))
    kit.step(plain, loss_of(twin, 1))
    if kit.world()[0] == 0:
        plain_names = dict(twin.named_parameters())
    found = kit.named_values(other)
    if kit.world()[0] == 0:
        for name, value in found.items():
            close(value, plain_names[name].detach(), 10)
    optimizer.close()
    second.close()


@pytest.mark.promise("checkpoint-experts")
@kit.on_ranks(1, 2)
def test_states_that_an_optimizer_brings_are_carried_over():
    dense = mixtures.qwen()
    plain = adamw(dense.parameters())
    kit.step(plain, loss_of(dense, 0))
    model = copy.deepcopy(dense)
    brought = adamw(model.parameters())
    brought.load_state_dict(plain.state_dict())
    optimizer = zero_core.shard(model, brought, expert_bytes=GROUP)
    close(zero_core.full_state(model.get_parameter(NAME), "exp_avg"), plain.state[dense.get_parameter(NAME)]["exp_avg"])
    kit.step(optimizer, loss_of(model, 1))
    kit.step(plain, loss_of(dense, 1))
    mixtures.assert_same_values(model, dense)
    optimizer.close()
