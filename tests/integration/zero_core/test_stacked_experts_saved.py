"""Checkpoints and pretrained files of stacked experts in groups: under stock names, for any number of groups and ranks.

Fails if files show how a model was cut, or if a whole stack is read where a group is wanted.
"""

import copy

import pytest
import torch

import zero_core
from tests import kit
from tests.integration.zero_core import mixtures
from tests.integration.zero_core.mixtures import GROUP, STACKS, adamw, close, grouped, loss_of
from zero_core.checkpoint.pretrained import FileValues

pytestmark = pytest.mark.promise("checkpoint-experts")

NAME = f"{STACKS[1]}.gate_up_proj"


def save(folder, expert_bytes):
    """Two steps, saved; the losses of two more, and the parameters after these."""
    model = mixtures.qwen()
    optimizer = zero_core.shard(model, adamw(model.parameters()), expert_bytes=expert_bytes, max_grad_norm=0.5)
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
    model = mixtures.qwen(seed=1)
    optimizer = zero_core.shard(model, adamw(model.parameters()), expert_bytes=expert_bytes, max_grad_norm=0.5)
    zero_core.checkpoint.load(folder, model, optimizer)
    return finish(model, optimizer)


@pytest.mark.parametrize("saved, loaded", [((1, GROUP), (2, 60_000)), ((2, GROUP), (1, None)), ((2, None), (2, GROUP))])
def test_a_run_goes_on_with_other_groups_and_ranks(ranks, tmp_path, saved, loaded):
    losses, values = ranks(saved[0]).run(save, str(tmp_path), saved[1])[0]
    again, found = ranks(loaded[0]).run(load, str(tmp_path), loaded[1])[0]
    assert again == pytest.approx(losses, rel=1e-6)
    for name, value in found.items():
        close(value, values[name], 10)


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
    for name, value in read.state_dict().items():
        assert torch.equal(value, state["model"][name]), name


def counted(monkeypatch):
    """The elements that are alive after each read of safetensors from here on."""
    sizes, read = [], FileValues.read

    def counting(values, start, stop):
        sizes.append(stop - start)
        return read(values, start, stop)

    monkeypatch.setattr(FileValues, "read", counting)
    return sizes


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("stacked", [True, False])
def test_pretrained_weights_are_read_group_by_group(tmp_path, monkeypatch, deferred, stacked):
    """stacked: as zero_core writes them; else each expert apart, as transformers does."""
    stock = mixtures.qwen()
    zero_core.save_pretrained(stock, tmp_path) if stacked else stock.save_pretrained(tmp_path)
    sizes = counted(monkeypatch)
    if deferred:
        with zero_core.deferred_init():
            model = type(stock)(copy.deepcopy(stock.config))
        zero_core.load_pretrained(model, tmp_path)
        optimizer = zero_core.shard(model, adamw(model.parameters()), expert_bytes=GROUP)
    else:
        model = mixtures.qwen(seed=1)
        optimizer = zero_core.shard(model, adamw(model.parameters()), expert_bytes=GROUP)
        zero_core.load_pretrained(model, tmp_path)
    assert len(grouped(model)) == 8
    assert max(sizes) == stock.get_parameter(NAME).numel() // 4
    for name, value in kit.named_values(model).items():
        assert torch.equal(value, stock.get_parameter(name)), name
    optimizer.close()


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
    for name, value in found[-1].items():
        assert torch.equal(found[0][name], value) and torch.equal(found[1][name], value), name


@kit.on_ranks(1, 2)
def test_a_checkpoint_of_what_is_trained_leaves_the_experts_out(tmp_path):
    def base():
        model = mixtures.qwen()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("experts" not in name)
        trained = [p for p in model.parameters() if p.requires_grad]
        return model, zero_core.shard(model, adamw(trained), expert_bytes=GROUP)

    model, optimizer = base()
    kit.step(optimizer, loss_of(model, 0))
    zero_core.checkpoint.save(tmp_path / "none", model, optimizer, trained_only=True)
    with torch.no_grad():
        model.get_parameter(NAME)[15].fill_(0.25)
    zero_core.checkpoint.save(tmp_path / "one", model, optimizer, trained_only=True)
    values = kit.named_values(model)
    saved = [zero_core.trained_state_dict(model, also=lambda name: "layers.0.mlp.experts" in name)][0]
    assert f"{STACKS[0]}.down_proj" in saved and NAME not in saved
    optimizer.close()
    for folder, last in (("none", None), ("one", 0.25)):
        model, optimizer = base()
        zero_core.checkpoint.load(tmp_path / folder, model, optimizer)
        found = kit.named_values(model)
        assert torch.equal(found["lm_head.weight"], values["lm_head.weight"])
        assert bool((found[NAME][15] == 0.25).all()) is (last is not None)
        assert torch.equal(found[NAME][:15], values[NAME][:15])
        optimizer.close()
