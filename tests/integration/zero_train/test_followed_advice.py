"""Advice of zero-train that is followed: each test makes a mistake, does what the error says, and that works."""

import importlib.metadata
import importlib.util
import re
import sys
import types

import pytest

from zero_train.cli import generate
from zero_train.errors import ConfigError
from zero_train.model import causal_lm, folders
from zero_train.run import planning, resume
from zero_train.run.ranks import Ranks
from zero_train.schema import ModelConfig
from zero_train.settings import checks, compose, extras
from zero_train.tune import finetune


def composed(*words):
    return compose.compose(["recipe=tiny", "precision=bf16", "run.dir=runs/x", *words])


def values(*words):
    checks.values(composed(*words))


def packages(*words):
    checks.packages(composed(*words))


def here(*words):
    planning.here(composed(*words), Ranks())


def tuned(*words):
    pytest.importorskip("trl")
    made = composed("task=sft", "model.path=x", "data.path=x", *words)
    checks.values(made)
    checks.tuning_packages(made, planned=False)


def bare(*words):
    return compose.compose(words)


TIERS, PACKED = ("host", "nvme"), "task=sft model.path=x offload.activations=host"


@pytest.mark.advice(
    "says what each of its keys means here: set these",
    "is empty; name a folder with",
    "; set it to null for",
    "has no value; give one with",
    "add it with a plus before the key",
    "does not name {}; change",
)
@pytest.mark.promise("missing-key", "messages-name-what-exists")
@pytest.mark.parametrize(
    ("check", "wrong", "advice", "ways"),
    [
        (values, "run.dir=''", "name a folder with run.dir=…", ["run.dir=x"]),
        (values, "+offload.tiers.x={gib: 1}", "write one as in conf/tier/compressed.yaml", ["tier=compressed"]),
        (
            values,
            "+precision.loss_scale={a: 1}",
            "give a number, dynamic, null, or arguments of zero_core.LossScale",
            [f"precision.loss_scale={each}" for each in ("1024", "dynamic", "null", "{hysteresis: 2}")],
        ),
        (
            values,
            "adapter.targets=[]",
            "change adapter.targets",
            ["adapter.targets=[q_proj]", "adapter.targets=q_proj"],
        ),
        (
            values,
            "optim=sgd optim.lr=0.5 optim.weight_decay=4",
            "lower one of them",
            ["optim=sgd optim.lr=0.1 optim.weight_decay=4", "optim=sgd optim.lr=0.5 optim.weight_decay=1"],
        ),
        (values, "optim.max_grad_norm=0", "set it to null for no clipping", ["optim.max_grad_norm=null"]),
        (
            values,
            "task=sft model.path=x run.evaluate_every=1 run.keep_best=true",
            "set run.checkpoint_every to a number of steps",
            ["task=sft model.path=x run.evaluate_every=1 run.keep_best=true run.checkpoint_every=5"],
        ),
        (
            values,
            "precision.parameters=fp32",
            "set precision.states=fp32 or precision=bf16",
            ["precision.parameters=fp32 precision.states=fp32"],
        ),
        (
            values,
            "zero.stage=1 zero.no_sync=false",
            "choose zero.stage=2",
            ["zero.stage=2 zero.no_sync=false", "zero.stage=1 zero.no_sync=null"],
        ),
        (
            values,
            "offload=none offload.activations=nvme",
            "set offload.activations=recompute, or choose offload=host or offload=nvme",
            ["offload=none offload.activations=recompute", *(f"offload={p} offload.activations=nvme" for p in TIERS)],
        ),
        (
            values,
            f"{PACKED} task.packing=true offload.rows=2",
            "set offload.tokens instead, which cuts such a row, or one of them to null or false",
            [
                f"{PACKED} {way}"
                for way in ("offload.rows=2", "task.packing=true", "task.packing=true offload.tokens=16")
            ],
        ),
        (
            values,
            "optim.warmup_steps=6",
            "lower optim.warmup_steps, leave it out for a tenth of the run, or raise run.steps",
            ["optim.warmup_steps=1", "optim.warmup_steps=6 run.steps=60"],
        ),
        (here, "hardware.device=cuda", "or run on this one with hardware=detect", ["hardware=detect"]),
        (here, "hardware.nodes=2", "or run on this machine with hardware=detect", ["hardware=detect"]),
        (bare, "run.steps=???", "run.steps has no value; give one with run.steps=…", ["run.steps=3"]),
        (bare, "run.seed=???", "run.seed has no value; give one with run.seed=…", ["run.seed=3"]),
        (bare, "run.resume=auto", "name a folder with run.dir=…", ["run.resume=auto run.dir=x"]),
        (bare, "data.path=a{b", "needs quotes; write \"data.path='a{b'\"", ["data.path='a{b'"]),
        (
            bare,
            "offload.tiers.x.y=1",
            "add it with a plus before the key: +offload.tiers.x=…",
            ["+offload.tiers.x={y:1}"],
        ),
        (bare, "model.checkpointing=true", "set offload.activations=recompute", ["offload.activations=recompute"]),
        (bare, "run.durable_every=2", "leave it out, as run.durable keeps each step", [""]),
        (bare, "run.min_improvement=1", "leave it out, as run.patience counts validation losses", [""]),
        (bare, "zero.update_in_backward=true", "leave it out, or call zero_core.shard(update_in_backward=True)", [""]),
        (bare, "deepspeed=ds_config.json", "`zero-hf translate FILE` says what each of its keys", ["zero.stage=2"]),
        (bare, "optim.schedule={type:WarmupLR}", "set optim.warmup_steps and optim.fin", ["optim.final_fraction=1"]),
        (tuned, "model=llama", "name one with model.path=FOLDER", [""]),
        (tuned, "adapter.merge=true run.export=false", "set run.export=true", ["adapter.merge=true run.export=true"]),
        (tuned, "precision=fp16", "set precision=bf16 or precision=fp32", ["precision=bf16", "precision=fp32"]),
    ],
)
def test_keys_that_an_error_names_pass(check, wrong, advice, ways):
    def words(text):
        return [text] if "{" in text else text.split()

    with pytest.raises(ConfigError, match=re.escape(advice)):
        check(*words(wrong))
    for way in ways:
        check(*words(way))


