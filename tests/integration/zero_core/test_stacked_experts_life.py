"""Stacked experts in groups from one stage to the next: frozen, moved to other shards, saved and loaded."""

import copy

import pytest
import torch
from torch import nn

import zero_core
from tests import kit
from tests.integration.zero_core import mixtures, toys
from tests.integration.zero_core.mixtures import GROUP, STACKS, adamw, close, grouped, loss_of, made
from zero_core.checkpoint.pretrained import FileValues

pytestmark = pytest.mark.promise("experts-train")

NAME = f"{STACKS[1]}.gate_up_proj"


def trained(model, **options):
    """One step of a model in groups; its optimizer."""
    optimizer = zero_core.shard(model, adamw(model.parameters()), **{"expert_bytes": GROUP, **options})
    kit.step(optimizer, loss_of(model, 0))
    return optimizer


@kit.on_ranks(1, 2)
def test_frozen_experts_are_read_only_and_others_train():
    dense, model = mixtures.frozen(), mixtures.frozen()
    optimizer = zero_core.shard(model, adamw(kit.trained(model)), expert_bytes=GROUP)
    assert len(grouped(model)) == 8
    gradients = mixtures.trained_plainly(dense)
    assert not any("experts" in name for name in gradients)
    for step in range(3):
        kit.step(optimizer, loss_of(model, mixtures.share(step)[0]))
    mixtures.assert_same_values(model, dense)


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


def test_freezing_in_the_run_stops_the_gradients_of_the_groups():
    dense, model, optimizer = made()
    torch_optimizer = adamw(dense.parameters())
    for frozen in (True, False):
        for net, each in ((dense, torch_optimizer), (model, optimizer)):
            net.get_submodule(STACKS[0]).requires_grad_(not frozen)
            kit.step(each, loss_of(net, 0))
    mixtures.assert_same_values(model, dense)


@pytest.mark.advice(
    "Or pass expert_bytes=None to zero_core.shard, which",
    "a hook on {} would see no gradient",
    "has gradient hooks, which would see no gradient",
)
def test_hooks_and_memory_in_common_are_refused_with_the_way_out():
    model = mixtures.qwen()
    cut = model.get_parameter(NAME)
    handle = cut.register_hook(lambda gradient: gradient)
    with pytest.raises(zero_core.ZeroError, match=f"{NAME} has gradient hooks.* expert_bytes=None"):
        zero_core.shard(model, adamw(model.parameters()), expert_bytes=GROUP)
    handle.remove()
    model.alias = cut.detach()
    with pytest.raises(zero_core.ZeroError, match=f"shares the memory of {NAME}.* expert_bytes=None"):
        zero_core.shard(model, adamw(model.parameters()), expert_bytes=GROUP)
    zero_core.shard(model, adamw(model.parameters()), expert_bytes=None).close()
    model = mixtures.qwen()
    cut = model.get_parameter(NAME)
    model.alias = cut.detach().clone()
    zero_core.shard(model, adamw(model.parameters()), expert_bytes=GROUP)
    for register in (cut.register_hook, cut.register_post_accumulate_grad_hook):
        with pytest.raises(zero_core.ZeroError, match=f"a hook on {NAME}.* expert_bytes=None"):
            register(lambda *args: None)
    loss_of(model, 0).backward()
    zero_core.set_full_gradient(cut, zero_core.full_gradient(cut) * 0)
    assert not zero_core.full_gradient(cut).any()
    with pytest.raises(zero_core.ZeroError, match="copy the model before"):
        copy.deepcopy(model.get_submodule(STACKS[0]))


def test_other_values_for_one_call_are_those_that_are_computed_with():
    dense, model, handle = made(lambda parameters: None)
    values = {NAME: torch.full((16, 64, 64), 0.01)}
    tokens = mixtures.batch(0)
    found, wanted = (
        torch.func.functional_call(net, values, (), {"input_ids": tokens, "use_cache": False}).logits
        for net in (model, dense)
    )
    close(found.detach(), wanted.detach())


