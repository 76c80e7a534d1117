"""A mistyped or unused key ends with one sentence that names it; a good command line becomes dataclasses."""

import dataclasses
import re
import shlex

import pytest
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.errors import HydraException
from omegaconf import OmegaConf

from zero_train.cli import unused_keys
from zero_train.declare import ADAPTER_RATES, OPTIMIZERS
from zero_train.errors import ConfigError
from zero_train.schema import Config
from zero_train.settings import compose as config


@pytest.mark.advice(
    "has no value; give one with",
    "add it with a plus before the key",
    "says what each of its keys means here: set these",
)
@pytest.mark.promise("unknown-key", "missing-key", "messages-name-what-exists")
@pytest.mark.parametrize(
    "row",
    [
        ("run.step=3", "the key run.step does not exist | did you mean 'run.steps'"),
        ("steps=3", "the key steps does not exist | did you mean 'run.steps'"),
        ("+run.foo=3", "the key run.foo does not exist | zero-train --cfg job"),
        ("+foo=3", "the key foo does not exist"),
        ("run.steps=abc", "run.steps=abc | could not be converted to Integer"),
        ("run.seed=null", "run.seed | not Optional"),
        ("run.seed=???", "run.seed has no value; give one with run.seed=…", "run.seed=3"),
        ("run.steps=???", "run.steps has no value; give one with run.steps=…", "run.steps=3"),
        ("offload=hots", "offload/hots | auto host none nvme"),
        ("ofload=host", "the key ofload does not exist | did you mean 'offload'"),
        ("run=3", "run=3 | RunConfig"),
        ("offload.tiers.x.y=1", "add it with a plus before the key: +offload.tiers.x=…", "+offload.tiers.x={y:1}"),
        ("run.resume=auto", "run.resume=auto | name a folder with run.dir=…", "run.resume=auto run.dir=x"),
        ("data.path=a{b", "needs quotes; write \"data.path='a{b'\"", "data.path='a{b'"),
        ("frobnicate", "frobnicate | write KEY=VALUE, or see zero-train --help"),
        ("run.steps=1,2", "run.steps=1,2 | --multirun"),
        ("model.checkpointing=true", "set offload.activations=recompute", "offload.activations=recompute"),
        ("run.durable_every=2", "leave it out, as run.durable keeps each step"),
        ("run.min_improvement=1", "leave it out, as run.patience counts validation losses"),
        ("zero.update_in_backward=true", "leave it out, or call zero_core.shard(update_in_backward=True)"),
        ("deepspeed=ds_config.json", "`zero-hf translate FILE` says what each of its keys", "zero.stage=2"),
        ("optim.schedule={type:WarmupLR}", "set optim.warmup_steps and optim.fin", "optim.final_fraction=1"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key_and_what_is_advised_composes(row):
    wrong, said, *ways = row
    with pytest.raises(ConfigError) as caught:
        config.compose([wrong])
    assert "\n" not in str(caught.value)
    for part in said.split(" | "):
        assert part in str(caught.value)
    for way in ways:
        config.compose(way.split())


@pytest.mark.parametrize(
    "group", ["model", "data", "zero", "offload", "tier", "io", "optim", "precision", "hardware", "recipe"]
)
def test_every_option_of_every_group_composes(group):
    options = sorted((config.folder() / group).glob("*.yaml"))
    assert options
    for option in options:
        assert isinstance(config.compose([f"{group}={option.stem}"]), Config)


@pytest.mark.promise("rates")
@pytest.mark.parametrize("recipe", sorted(path.stem for path in (config.folder() / "recipe").glob("*.yaml")))
def test_a_recipe_gives_each_optimizer_and_adapter_its_own_rate_and_a_warm_up_that_fits(recipe):
    """Fails if a recipe's rate, which is AdamW's for all weights, is taken for another optimizer or for adapters."""
    made = config.compose([f"recipe={recipe}", "optim=sgd", "adapter=lora", "run.steps=31"])
    assert made.optim.lr == pytest.approx(made.optim.base_lr * 100 * 10)
    assert made.optim.warmup_steps == 4


@pytest.mark.promise("rates")
def test_rates_are_the_usual_ones_and_a_given_one_stays():
    rates = {kind: config.compose([f"optim={kind}"]).optim.lr for kind in OPTIMIZERS if kind != "own"}
    assert rates == {"adamw": 1e-3, "adam": 1e-3, "lion": 3e-4, "adagrad": 1e-2, "sgd": 1e-1, "muon": 1e-3}
    tuned = [config.compose(["task=sft", f"adapter={kind}"]).optim.lr for kind in ADAPTER_RATES]
    assert tuned == [2e-5, 2e-4, 2e-4]
    assert config.compose(["task=sft", "optim=sgd", "adapter=lora", "optim.lr=7e-3"]).optim.lr == 7e-3
    assert config.compose(["optim=lion", "optim.base_lr=1e-2", "optim.warmup_steps=0"]).optim.lr == 3e-3


@pytest.mark.promise("hydra-quotes")
@pytest.mark.parametrize("value", ["/tmp/c=d", "a b, c", "it's {x}", "a\\b"])
def test_a_value_that_hydra_cannot_read_is_told_with_quotes_that_work(value):
    """Fails if the shell and Hydra do not make the value of what the error says to write."""
    with pytest.raises(ConfigError, match="needs quotes; write ") as caught:
        config.compose([f"run.dir=={value}"])
    (word,) = shlex.split(str(caught.value).partition("; write ")[2])
    assert config.compose([word]).run.dir == f"={value}"


def composed_in(folder, *overrides):
    """Composes as Hydra does with --config-dir, without anything of zero-train's command line."""
    with initialize_config_module("zero_train.conf", version_base="1.3"):
        composed = compose("train", overrides=[f"hydra.searchpath=[{folder}]", *overrides])
    return config.to_config(composed)


@pytest.mark.promise("own-recipes")
def test_what_a_run_reads_and_starts_from_follows_from_recipes_of_ones_own(tmp_path):
    """Fails if it follows from the words of a command line, or if the tree is no package that Hydra finds."""
    for name, text in {
        "recipe/corpus": "# @package _global_\ndefaults:\n- tiny\n- override /data: jsonl\ndata: {path: x.txt}",
        "recipe/path": "# @package _global_\ndata: {path: x.csv, tokenizer: t}\nmodel: {path: m}",
        "recipe/tuned": "# @package _global_\ndefaults:\n- override /task: sft",
        "experiment/sft": "# @package _global_\ndefaults:\n- override /task: sft",
        "experiment/tiny": "# @package _global_\ndefaults:\n- override /recipe: tiny",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text + "\n")
    corpus = composed_in(tmp_path, "recipe=corpus", "data.path=rows.txt")
    assert (corpus.data.kind, corpus.data.pattern, corpus.run.steps) == ("jsonl", "*.jsonl", 5)
    named = composed_in(tmp_path, "recipe=path")
    assert (named.data.kind, named.data.pattern, named.model.kind) == ("csv", "*.csv", "hf")
    assert composed_in(tmp_path, "recipe=tuned", "data.path=x").data.kind == "datasets"
    tuned = composed_in(tmp_path, "+experiment=sft", "data.path=x.json")
    assert (tuned.task.kind, tuned.data.kind, tuned.run.accumulate) == ("sft", "jsonl", 4)  # of recipe=finetune
    assert composed_in(tmp_path, "+experiment=tiny").run.steps == 5


@pytest.mark.promise("saved-config")
def test_a_saved_configuration_takes_keys_and_groups(tmp_path):
    saved = config.compose(["recipe=tiny", "run.dir=x", "offload=host", "optim=sgd"])
    (tmp_path / "config.yaml").write_text(config.as_yaml(saved))
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        again = config.to_config(compose("config"))
        other = config.to_config(compose("config", overrides=["offload=none", "run.steps=7", "tier=compressed"]))
    assert (again.offload.kind, again.optim.kind, again.run.steps) == ("placed", "sgd", 5)
    assert (other.offload.kind, other.optim.kind, other.run.steps) == ("none", "sgd", 7)
    assert list(other.offload.tiers) == ["compressed"]


@pytest.mark.promise("saved-config")
def test_a_configuration_that_an_older_version_saved_takes_groups_with_a_plus(tmp_path):
    OmegaConf.save(OmegaConf.structured(config.compose(["recipe=tiny", "run.dir=x"])), tmp_path / "config.yaml")
    search = f"hydra.searchpath=[file://{config.folder()}]"
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        with pytest.raises(HydraException) as caught:
            compose("config", overrides=[search, "offload=none"])
        assert "use +offload=none" in str(config.explained(caught.value))
        assert config.to_config(compose("config", overrides=[search, "+offload=none"])).offload.kind == "none"


@pytest.mark.promise("path-alone")
def test_a_path_alone_chooses_what_reads_it():
    """Fails if `data.path` trains on the standard library, or `model.path` on random weights."""
    assert config.compose(["data.path=/x"]).data.kind == "text"
    assert config.compose(["model.path=/x"]).model.kind == "hf"
    assert config.compose(["data.sources=[{path: x}]"]).data.kind == "mixture"
    assert config.compose(["data.path=null", "model.path=null"]).data.kind == "stdlib"
    assert config.compose(["data=synthetic", "data.path=/x"]).data.kind == "synthetic"  # which a run refuses


def test_every_key_has_a_description():
    import inspect

    from zero_train import schema

    for section in dataclasses.fields(Config):
        if section.name in ("trl", "hardware"):  # whose keys are TRL's and zero_offload.Hardware's
            continue
        source = inspect.getsource(section.default_factory)
        described = source.count('"""') // 2 - 1  # the class's own
        assert described == len(dataclasses.fields(section.default_factory)), section.name
    assert inspect.getdoc(schema.Config)


def jobs(*lines):
    """Checks the jobs of a sweep, or one run."""
    configs = [config.compose(line.split()) for line in lines]
    unused_keys.check(config.keys_of(lines[0].split()), configs)
    return configs


@pytest.mark.advice("is given and not used with")
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
        ("offload=host tier=compressed", "tier", "offload.optimizer=compressed"),
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
    with pytest.raises(ConfigError, match=f"^{re.escape(key)} is given and not used with ") as caught:
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
    known = set(config.keys()) | {field.name for field in dataclasses.fields(Config)}
    named = {key for row in unused_keys.TABLE for key in [*row.keys.split(), row.chosen]}
    assert named <= known
