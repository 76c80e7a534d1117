"""`initialize` and its engine: a loop of DeepSpeed's computes what the same loop on plain torch does."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import zero_core
import zero_deepspeed as deepspeed
from zero_core.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.usefixtures("process_group_ends")

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 3, "warmup_type": "linear"}}
HOST = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def settings(**more):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.05,
        "optimizer": ADAMW,
        "scheduler": WARMUP,
        "zero_optimization": HOST,
        **more,
    }


def batches(count):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2, 8, generator=generator) for _ in range(count)]


def train(engine, data):
    losses = []
    for batch in data:
        loss = engine(batch).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def plainly(model, data, optimizer):
    """The same loop without an engine: two micro-batches a step, clipped, three steps of warm-up."""
    losses, norms, steps = [], [], 0
    optimizer.param_groups[0]["lr"] = 0.0
    for i, batch in enumerate(data):
        loss = model(batch).square().mean()
        (loss / 2).backward()
        losses.append(loss.item())
        if i % 2:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, steps / 3)
            steps += 1
    return losses, norms[-1]


def made(model=None, **more):
    return deepspeed.initialize(model=model or net(), config=settings(**more))[0]


@pytest.mark.promise("ds-engine")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_loop_computes_what_plain_torch_computes(capsys, stage):
    """Fails if accumulation, clipping, the update or the schedule differ, or come at another micro-batch."""
    model = net()
    plain = copy.deepcopy(model)
    engine, optimizer, loader, schedule = deepspeed.initialize(
        model=model, config=settings(zero_optimization={**HOST, "stage": stage})
    )
    assert (optimizer, loader, schedule) == (engine.optimizer, None, engine.lr_scheduler)
    wanted, norm = plainly(plain, batches(12), torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1))
    torch.testing.assert_close(train(engine, batches(12)), wanted, rtol=1e-6, atol=0)
    assert (engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps) == (6, 12, 24, 0)
    assert engine.get_lr() == [1e-2]
    assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-6) and norm > 0.05
    assert engine.zero_optimization_stage() == stage and engine.train_batch_size() == 4
    printed = capsys.readouterr().out
    assert "gradient_clipping" in printed and "parameters" in printed
    engine.destroy()


def test_an_optimizer_of_the_callers_goes_before_the_files_and_may_be_made_by_a_function():
    engine = deepspeed.initialize(
        model=net(),
        config=settings(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    )[0]
    train(engine, batches(4))
    assert engine.get_lr() == [0.5 / 3]
    assert engine.optimizer.param_groups[0].keys() >= {"momentum"}
    engine.destroy()


def test_weights_alone_leave_counters_states_and_schedule_as_they_are(tmp_path):
    first = made()
    train(first, batches(4))
    first.save_checkpoint(tmp_path, tag="here")
    assert (tmp_path / "latest").read_text() == "here"
    second = made()
    second.load_checkpoint(tmp_path, load_module_only=True)
    assert second.global_steps == 0 and second.get_lr() == [0.0]
    for one, other in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(one.detach(), other.detach())
    first.destroy()
    second.destroy()


@pytest.mark.advice("is saved, but `latest` could not be written", "load it with tag=")
def test_a_latest_that_cannot_be_written_is_told_and_the_checkpoint_stays(tmp_path):
    engine = made()
    train(engine, batches(2))
    (tmp_path / "latest").mkdir()  # as a full disk, the file cannot be put there
    with pytest.raises(
        CheckpointError,
        match="global_step1 is saved, but `latest` could not be written .*: load it with tag='global_step1'",
    ):
        engine.save_checkpoint(tmp_path)
    assert engine.load_checkpoint(tmp_path, tag="global_step1")[0] == str(tmp_path / "global_step1")
    with pytest.raises(CheckpointError, match="has no tag 'global_step9'. Tags found there: global_step1, latest"):
        engine.load_checkpoint(tmp_path, tag="global_step9")
    engine.destroy()


def test_zero_grad_at_the_top_of_the_loop_drops_no_accumulation_at_stages_2_and_3():
    """As in DeepSpeed, where it only sets p.grad to None."""
    losses = []
    for clears in (False, True):
        engine = made()
        found = []
        for batch in batches(8):
            if clears:
                engine.zero_grad()
            found += train(engine, [batch])
        losses.append(found)
        engine.destroy()
    assert losses[0] == losses[1]


def test_a_checkpoint_begins_a_step_whatever_was_pending(tmp_path):
    """Fails if the first step after a load takes fewer micro-batches than the JSON says."""
    first = made()
    train(first, batches(5))
    first.save_checkpoint(tmp_path, tag=5)
    second = made(gradient_accumulation_steps=4)
    assert second.load_checkpoint(tmp_path, tag=5) == (str(tmp_path / "5"), {})
    train(second, batches(3))
    assert (second.global_steps, second.was_step_applied()) == (2, False)
    train(second, batches(1))
    assert (second.global_steps, second.was_step_applied()) == (3, True)
    zero_core.checkpoint.save(tmp_path / "of_a_loop", second.module, second.optimizer, extra={"epoch": 1})
    third = made()
    assert third.load_checkpoint(tmp_path, tag="of_a_loop", load_lr_scheduler_states=False)[1] == {"epoch": 1}
    assert (third.global_steps, third.micro_steps) == (3, 6)
    third.destroy()
    first.destroy()
    second.destroy()


@pytest.mark.promise("ds-damaged")
@pytest.mark.advice("move the files of one of them into another folder")
def test_a_folder_with_deepspeeds_files_and_ours_is_refused(tmp_path):
    """Fails if a run that goes on in DeepSpeed's folder reads what DeepSpeed had saved at a later step there."""
    engine = made()
    train(engine, batches(2))
    theirs = tmp_path / "global_step1" / "mp_rank_00_model_states.pt"
    theirs.parent.mkdir()
    theirs.write_bytes(b"")
    engine.save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"global_step1 has two checkpoints, DeepSpeed's .*: move the files of"):
        engine.load_checkpoint(tmp_path)
    theirs.rename(tmp_path / theirs.name)
    assert engine.load_checkpoint(tmp_path) == (str(theirs.parent), {})
    engine.destroy()