@pytest.mark.parametrize("before, after", [(GROUP, None), (None, GROUP), (GROUP, 60_000), (60_000, GROUP)])
@kit.on_ranks(1, 2)
def test_a_second_stage_may_cut_otherwise(before, after):
    model = mixtures.qwen()
    trained(model, expert_bytes=before)
    values, count = kit.named_values(model, master=True), len(grouped(model))
    optimizer = zero_core.shard(model, adamw(model.parameters()), expert_bytes=after)
    assert len(grouped(model)) != count
    kit.assert_bits(kit.named_values(model, master=True), values)
    twin = mixtures.qwen()
    twin.load_state_dict(values)
    close(kit.step(optimizer, loss_of(model, 1)), loss_of(twin, 1).detach())


@kit.on_ranks(1, 2)
def test_unsharded_it_is_the_stock_model():
    model = mixtures.qwen()
    trained(model)
    values, cut, units = kit.named_values(model), model.get_parameter(NAME), zero_core.units(model)
    zero_core.unshard(model)
    assert model.get_parameter(NAME) is cut and type(cut) is nn.Parameter and "_zero_home" not in vars(cut)
    assert "forward" not in vars(model.get_submodule(STACKS[0]))
    kit.assert_bits(dict(model.named_parameters()), values)
    assert cut.untyped_storage().nbytes() == cut.nbytes
    rows = [p for unit in units for p, whole in zip(unit.parameters, unit.wholes, strict=True) if whole is cut]
    assert all(p.untyped_storage().data_ptr() == cut.untyped_storage().data_ptr() for p in rows)
    kit.step(adamw(model.parameters()), loss_of(model, 0))


@pytest.mark.parametrize("at", [3, 7, 99])
@pytest.mark.parametrize("staged", [False, True])
def test_after_a_failed_shard_the_experts_are_what_they_were(at, staged):
    model = mixtures.qwen()
    if staged:
        trained(model)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises((zero_core.ZeroError, toys.Refused)):
        zero_core.shard(model, adamw(model.parameters()), expert_bytes=60_000, store=toys.Refusing(at))
    kit.assert_bits(model.state_dict(), values)
    optimizer = zero_core.shard(model, adamw(model.parameters()), expert_bytes=GROUP)
    twin = mixtures.qwen()
    twin.load_state_dict(values)
    close(kit.step(optimizer, loss_of(model, 1)), loss_of(twin, 1).detach())


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
    kit.assert_bits(other.state_dict(), weights)
    kit.step(second, loss_of(other, 1))
    found = kit.named_values(other)
    if kit.world()[0] == 0:  # which has the states
        plain.load_state_dict(states)
        kit.step(plain, loss_of(twin, 1))
        for name, parameter in twin.named_parameters():
            close(found[name], parameter.detach(), 10)


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


def saveable(expert_bytes, seed=0):
    return kit.sharded(mixtures.qwen(seed), adamw, expert_bytes=expert_bytes, max_grad_norm=0.5)


def save(folder, expert_bytes):
    """Two steps, saved; the losses of two more, and the parameters after these."""
    model, optimizer = saveable(expert_bytes)
    for step in range(2):
        kit.step(optimizer, loss_of(model, step))
    zero_core.checkpoint.save(folder, model, optimizer)
    zero_core.save_pretrained(model, f"{folder}/weights")
    return finish(model, optimizer)


def finish(model, optimizer):
    losses = [float(kit.step(optimizer, loss_of(model, step))) for step in (2, 3)]
    found = losses, kit.named_values(model, master=True)
    optimizer.close()
    return found


def load(folder, expert_bytes):
    model, optimizer = saveable(expert_bytes, seed=1)
    zero_core.checkpoint.load(folder, model, optimizer)
    return finish(model, optimizer)


@pytest.mark.promise("checkpoint-experts")
@pytest.mark.parametrize("saved, loaded", [((1, GROUP), (2, 60_000)), ((2, GROUP), (1, None)), ((2, None), (2, GROUP))])
def test_a_run_goes_on_with_other_groups_and_ranks(ranks, tmp_path, saved, loaded):
    losses, values = ranks(saved[0]).run(save, str(tmp_path), saved[1])[0]
    again, found = ranks(loaded[0]).run(load, str(tmp_path), loaded[1])[0]
    assert again == pytest.approx(losses, rel=1e-6)
    for name, value in found.items():
        close(value, values[name], 10)


