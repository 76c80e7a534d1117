"""An accelerate script with zero_hf.Accelerator trains as it does with accelerate's, wherever the state is kept."""

import copy
from contextlib import nullcontext

import pytest
import torch
from accelerate import load_checkpoint_in_model
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch import nn
from transformers import AutoModelForCausalLM

from tests import kit
from zero_core import ZeroError
from zero_hf import ConfigError

from .accelerated import Script, accelerator, launched, llama, loaders, moved, nvme, rows, sgd

pytestmark = pytest.mark.promise("accelerate")


def _losses(zero, options):
    with launched():
        script = Script(zero, **options)
        losses = script.train()
        script.accelerator.free_memory()
        assert max(script.norms) > script.clip  # it matters
        return losses + script.norms


@pytest.mark.parametrize("world", [1, 2])
def test_stages_equal_the_stock_run(ranks, world):
    """Fails if a gradient is averaged twice or not at all, accumulated in other parts, or clipped otherwise.

    Stage 3 and the tiers are test_examples'.
    """
    stock = ranks(world).run(_losses, None, {})[0]
    assert len(stock) == 16 + 8 and stock[15] < 0.95 * stock[0]
    for stage in (0, 1, 2):
        assert ranks(world).run(_losses, {"stage": stage}, {})[0] == pytest.approx(stock, rel=1e-5)


def _reference_and_policy(zero):
    """A policy that is trained against a frozen copy of itself, as preference training does."""
    with launched():
        acc = accelerator(zero)
        policy = llama()
        reference = copy.deepcopy(policy).eval().requires_grad_(False)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
        frozen = [] if zero is None else [reference]  # stock accelerate would put it into DDP, which refuses it
        optimizer, policy, data, *_ = acc.prepare(optimizer, policy, loaders(5), *frozen)
        losses = []
        for batch in data:
            with torch.no_grad():
                expected = reference(input_ids=batch).logits
            difference = policy(input_ids=batch).logits - expected
            loss = policy(input_ids=batch, labels=batch).loss + difference.pow(2).mean()
            acc.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(acc.gather(loss.detach().view(1)).mean().item())
        if zero is not None:
            assert acc.zero_run(reference).optimizer is None and acc.zero_run(policy).optimizer is not None
            assert "host" in acc.zero_run(policy).describe() and acc.zero_run(torch.nn.Linear(1, 1)) is None
        acc.free_memory()
        return losses


def test_a_frozen_reference_beside_the_policy(ranks):
    """Fails if the optimizer is paired by position, or the reference is trained."""
    stock = ranks(2).run(_reference_and_policy, None)[0]
    assert ranks(2).run(_reference_and_policy, {"offload": "host"})[0] == pytest.approx(stock, rel=1e-5)


@kit.on_ranks(2)
def test_metrics_of_a_model_alone_are_gathered_once_for_each_row():
    """Fails if a model without an optimizer is not sharded as it is, or a row that fills up the last batch is kept."""
    found = []
    for zero in (None, {}):
        with launched(), torch.no_grad():
            acc = accelerator(zero)
            model, data = acc.prepare(llama().eval(), torch.utils.data.DataLoader(rows(7), batch_size=2))
            means = [acc.gather_for_metrics(model(input_ids=batch).logits.mean((1, 2))) for batch in data]
            acc.free_memory()
        found.append(torch.cat(means))
    assert len(found[1]) == 7
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def _weights(zero, folder):
    with launched():
        script = Script(zero, steps=2)
        script.train()
        acc, model = script.accelerator, script.model
        acc.save_model(model, f"{folder}/{'stock' if zero is None else 'ours'}", max_shard_size="20KB")
        state = acc.get_state_dict(model)
        kept = {name: tensor.clone() for name, tensor in state.items()}  # save_pretrained empties what it is given
        assert type(acc.unwrap_model(model)).__name__ == "LlamaForCausalLM"
        acc.unwrap_model(model).save_pretrained(
            f"{folder}/pretrained", is_main_process=acc.is_main_process, save_function=acc.save, state_dict=state
        )
        acc.wait_for_everyone()
        acc.free_memory()
        return kept


@pytest.mark.parametrize("world", [1, 2])
def test_weights_are_saved_as_stock_saves_them(ranks, tmp_path, world):
    """Fails if a rank's shard is missing from the files, or a name, a tie or a shape differs from stock's."""
    stock = ranks(world).run(_weights, None, str(tmp_path))[0]
    ours = ranks(world).run(_weights, {"offload": "host"}, str(tmp_path))
    assert ours[0].keys() == stock.keys() and all(state == {} for state in ours[1:])
    torch.testing.assert_close(ours[0], stock, rtol=1e-4, atol=1e-5)
    loaded = llama(seed=5)
    load_checkpoint_in_model(loaded, str(tmp_path / "ours"))
    torch.testing.assert_close(loaded.state_dict(), ours[0], rtol=0, atol=0, check_device=False)
    pretrained = AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained")
    torch.testing.assert_close(dict(pretrained.state_dict()), ours[0], rtol=0, atol=0)
    assert {f.name for f in (tmp_path / "ours").glob("*.safetensors")} == {
        f.name for f in (tmp_path / "stock").glob("*.safetensors")
    }


