"""What a sharded Trainer saves: resumed at the same and at another world size, and loaded by transformers."""

import os
import re
import shutil
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

import zero_core
import zero_hf
from tests import kit
from tests.integration.zero_hf.trainers import Sharded, launched, llama, tiers, train, trainer, weights
from tests.integration.zero_nvme.faults import small_ext4
from zero_core import ZeroError
from zero_hf import ConfigError

pytestmark = pytest.mark.promise("trainer-checkpoints")

SAVING = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8, "data": 11}


def same(ours, theirs):
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def states(model):
    """Masters and moments, whole."""
    return {
        f"{name}.{state}": zero_core.full_state(parameter, state)
        for name, parameter in model.named_parameters()
        for state in ("master", "exp_avg", "exp_avg_sq")
    }


class Beginning(TrainerCallback):
    """The states with which a run begins."""

    def on_train_begin(self, args, state, control, model=None, **given):
        self.states = states(model)


@pytest.mark.parametrize("tier", ["none", "host", "nvme"])
@pytest.mark.parametrize("way", ["fp32", "autocast", "bf16 parameters"])
def test_resumed_at_the_same_world_size_it_ends_in_the_same_bits(tier, way, tmp_path):
    """Dropout shows the random state, the cosine the schedule, 11 rows in batches of 2 an epoch that was cut in two."""
    given = SAVING | {"bf16": way == "autocast"}
    zero = tiers(tmp_path)[tier] | ({"param_dtype": "bf16"} if way == "bf16 parameters" else {})
    whole, logs = train(Sharded, tmp_path, llama(attention_dropout=0.3), zero=zero, **given)
    again, later = train(
        Sharded, tmp_path, llama(7, attention_dropout=0.3), zero=zero, resume=str(tmp_path / "checkpoint-4"), **given
    )
    assert later.losses == logs.losses[4:]
    same(states(again.model), states(whole.model))
    same(weights(again.model), weights(whole.model))


@pytest.mark.parametrize("size", [1, 2])
@kit.on_ranks()
def test_a_checkpoint_of_the_stock_trainer_is_resumed_with_its_moments(size, tmp_path):
    """With tied embeddings, which a file holds once. The last time the model is sharded before it is loaded."""
    with launched() if size > 1 else nullcontext():
        ddp = {"ddp_find_unused_parameters": False} if size > 1 else {}
        _, logs = train(Trainer, tmp_path, llama(tie_word_embeddings=True), **SAVING, **ddp)
        for tier, zero in tiers(tmp_path).items():
            made, later = trainer(Sharded, tmp_path, llama(7, tie_word_embeddings=True), zero=zero, **SAVING)
            if tier == "nvme":
                made.evaluate()
            made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
            assert later.losses == pytest.approx(logs.losses[4:], rel=1e-5)
            made.zero_run.close()


def test_what_is_saved_is_what_transformers_loads(tmp_path):
    made, _ = train(Sharded, tmp_path, **SAVING)
    made.save_model(str(tmp_path / "final"))
    for folder in (tmp_path / "final", tmp_path / "checkpoint-8"):
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        same(dict(loaded.state_dict()), weights(made.model))
        assert (folder / "training_args.bin").is_file()
    stock, _ = train(Trainer, tmp_path / "stock", **SAVING)
    named = {path.name for path in (tmp_path / "stock" / "checkpoint-8").iterdir()}
    assert {path.name for path in (tmp_path / "checkpoint-8").iterdir()} == named - {"optimizer.pt"} | {"zero"}
    theirs, ours = (load_file(tmp_path / each / "model.safetensors") for each in ("stock/checkpoint-8", "checkpoint-8"))
    assert theirs.keys() == ours.keys()


def test_old_checkpoints_are_deleted_and_the_best_is_kept_and_loaded(tmp_path):
    """The learning rate explodes after step 4, so that the best model is not the last."""

    class Explodes(TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, lr_scheduler=None, **given):
            if state.global_step == 4:
                lr_scheduler.base_lrs = [5.0 for _ in lr_scheduler.base_lrs]

    given = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 8}
    given |= {"load_best_model_at_end": True, "save_total_limit": 2, "lr_scheduler_type": "constant"}
    for name, more in (("states", {}), ("weights", {"save_only_model": True})):
        folder = tmp_path / name
        made, logs = train(Sharded, folder, callbacks=[Explodes()], **given, **more)
        assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-4", "checkpoint-8"]
        assert made.state.best_model_checkpoint == str(folder / "checkpoint-4")
        assert logs.evaluations.index(min(logs.evaluations)) == 1
        assert made.evaluate()["eval_loss"] == pytest.approx(min(logs.evaluations), rel=1e-6)
        same(weights(made.model), dict(AutoModelForCausalLM.from_pretrained(folder / "checkpoint-4").state_dict()))