@pytest.mark.promise("checkpoint-experts")
@kit.on_ranks(2)
def test_torch_reads_the_checkpoint_and_transformers_the_weights(tmp_path):
    """The twin is plain torch's, on each rank for itself."""
    import torch.distributed.checkpoint as dcp
    from transformers import AutoModelForCausalLM

    save(str(tmp_path), GROUP)
    twin = mixtures.qwen(seed=1)
    state = {"model": twin.state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path), no_dist=True)
    assert state["model"].keys() == mixtures.qwen().state_dict().keys()
    read = AutoModelForCausalLM.from_pretrained(f"{tmp_path}/weights", attn_implementation="eager")
    kit.assert_bits(read.state_dict(), state["model"])


@pytest.mark.promise("checkpoint-experts")
@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("stacked", [True, False])
def test_pretrained_weights_are_read_group_by_group(tmp_path, monkeypatch, deferred, stacked):
    """stacked: as zero_core writes them; else each expert apart, as transformers does."""
    stock = mixtures.qwen()
    zero_core.save_pretrained(stock, tmp_path) if stacked else stock.save_pretrained(tmp_path)
    sizes, read = [], FileValues.read
    monkeypatch.setattr(FileValues, "read", lambda self, a, b: sizes.append(b - a) or read(self, a, b))
    if deferred:
        with zero_core.deferred_init():
            model = type(stock)(copy.deepcopy(stock.config))
        zero_core.load_pretrained(model, tmp_path)
        zero_core.shard(model, adamw(model.parameters()), expert_bytes=GROUP)
    else:
        model = mixtures.qwen(seed=1)
        zero_core.shard(model, adamw(model.parameters()), expert_bytes=GROUP)
        zero_core.load_pretrained(model, tmp_path)
    assert len(grouped(model)) == 8
    assert max(sizes) == stock.get_parameter(NAME).numel() // 4
    kit.assert_bits(kit.named_values(model), dict(stock.named_parameters()))


@pytest.mark.promise("checkpoint-experts")
@kit.on_ranks(1, 2)
def test_weights_that_a_deferred_model_draws_do_not_depend_on_the_groups():
    found = []
    for expert_bytes in (GROUP, 60_000, None):
        with zero_core.deferred_init(seed=3):
            model = mixtures.qwen()
        state = torch.get_rng_state()
        optimizer = zero_core.shard(model, adamw(model.parameters()), expert_bytes=expert_bytes)
        assert torch.equal(torch.get_rng_state(), state)
        found.append(kit.named_values(model))
        optimizer.close()
    for each in found[:-1]:
        kit.assert_bits(each, found[-1])


@pytest.mark.promise("checkpoint-experts")
@kit.on_ranks(1, 2)
def test_a_checkpoint_of_what_is_trained_leaves_the_experts_out(tmp_path):
    def base():
        model = mixtures.frozen()
        return model, zero_core.shard(model, adamw(kit.trained(model)), expert_bytes=GROUP)

    model, optimizer = base()
    kit.step(optimizer, loss_of(model, 0))
    zero_core.checkpoint.save(tmp_path / "none", model, optimizer, trained_only=True)
    with torch.no_grad():
        model.get_parameter(NAME)[15].fill_(0.25)
    zero_core.checkpoint.save(tmp_path / "one", model, optimizer, trained_only=True)
    values = kit.named_values(model)
    saved = zero_core.trained_state_dict(model, also=lambda name: "layers.0.mlp.experts" in name)
    assert f"{STACKS[0]}.down_proj" in saved and NAME not in saved
    optimizer.close()
    for folder, last in (("none", None), ("one", 0.25)):
        model, optimizer = base()
        zero_core.checkpoint.load(tmp_path / folder, model, optimizer)
        found = kit.named_values(model)
        assert torch.equal(found["lm_head.weight"], values["lm_head.weight"])
        assert bool((found[NAME][15] == 0.25).all()) is (last is not None)
        assert torch.equal(found[NAME][:15], values[NAME][:15])