def test_free_memory_gives_the_files_back_and_another_model_can_be_prepared(tmp_path):
    """Fails if a run stays open after free_memory, or the next one takes up its optimizer."""
    with launched():
        acc = accelerator(nvme(tmp_path))
        for _ in range(2):
            model = llama()
            model, _ = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            acc.free_memory()
            assert sum(file.stat().st_blocks for file in (tmp_path / "nvme").iterdir()) == 0
            assert acc.zero_run(model) is None and not acc._models
            with pytest.raises(Exception, match="closed"):
                model(input_ids=torch.zeros(1, 2, dtype=torch.long))


@pytest.mark.promise("accelerate-refused")
def test_optimizers_that_do_not_pair_off_with_models_are_refused_and_the_ways_out_work():
    """Fails if an optimizer would step parameters whose gradients are not there, or only half of its own."""

    def layers():
        return nn.Linear(2, 2), nn.Linear(2, 2)

    with launched():
        acc = accelerator({"param_dtype": "bf16"})
        alone, _ = layers()
        acc.prepare(alone)
        for prepare in (acc.prepare, acc.prepare_optimizer):
            told = r"SGD comes too late: .* Give model and optimizer to one call, prepare\(model, optimizer"
            with pytest.raises(ZeroError, match=told):
                prepare(sgd(alone))
        acc = accelerator({})
        one, two = layers()
        told = "models, Linear and Linear: make an optimizer for each, .* Or put them into one nn.Module"
        with pytest.raises(ZeroError, match=told):
            acc.prepare(one, two, sgd(one, two))
        one, two, *optimizers = acc.prepare(one, two, sgd(one), sgd(two))
        moved(acc, optimizers, one, two)
        pair = nn.Sequential(*layers())
        told = "two optimizers, SGD and SGD, train one Sequential.* make one optimizer with a parameter group for each"
        with pytest.raises(ZeroError, match=told):
            acc.prepare(pair, sgd(pair[0]), sgd(pair[1]))
        pair, optimizer = acc.prepare(pair, sgd(*pair))
        assert len(optimizer.param_groups) == 2
        moved(acc, [optimizer], *pair)
        number = nn.Parameter(torch.ones(1))  # of no model: accelerate's, as it is
        plain = acc.prepare(torch.optim.SGD([number], lr=0.5))
        number.grad = torch.ones(1)
        plain.step()
        assert number.item() == 0.5
        acc.free_memory()
    for precision in ("fp16", "fp8"):
        with launched(), pytest.raises(ConfigError, match=f"mixed_precision='{precision}'.*use mixed_precision='bf16'"):
            accelerator({}, mixed_precision=precision)
    for hook in (DDPCommunicationHookType.BF16, DDPCommunicationHookType.NO):
        handlers = [DistributedDataParallelKwargs(comm_hook=hook)]
        refused = pytest.raises(ConfigError, match="comm_hook 'bf16' .*: leave comm_hook out")
        with launched(), nullcontext() if hook is DDPCommunicationHookType.NO else refused:
            accelerator({}, kwargs_handlers=handlers)
    with launched():
        script = Script({}, steps=1, mixed_precision="bf16")
        assert len(script.train()) == 2
        script.accelerator.free_memory()


@pytest.mark.parametrize("order", ["model", "optimizer"])
@pytest.mark.parametrize("size", [1, 2])
def test_model_and_optimizer_may_come_in_two_calls(ranks, tmp_path, size, order):
    """Fails if the second call loses a value, a group, or what the scheduler does to the learning rate."""
    found = [ranks(size).run(_prepared_in, tmp_path, calls) for calls in ("one", order)]
    assert found[0] == found[1]


def _prepared_in(folder, calls):
    with launched():
        acc = accelerator(nvme(folder))
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        if calls == "one":
            model, optimizer, scheduler = acc.prepare(model, optimizer, scheduler)
        elif calls == "model":
            model = acc.prepare(model)
            optimizer, scheduler = acc.prepare(optimizer, scheduler)
        else:
            optimizer, scheduler = acc.prepare(optimizer, scheduler)
            model = acc.prepare(model)
        assert acc.zero_run(model).optimizer is optimizer.optimizer
        losses = []
        for batch in acc.prepare(loaders(4)):
            loss = model(input_ids=batch, labels=batch).loss
            acc.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        acc.free_memory()
        return losses