def _two_ranks(folder, resume):
    with launched():
        begins = Beginning()
        zero = {"offload": "host"}
        made, logs = train(Sharded, folder, zero=zero, resume=resume, callbacks=[begins] if resume else [], **SAVING)
        found = logs.losses, begins.states if resume else states(made.model), weights(made.model)
        made.save_model(str(folder / "final"))
        made.zero_run.close()
        return found


def test_at_another_world_size_it_goes_on_with_the_states_that_were_saved(ranks, tmp_path):
    """Two ranks save; one rank, with other batches, starts from their masters and moments; then two from its own."""
    (losses, whole, values), other = ranks(2).run(_two_ranks, tmp_path, None)
    same(other[1], whole)
    same(dict(AutoModelForCausalLM.from_pretrained(tmp_path / "final").state_dict()), values)
    (later, two, again), _ = ranks(2).run(_two_ranks, tmp_path, str(tmp_path / "checkpoint-4"))
    assert later == losses[4:]
    same(again, values)
    begins, folder = Beginning(), tmp_path / "one"
    made, logs = train(Sharded, folder, resume=str(tmp_path / "checkpoint-4"), callbacks=[begins], **SAVING)
    same(begins.states, two)
    assert len(logs.losses) == 4 and logs.losses[-1] < losses[3]
    (_, back, _), _ = ranks(2).run(_two_ranks, tmp_path, str(folder / "checkpoint-8"))
    same(back, states(made.model))


def test_a_checkpoint_without_optimizer_states_says_so(tmp_path):
    """The stock Trainer goes on without a word."""
    train(Sharded, tmp_path, **SAVING)
    shutil.rmtree(tmp_path / "checkpoint-4" / "zero")
    with pytest.warns(UserWarning, match="checkpoint-4 has neither zero nor optimizer.pt: .* new optimizer states"):
        train(Sharded, tmp_path, resume=str(tmp_path / "checkpoint-4"), **SAVING)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    train(Sharded, tmp_path, **SAVING)
    with pytest.raises(zero_core.ZeroError, match="num_hidden_layers|model.layers|layers.2"):
        train(Sharded, tmp_path, llama(num_hidden_layers=3), resume=str(tmp_path / "checkpoint-4"), **SAVING)
    shutil.rmtree(tmp_path / "checkpoint-4" / "zero")
    told = "is of another LlamaForCausalLM. Names in the model only: model.layers.2.* Resume with the model"
    with pytest.raises(ConfigError, match=told):
        train(Sharded, tmp_path, llama(num_hidden_layers=3), resume=str(tmp_path / "checkpoint-4"), **SAVING)


def test_no_file_is_left_on_nvme_by_a_run_or_by_one_that_failed(tmp_path):
    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **given):
            if state.global_step == 3:
                raise KeyboardInterrupt

    zero = tiers(tmp_path)["nvme"]
    made, _ = trainer(Sharded, tmp_path, zero=zero, callbacks=[Fails()])
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert os.listdir(tmp_path / "nvme-0") == []
    made.save_model(str(tmp_path / "kept"))  # what was trained until then is not lost
    same(dict(AutoModelForCausalLM.from_pretrained(tmp_path / "kept").state_dict()), weights(made.model))
    made.zero_run.close()


OFTEN = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
FULL = "0 bytes are free|No space left"


@pytest.mark.promise("trainer-full-disk")
def test_after_a_full_disk_in_a_later_checkpoint_it_goes_on_from_the_one_before(tmp_path):
    _, whole = train(Sharded, tmp_path / "whole", **OFTEN)
    pages = sum(-(-file.stat().st_size // 4096) for file in (tmp_path / "whole" / "checkpoint-2").rglob("*"))
    with small_ext4(tmp_path, 32 << 20) as folder:
        room = 6144 * pages  # one and a half of them
        (folder / "others").write_bytes(bytes(os.statvfs(folder).f_bavail * 4096 - room))
        with pytest.raises(ZeroError, match=FULL):
            train(Sharded, folder / "run", **OFTEN)
        (folder / "others").unlink()
        with pytest.raises(zero_hf.ConfigError, match="checkpoint-4 has no trainer_state.json") as refused:
            train(Sharded, folder / "run", resume=str(folder / "run" / "checkpoint-4"), **OFTEN)
        named = re.search(r"Delete this folder, and resume from (\S+), which is complete", str(refused.value)).group(1)
        for given in (named, True):
            _, later = train(Sharded, folder / "run", resume=given, save_strategy="no", max_steps=6)
            assert later.losses == whole.losses[2:]
