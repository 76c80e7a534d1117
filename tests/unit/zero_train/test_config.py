"""A mistyped command line ends with one sentence that names the key; a good one becomes dataclasses."""

import dataclasses
import shlex

import pytest
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.errors import HydraException
from omegaconf import OmegaConf

from zero_train.declare import ADAPTER_RATES, OPTIMIZERS
from zero_train.errors import ConfigError
from zero_train.schema import Config
from zero_train.settings import compose as config


@pytest.mark.promise("unknown-key")
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["run.step=3"], ["the key run.step does not exist", "did you mean 'run.steps'"]),
        (["steps=3"], ["the key steps does not exist", "did you mean 'run.steps'"]),
        (["+run.foo=3"], ["the key run.foo does not exist", "zero-train --cfg job"]),
        (["+foo=3"], ["the key foo does not exist"]),
        (["run.steps=abc"], ["run.steps=abc", "could not be converted to Integer"]),
        (["run.seed=null"], ["run.seed", "not Optional"]),
        (["offload=hots"], ["offload/hots", "auto host none nvme"]),
        (["ofload=host"], ["the key ofload does not exist", "did you mean 'offload'"]),
        (["run=3"], ["run=3", "RunConfig"]),
        (["offload.tiers.x.y=1"], ["offload.tiers.x", "+offload.tiers.x=…"]),
        (["run.resume=auto"], ["run.resume=auto", "run.dir=…"]),
        (["a=b=c=["], ["a=b=c=[", "needs quotes"]),
        (["frobnicate"], ["frobnicate", "write KEY=VALUE, or see zero-train --help"]),
        (["run.steps=1,2"], ["run.steps=1,2", "--multirun"]),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(overrides, words):
    with pytest.raises(ConfigError) as caught:
        config.compose(overrides)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


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
