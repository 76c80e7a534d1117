"""`sharded`: one class for each Trainer class, its settings, what is refused, and how data are told apart."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import Seq2SeqTrainer, Trainer, TrainingArguments

from zero_hf import ConfigError, ZeroConfig, sharded
from zero_hf.trainer.checkpoints import complete_checkpoint
from zero_hf.trainer.run_identity import digest as digest_of


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x, labels=None):
        return (self.linear(x).sum(),)


def made(tmp_path, cls=None, zero=None, **arguments):
    """Set after TrainingArguments is built: some need packages that are not here."""
    AcceleratorState._reset_state(reset_partial_state=True)
    given = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    for name, value in arguments.items():
        setattr(given, name, value)
    return (cls or sharded(Trainer))(Model(), given, zero=zero)


@pytest.mark.promise("trainer-class")
def test_a_class_is_made_once_and_is_a_subclass():
    made_class = sharded(Seq2SeqTrainer)
    assert made_class is sharded(Seq2SeqTrainer) is sharded(made_class)
    assert issubclass(made_class, Seq2SeqTrainer) and made_class.__name__ == "ShardedSeq2SeqTrainer"
    assert sharded(Trainer, zero={"stage": 2}) is sharded(Trainer, zero=ZeroConfig(stage=2)) is not sharded(Trainer)

    class Mine(sharded(Trainer)):
        pass

    assert sharded(Mine) is Mine and issubclass(sharded(Mine, zero={"stage": 2}), Mine)
    assert Trainer.create_optimizer is not sharded(Trainer).create_optimizer


@pytest.mark.promise("trainer-class")
def test_the_nearest_setting_counts(tmp_path, monkeypatch):
    """The constructor's, the class's, the environment's, then stage 3 on the device."""
    stage_2 = tmp_path / "zero.json"
    stage_2.write_text(json.dumps({"stage": 2}))
    assert made(tmp_path).zero_config == ZeroConfig()
    monkeypatch.setenv("ZERO_HF_CONFIG", str(stage_2))
    assert made(tmp_path).zero_config == ZeroConfig(stage=2)
    assert made(tmp_path, zero={}).zero_config == ZeroConfig()
    with_default = sharded(Trainer, zero={"stage": 1, "offload": "host"})
    assert made(tmp_path, with_default).zero_config == ZeroConfig(stage=1, offload="host")
    assert made(tmp_path, with_default, zero={"stage": 0}).zero_config == ZeroConfig(stage=0)


@pytest.mark.promise("trainer-arguments-refused")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"fp16_full_eval": True}, "fp16_full_eval=True cannot be used with zero_hf.sharded: it would cast"),
        ({"mixed_precision": "fp16"}, "fp16=True cannot be used with .* Train with bf16=True"),
        ({"_n_gpu": 4}, "one process with 4 GPUs .* torchrun --nproc-per-node 4"),
    ],
)
def test_an_argument_that_cannot_be_followed_is_refused_before_anything_is_allocated(arguments, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        made(tmp_path, **arguments)


@pytest.mark.promise("device-batches-pinned")
@pytest.mark.parametrize("pinned", [True, False])
def test_batches_in_pinned_memory_are_sent_without_waiting(tmp_path, pinned):
    trainer = made(tmp_path, dataloader_pin_memory=pinned)  # use_cpu pins nothing
    assert trainer.accelerator.non_blocking is pinned
    assert trainer.args.accelerator_config.non_blocking is False  # what is saved with a checkpoint stays the user's


class Thing:
    """Of no data set, and its text has an address."""


def test_rows_are_told_apart_by_their_values_and_not_by_addresses():
    def digest(*rows):
        return digest_of(list(rows))

    assert digest({"a": Thing(), "b": {"x", "y"}}) == digest({"a": Thing(), "b": {"y", "x"}})
    assert digest(np.array([Thing(), 1], dtype=object)) == digest(np.array([Thing(), 1], dtype=object))
    assert digest({"a": torch.ones(2, dtype=torch.bfloat16)}) != digest({"a": torch.zeros(2, dtype=torch.bfloat16)})
    assert digest([1, [2.5]]) != digest([1, [2]]) and digest(1) != digest(1, 1)
    assert digest_of(iter([])) == "list_iterator"


def test_true_resumes_from_the_last_checkpoint_that_is_complete(tmp_path):
    """A run that was killed while it saved leaves a folder without trainer_state.json."""
    args = SimpleNamespace(output_dir=tmp_path)
    assert complete_checkpoint(True, args) is True  # stock code says that there is none
    for step in (4, 8):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-4" / "trainer_state.json").touch()
    assert complete_checkpoint(True, args) == str(tmp_path / "checkpoint-4")
