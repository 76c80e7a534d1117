"""A key of the command line that no chosen option uses is refused, with the choice that would use it."""

import dataclasses

import pytest

from zero_train import config, unused_keys
from zero_train.errors import ConfigError
from zero_train.schema import Config


def jobs(*lines):
    """Checks the jobs of a sweep, or one run."""
    configs = [config.compose(line.split()) for line in lines]
    unused_keys.check(config.keys_of(lines[0].split()), configs)
    return configs


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("model=hf model.layers=7", ["model.layers", "model=hf", "llama"]),
        ("model.path=/x model.layers=7", ["model.layers", "model=hf"]),
        ("model=llama model.path=/x", ["model.path", "model=llama", "model=hf"]),
        ("model.experts=8", ["model.experts", "model=llama", "model=moe"]),
        ("data=stdlib data.path=/x", ["data.path", "data=stdlib", "data=text"]),
        ("data.pattern=*.txt", ["data.pattern", "data=stdlib"]),
        ("data=datasets data.path=x data.pattern=*.txt", ["data.pattern", "data=datasets", "data=text or jsonl"]),
        ("data=text data.path=x data.validation_path=y", ["data.validation_path", "data=text", "data=jsonl"]),
        (
            "data=jsonl data.path=x data.validation_path=y data.validation_fraction=0.1",
            ["data.validation_fraction", "data.validation_path=y", "data.validation_path=null"],
        ),
        ("data.as_bytes=true", ["data.as_bytes", "model=hf"]),
        ("offload=none offload.optimizer=nvme", ["offload.optimizer", "offload=none", "offload=host"]),
        ("offload=auto offload.gradients=host", ["offload.gradients", "offload=auto"]),
        ("offload=host offload.nvme_paths=[/x]", ["offload.nvme_paths", "offload=host", "offload=nvme"]),
        ("offload=host io=threads", ["io is given", "offload=host"]),
        ("offload=none precision.states=fp32", ["precision.states", "offload=none"]),
        ("offload=auto model.checkpointing=true", ["model.checkpointing", "offload.activations=auto"]),
        ("optim.lr=1e-2 optim.base_lr=1e-3", ["optim.base_lr", "optim.lr=0.01", "leave optim.lr out"]),
        (
            "optim.lr=1e-2 optim.schedule={type:WarmupLR,params:{warmup_max_lr:1e-3}}",
            ["optim.lr", "optim.schedule={", "params: {warmup_max_lr: …}"],
        ),
        ("optim.base_lr=1e-2 optim.schedule={type:WarmupDecayLR,params:{total_num_steps:9}}", ["optim.base_lr"]),
        ("optim.warmup_steps=5 optim.schedule={type:WarmupLR}", ["optim.warmup_steps", "warmup_num_steps"]),
        ("optim.momentum=0.8", ["optim.momentum", "optim=adamw", "optim=sgd"]),
        ("zero=stage2 zero.resident_bytes=9", ["zero.resident_bytes", "zero.stage=2"]),
        ("task.packing=true", ["task.packing", "task=pretrain", "task=sft"]),
        ("task=sft model.path=x task.beta=0.2", ["task.beta", "task=sft", "task=dpo"]),
        ("task=sft model.path=x adapter.rank=4", ["adapter.rank", "adapter=none", "adapter=lora"]),
        ("adapter=lora", ["adapter is given", "task=pretrain", "task=sft, task=dpo or task=reward"]),
        ("tracker=wandb", ["tracker is given", "task=pretrain", "task=sft, task=dpo or task=reward"]),
        ("task=sft model.path=x run.sample_bytes=9", ["run.sample_bytes", "task=sft", "task=pretrain"]),
        ("run.keep_checkpoints=5", ["run.keep_checkpoints", "run.checkpoint_every=0"]),
        ("run.accumulate=2 run.global_batch=8", ["run.accumulate", "run.global_batch=8"]),
        ("++model.experts=8", ["model.experts"]),
    ],
)
def test_a_key_that_nothing_uses(words, parts):
    with pytest.raises(ConfigError, match="is given, but nothing uses it") as caught:
        jobs(words)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        "recipe=tiny offload=none",  # the recipe's own keys are not the command line's
        "model=moe model.experts=8",
        "offload=host offload.optimizer=nvme io=threads",
        "offload=host offload.activations=nvme offload.nvme_paths=[/x]",
        "optim.lr=1e-2 optim.schedule={type:WarmupLR,params:{warmup_max_lr:1e-2}}",  # as the error says
        "optim.lr=1e-2 optim.schedule={type:WarmupLR}",
        "optim.lr=1e-2 optim.schedule={type:WarmupCosineLR,params:{total_num_steps:9}}",
        "optim.warmup_steps=5 optim.schedule={type:WarmupLR,params:{warmup_num_steps:${optim.warmup_steps}}}",
        "run.checkpoint_every=5 run.keep_checkpoints=5",
        "offload=none run.probe=true io=threads",
        "io.allow_memory=true offload=host",  # a permission, not a choice
    ],
)
def test_keys_that_are_used_pass(words):
    assert jobs(words)