def test_data_is_loaded_in_parts_of_the_micro_batch():
    data = TensorDataset(torch.arange(8.0))
    engine, _, loader, _ = deepspeed.initialize(model=net(), config=settings(), training_data=data)
    rows = [batch[0].tolist() for batch in loader]
    assert [len(row) for row in rows] == [2] * 4 and sorted(sum(rows, [])) == list(range(8))
    assert [batch[0].tolist() for batch in engine.deepspeed_io(data, 4, "eval")] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    engine.destroy()


def test_values_of_a_parameter_are_read_and_written_by_deepspeeds_names():
    engine, utils = made(), deepspeed.utils
    weight = engine.module[0].weight
    assert utils.safe_get_full_grad(weight) is None and utils.safe_get_full_optimizer_state(weight, "exp_avg") is None
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(batches(1)[0]).sum())
    utils.safe_set_full_grad(weight, torch.ones(16, 8))
    assert torch.equal(utils.safe_get_full_grad(weight), torch.ones(16, 8))
    engine.step()
    utils.safe_set_full_optimizer_state(weight, torch.full((16, 8), 2.0), "exp_avg")
    assert torch.equal(utils.safe_get_full_optimizer_state(weight, "exp_avg"), torch.full((16, 8), 2.0))
    utils.safe_set_full_fp32_param(weight, torch.zeros(16, 8))
    assert not utils.safe_get_full_fp32_param(weight).any() and not weight.detach().any()
    engine.destroy()


@pytest.mark.advice("the engine has no {} any more: use {}")
@pytest.mark.promise("ds-contradictions")
def test_what_cannot_be_followed_is_refused_by_name():
    with pytest.raises(ConfigError, match="mpu="):
        deepspeed.initialize(model=net(), config=settings(), mpu=object())
    with pytest.raises(AttributeError, match="zero_deepspeed has no 'init_inference'; it has .*initialize"):
        deepspeed.init_inference
    engine = deepspeed.initialize(model=net(), config={"train_micro_batch_size_per_gpu": 1})[0]
    assert engine.optimizer is None and engine.get_global_grad_norm() is None and engine.get_lr() == []
    with pytest.raises(AttributeError, match="neither engine nor module has 'eigenvalue'"):
        engine.eigenvalue
    engine.destroy()
    engine = deepspeed.initialize(model=net(), config=settings())[0]
    with pytest.raises(AttributeError, match="has no 'get_mom' any more: use optimizer.param_groups"):
        engine.get_mom
    assert "betas" in engine.optimizer.param_groups[0]
    engine.destroy()


def test_the_plan_of_a_loop_counts_what_shard_is_given():
    """Fails if `find_unused_parameters` reaches zero_core.shard and not the plan, whose store then refuses it."""
    model = net()
    zero = deepspeed.sharding.Settings(stage=2, optimizer="host")
    optimizer = torch.optim.AdamW(model.parameters())
    run = deepspeed.sharding.shard(model, optimizer, zero, find_unused_parameters=True)
    assert run.plan.shape.find_unused_parameters
    run.close()


class Own(torch.optim.RMSprop):
    """As an optimizer that is not listed."""


def test_an_optimizer_without_an_update_on_the_host_says_what_it_does_by_an_attribute():
    model, zero = net(), deepspeed.sharding.Settings(stage=2, optimizer="host")
    optimizer = Own(model.parameters())
    with pytest.raises(ConfigError, match='Own has no update .* say by an attribute what step.. does: .*="by itself"'):
        deepspeed.sharding.shard(model, optimizer, zero)
    optimizer.optimizer_contract = "by itself"
    deepspeed.sharding.shard(model, optimizer, zero).close()