@pytest.mark.advice(
    ", or choose optim=adamw",
    ", or choose offload=host",
    "{} needs {}, which is not installed; pip install 'zero-train[{}]'",
)
@pytest.mark.parametrize(
    ("missing", "wrong", "advice", "way"),
    [
        ("zero_optim_cpu", "optim=lion", "pip install 'zero-train[cpu]', or choose optim=adamw", "optim=adamw"),
        ("zero_optim_cpu", "offload=host", "or choose offload=none", "offload=none"),
        ("zero_nvme", "offload=nvme", "pip install 'zero-train[nvme]', or choose offload=host", "offload=host"),
    ],
)
def test_a_run_without_a_package_chooses_what_an_error_names(monkeypatch, missing, wrong, advice, way):
    real = importlib.util.find_spec
    packages(wrong)  # as after the installation
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else real(name))
    with pytest.raises(ConfigError, match=re.escape(advice)):
        packages("offload=none", wrong)
    packages("offload=none", way)


@pytest.mark.parametrize("module", extras.EXTRAS)
def test_a_package_that_does_not_load_is_installed_again(monkeypatch, module):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, module, None)
        with pytest.raises(ConfigError, match="reinstall it with pip install --force-reinstall") as raised:
            extras.loaded(module)
    extra = re.search(r"'zero-train\[(\w+)\]'", str(raised.value))[1]
    brought = [r for r in importlib.metadata.requires("zero-train") if f"extra == {extra!r}" in r.replace('"', "'")]
    assert any(r.startswith(module.replace("_", "-")) for r in brought)
    pytest.importorskip(module)
    extras.loaded(module)  # as after the installation


@pytest.mark.advice("tracker={} needs")
@pytest.mark.parametrize(
    ("missing", "wrong", "advice"),
    [
        ("trl", "tracker=none", "task=sft needs trl, which is not installed; pip install 'zero-train[finetune]'"),
        ("wandb", "tracker=wandb", "tracker=wandb needs wandb, which is not installed; pip install wandb"),
        ("tensorboard", "tracker=tensorboard", "which is not installed; pip install tensorboard"),
    ],
)
def test_fine_tuning_without_a_package_passes_when_it_is_installed(monkeypatch, missing, wrong, advice):
    real = importlib.util.find_spec
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else real(name))
        with pytest.raises(ConfigError, match=re.escape(advice)):
            tuned(wrong)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: real("json" if name == missing else name))
    tuned(wrong)


# -- models, folders and commands --------------------------------------------------------------------------------------


