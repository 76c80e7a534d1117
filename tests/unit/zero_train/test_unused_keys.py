"""A key of the command line that no chosen option uses is refused, with the choice that would use it."""

import dataclasses
import re

import pytest

from zero_train.cli import unused_keys
from zero_train.errors import ConfigError
from zero_train.schema import Config
from zero_train.settings import compose


def jobs(*lines):
    """Checks the jobs of a sweep, or one run."""
    configs = [compose.compose(line.split()) for line in lines]
    unused_keys.check(compose.keys_of(lines[0].split()), configs)
    return configs


@pytest.mark.advice("is given, but nothing uses it with")
@pytest.mark.promise("unused-keys", "messages-name-what-exists")
@pytest.mark.parametrize(
    ("words", "key", "advice"),
    [
        ("model=hf model.layers=7", "model.layers", "model=llama or gpt2 or moe"),
        ("model=llama model.path=/x", "model.path", "model=hf"),
        ("++model.experts=8", "model.experts", "model=moe"),
        ("data=stdlib data.path=/x", "data.path", "data=text or jsonl or parquet or csv or datasets"),
        ("data.pattern=*.txt", "data.pattern", "data=text or jsonl or parquet or csv"),
        ("data=datasets data.path=x data.pattern=*.txt", "data.pattern", "data=text or jsonl or parquet or csv"),
        (f"data=text data.path={__file__} data.pattern=*.txt", "data.pattern", "data.path=FOLDER"),
        ("data=text data.path=x data.validation_path=y", "data.validation_path", "data=jsonl"),
        (
            "data=jsonl data.path=x data.validation_path=y data.validation_fraction=0.1",
            "data.validation_fraction",
            "data.validation_path=null",
        ),
        ("data.as_bytes=true", "data.as_bytes", "model=hf"),
        ("offload=none offload.optimizer=nvme", "offload.optimizer", "offload=host or nvme"),
        ("offload=auto offload.gradients=host", "offload.gradients", "offload=host or nvme"),
        ("offload=host offload.nvme_paths=[/x]", "offload.nvme_paths", "offload=nvme or auto"),
        ("offload=host io=threads", "io", "offload=nvme or auto"),
        ("offload=host tier=compressed", "tier", "offload.optimizer=NAME"),
        ("offload=none precision.states=fp32", "precision.states", "offload=host or nvme or auto"),
        ("optim.momentum=0.8", "optim.momentum", "optim=sgd or muon"),
        ("zero=stage2 zero.resident_bytes=9", "zero.resident_bytes", "zero.stage=3"),
        ("task.packing=true", "task.packing", "task=sft"),
        ("task=sft model.path=x task.beta=0.2", "task.beta", "task=dpo or kto"),
        ("task=sft model.path=x adapter.rank=4", "adapter.rank", "adapter=lora or qlora"),
        ("adapter=lora", "adapter", "task=sft or dpo or reward or kto or grpo"),
        ("tracker=wandb", "tracker", "task=sft or dpo or reward or kto or grpo"),
        ("task=sft model.path=x run.sample_bytes=9", "run.sample_bytes", "task=pretrain"),
        ("run.keep_checkpoints=5", "run.keep_checkpoints", "run.checkpoint_every=NUMBER"),
        ("run.evaluate_every=0 run.evaluate_batches=5", "run.evaluate_batches", "run.evaluate_every=NUMBER"),
        ("run.sample_bytes=0 run.sample_prompt=a", "run.sample_prompt", "run.sample_bytes=NUMBER"),
        ("run.accumulate=2 run.global_batch=8", "run.accumulate", "run.global_batch=null"),
        ("run.steps=5 run.epochs=1", "run.steps", "run.epochs=null"),
    ],
)
def test_a_key_that_nothing_uses_and_the_way_out(words, key, advice):
    """Fails if a key is ignored in silence, or if it is refused once more after what the error says was done."""
    with pytest.raises(ConfigError, match=f"^{re.escape(key)} is given, but nothing uses it with ") as caught:
        jobs(words)
    assert f"; leave {key} out, or choose {advice}" in str(caught.value)
    chosen, _, values = str(caught.value).rpartition("choose ")[2].partition("=")
    given = {word.partition("=")[0]: word for word in words.split()}
    for value in values.replace("NUMBER", "3").replace("NAME", "compressed").split(" or "):
        assert jobs(" ".join((given | {chosen: f"{chosen}={value}"}).values()))


@pytest.mark.promise("unused-keys")
@pytest.mark.parametrize(
    "words",
    [
        "recipe=tiny offload=none",  # the recipe's own keys are not the command line's
        "model=moe model.experts=8",
        "offload=host offload.optimizer=nvme io=threads",
        "offload=host offload.activations=nvme offload.nvme_paths=[/x]",
        "offload=host tier=compressed offload.optimizer=compressed",
        "adapter=none tracker=none",
        "offload=none run.probe=true io=threads",
        "io.allow_memory=true offload=host",  # a permission, not a choice
    ],
)
def test_keys_that_are_used_pass(words):
    assert jobs(words)


def test_a_base_rate_beside_the_rate_is_refused():
    with pytest.raises(ConfigError, match=r"optim\.lr=0\.01; leave optim\.base_lr out, or optim\.lr$"):
        jobs("optim.lr=1e-2 optim.base_lr=1e-3")
    assert jobs("optim.base_lr=1e-3") and jobs("optim.lr=1e-2")


@pytest.mark.promise("unused-keys")
def test_a_sweep_may_carry_keys_for_one_of_its_jobs():
    assert jobs("model=llama model.experts=4", "model=moe model.experts=4")
    with pytest.raises(ConfigError, match=r"model\.experts .* model=gpt2 or model=llama"):
        jobs("model=llama model.experts=8", "model=gpt2 model.experts=8")


def test_the_table_names_keys_that_exist():
    known = set(compose.keys()) | {field.name for field in dataclasses.fields(Config)}
    named = {key for row in unused_keys.TABLE for key in [*row.keys.split(), row.chosen]}
    assert named <= known