@pytest.mark.parametrize(
    ("wrong", "advice", "ways"),
    [
        (
            "model=hf model.layers=7",
            "leave model.layers out, or choose model=llama or gpt2 or moe",
            ["model=hf", "model=llama model.layers=7", "model=gpt2 model.layers=7", "model=moe model.layers=7"],
        ),
        (
            "adapter=lora",
            "choose task=sft, task=dpo or task=reward",
            [f"adapter=lora task={task}" for task in ("sft", "dpo", "reward")],
        ),
        (
            "offload=none offload.optimizer=nvme",
            "choose offload=host or nvme",
            ["offload=host offload.optimizer=nvme", "offload=nvme offload.optimizer=nvme"],
        ),
        (
            "offload=host tier=compressed",
            "place something there with offload=host offload.optimizer=NAME",
            ["tier=compressed offload=host offload.optimizer=compressed"],
        ),
        (
            "offload=none precision.states=fp32",
            "choose offload=host or nvme or auto",
            [f"offload={place} precision.states=fp32" for place in ("host", "nvme", "auto")],
        ),
        (
            "offload=host offload.nvme_paths=[/x]",
            "choose offload=nvme or auto",
            ["offload=nvme offload.nvme_paths=[/x]", "offload=auto offload.nvme_paths=[/x]"],
        ),
        (
            "optim.lr=1e-2 optim.base_lr=1e-3",
            "leave optim.lr out, which base_lr decides if it is not given",
            ["optim.base_lr=1e-3", "optim.lr=1e-2"],
        ),
        (
            "optim.final_fraction=0.5 optim.schedule={type:WarmupLR}",
            "choose optim.schedule=null",
            ["optim.final_fraction=0.5"],
        ),
        (
            "optim.lr=1e-2 optim.schedule={type:WarmupLR,params:{warmup_max_lr:1e-3}}",
            "give the schedule this rate, such as params: {warmup_max_lr: …}",
            ["optim.lr=1e-2 optim.schedule={type:WarmupLR,params:{warmup_max_lr:1e-2}}"],
        ),
        (
            "optim.base_lr=1e-2 optim.schedule={type:WarmupDecayLR,params:{total_num_steps:9}}",
            "give the schedule this rate",
            ["optim.base_lr=1e-2 optim.schedule={type:WarmupDecayLR,params:{total_num_steps:9,warmup_max_lr:1e-2}}"],
        ),
        (
            "optim.warmup_steps=5 optim.schedule={type:WarmupLR}",
            "give the schedule these steps, such as params: {warmup_num_steps: …}",
            ["optim.warmup_steps=5 optim.schedule={type:WarmupLR,params:{warmup_num_steps:5}}"],
        ),
        (
            "run.accumulate=2 run.global_batch=8",
            "choose run.global_batch=null",
            ["run.accumulate=2", "run.global_batch=8"],
        ),
        (
            "run.steps=5 run.epochs=1",
            "choose run.epochs=null",
            ["run.steps=5", "run.epochs=1"],
        ),
        (
            "task=sft model.path=x run.min_improvement=0.1",
            "set run.patience to a number",
            ["task=sft model.path=x run.min_improvement=0.1 run.patience=2"],
        ),
        (
            "run.keep_checkpoints=5",
            "set run.checkpoint_every to a number",
            ["run.keep_checkpoints=5 run.checkpoint_every=3"],
        ),
        (
            "run.evaluate_every=0 run.evaluate_batches=5",
            "set run.evaluate_every to a number",
            ["run.evaluate_every=3 run.evaluate_batches=5"],
        ),
        (
            "run.sample_bytes=0 run.sample_prompt=a",
            "set run.sample_bytes to a number",
            ["run.sample_bytes=9 run.sample_prompt=a"],
        ),
        ("optim.momentum=0.8", "choose optim=sgd", ["optim=sgd optim.momentum=0.8"]),
    ],
)
def test_the_way_out_that_is_named_uses_the_key(wrong, advice, ways):
    with pytest.raises(ConfigError) as caught:
        jobs(wrong)
    assert advice in str(caught.value)
    for way in ways:
        assert jobs(way)


def test_a_sweep_may_carry_keys_for_one_of_its_jobs():
    assert jobs("model=llama model.experts=4", "model=moe model.experts=4")
    with pytest.raises(ConfigError, match=r"model\.experts .* model=gpt2 or model=llama"):
        jobs("model=llama model.experts=8", "model=gpt2 model.experts=8")


def test_the_table_names_keys_that_exist():
    known = set(config.keys()) | {field.name for field in dataclasses.fields(Config)}
    named = {key for row in unused_keys.TABLE for key in [*row.keys.split(), row.chosen]}
    assert named <= known