@pytest.mark.advice("model.experts={}; change one")
def test_models_that_an_error_asks_for_are_built(tmp_path):
    from transformers import LlamaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 48, "layers": 1, "heads": 4}
    odd = {"kind": "llama", **sizes, "vocab_size": 256}
    for wrong, advice, ways in (
        ({"hidden_size": 30}, "even multiple of model.heads=4", ({"hidden_size": 32}, {"hidden_size": 30, "heads": 3})),
        ({"key_value_heads": 3}, "model.key_value_heads=3", ({"key_value_heads": 2}, {"heads": 16})),
        (
            {"kind": "moe", "experts": 1},
            "model.experts=1; change one",
            ({"kind": "moe", "experts": 1, "experts_per_token": 1}, {"kind": "moe", "experts": 2}),
        ),
    ):
        with pytest.raises(ConfigError, match=advice):
            causal_lm.build(ModelConfig(**odd | wrong), 16)
        for way in ways:
            causal_lm.build(ModelConfig(**odd | way), 16)
    (tmp_path / "empty").mkdir()
    LlamaConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, vocab_size=256).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="name a folder saved by save_pretrained"):
        causal_lm.build(ModelConfig(kind="hf", path=str(tmp_path / "empty")), 16)
    causal_lm.build(ModelConfig(kind="hf", path=str(tmp_path)), 16)
    with pytest.raises(ConfigError, match="name a folder saved by save_pretrained"):
        folders.local(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="or download it with `hf download someone/model --local-dir FOLDER`"):
        folders.local("someone/model")
    with pytest.raises(ConfigError, match="name a folder saved by save_pretrained$"):
        folders.local("/model")  # which no hub has
    assert folders.local(str(tmp_path)) == tmp_path


def test_models_of_bytes_are_named_or_data_is_given_as_bytes(tmp_path):
    with pytest.raises(ConfigError, match="name another model"):
        causal_lm._byte_level(tmp_path, 100, False)
    with pytest.raises(ConfigError, match="name a model that was trained on bytes, or set data.as_bytes=true"):
        causal_lm._byte_level(tmp_path, 1000, False)
    causal_lm._byte_level(tmp_path, 256, False)
    causal_lm._byte_level(tmp_path, 1000, True)


@pytest.mark.advice("set model.vocab_size={}")
def test_the_embeddings_are_as_many_as_the_tokens_or_the_tokenizer_is_the_models_own(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "layers": 1, "heads": 4}
    small, large = (ModelConfig(kind="llama", vocab_size=size, **sizes) for size in (256, 400))
    with pytest.raises(ConfigError, match="the tokenizer has 400 tokens; set model.vocab_size=400"):
        causal_lm.check_vocabulary(causal_lm.build(small, 16), small, 400)
    causal_lm.check_vocabulary(causal_lm.build(large, 16), large, 400)
    own = ModelConfig(kind="hf", path=str(tmp_path))
    causal_lm.build(small, 16).config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="name its own tokenizer"):
        causal_lm.check_vocabulary(causal_lm.build(own, 16), own, 400)
    causal_lm.check_vocabulary(causal_lm.build(own, 16), own, 256)


def test_folders_that_an_error_asks_for_are_taken(tmp_path):
    def found(*words):
        return resume.found(composed(f"run.dir={tmp_path / 'new'}", *words))

    with pytest.raises(ConfigError, match="or start again without run.resume"):
        found(f"run.resume={tmp_path}")
    assert found() is None
    for content, advice in (("{", "cannot be read: .*; name another folder"), ("model: {layers: 1}", "another folder")):
        broken = tmp_path / "broken"
        broken.mkdir(exist_ok=True)
        (broken / "config.yaml").write_text(content)
        (broken / "metrics.jsonl").write_text("{}\n")
        with pytest.raises(ConfigError, match=advice):
            found("run.resume=auto", f"run.dir={broken}")
        assert found("run.resume=auto") is None


@pytest.mark.advice("write zero-train generate run.dir=FOLDER", "is not a number; change")
@pytest.mark.parametrize(
    ("wrong", "advice", "way"),
    [
        ("hello", "cannot read 'hello': write zero-train generate run.dir=FOLDER", "run.dir=x generate.prompt=hello"),
        ("generate.prompt=hello", "run.dir is not given: write zero-train generate run.dir", "run.dir=x"),
        ("run.dir=x generate.tokens=many", "is not a number; change generate.tokens", "run.dir=x generate.tokens=9"),
        ("run.dir=x generate.tokens=0", "set it to 1, for instance", "run.dir=x generate.tokens=1"),
    ],
)
def test_a_question_is_asked_as_an_error_says(wrong, advice, way):
    with pytest.raises(ConfigError, match=advice):
        generate._read(wrong.split())
    generate._read(way.split())


def test_other_rows_are_brought_back_or_learned_from_on_purpose(tmp_path):
    def continued(digest, how="auto"):
        words = ("task=sft", "model.path=x", f"run.resume={how}", f"run.dir={tmp_path}")
        finetune.FineTune(composed(*words), Ranks(), None, None)._same_data(types.SimpleNamespace(digest=digest))

    (tmp_path / "data.json").write_text('{"digest": "a", "order": 3}')
    with pytest.raises(ConfigError, match="bring them back, or continue from its weights with run.resume="):
        continued("b")
    continued("a")
    continued("b", tmp_path)
