"""Values and paths that cannot be used are refused before anything is built, each by the key to change."""

import dataclasses
import importlib.metadata
import importlib.util
import re
import sys
import typing

import pytest

from zero_train.errors import ConfigError
from zero_train.schema import Config
from zero_train.settings import checks, compose, extras


def changed(*overrides):
    return compose.compose(["recipe=tiny", "precision=bf16", "run.dir=runs/x", *overrides])


PACKED = "task=sft model.path=x offload.activations=host"
BEST = "task=sft model.path=x run.evaluate_every=1 run.keep_best=true"
NVME = "task=sft model.path=x offload=nvme"
MISTAKES = [  # words, parts of the message, and words that it advises
    ("zero.stage=4", "zero.stage=4 | 0, 1, 2, 3"),
    ("run.steps=0", "run.steps=0"),
    ("run.dir=''", "run.dir is empty | leave run.dir out | name a folder with run.dir=…", "run.dir=x"),
    ("run.resume=", "run.resume is empty"),
    ("run.micro_batch=0", "run.micro_batch=0"),
    ("model.layers=0", "model.layers=0 | at least 1"),
    ("offload.kind=disk", "offload=disk | none, placed, auto"),
    ("optim.lr=-1", "optim.lr=-1"),
    ("optim.kind=adamx", "optim=adamx | adamw"),
    ("precision.parameters=fp8", "precision.parameters=fp8 | bf16"),
    (
        "precision.parameters=fp32",
        "precision.states=split | set precision.states=fp32 or precision=bf16",
        "precision.parameters=fp32 precision.states=fp32",
    ),
    ("hardware.tiers.cxl={gib:-1}", "hardware.tiers.cxl | offload.tiers"),
    (
        "zero.stage=1 zero.no_sync=false",
        "zero.no_sync=false | choose zero.stage=2",
        "zero.stage=2 zero.no_sync=false",
        "zero.stage=1 zero.no_sync=null",
    ),
    ("optim.betas=[0.9]", "optim.betas"),
    ("data.validation_fraction=1.5", "data.validation_fraction"),
    ("data=text data.validation_fraction=0", "data.validation_fraction=0"),
    ("data=jsonl data.validation_fraction=1", "data.validation_fraction=1"),
    ("precision.loss_scale=big", "precision.loss_scale=big"),
    ("precision.loss_scale=true", "precision.loss_scale=True"),
    ("precision.loss_scale=inf", "precision.loss_scale=inf"),
    (
        "+precision.loss_scale={a:1}",
        "give a number, dynamic, null, or arguments of zero_core.LossScale",
        *(f"precision.loss_scale={each}" for each in ("1024", "dynamic", "null", "{hysteresis:2}")),
    ),
    ("adapter.targets=3", "adapter.targets=3 | [q_proj,v_proj]"),
    ("adapter.targets=[]", "change adapter.targets", "adapter.targets=[q_proj]", "adapter.targets=q_proj"),
    ("adapter.targets=''", "adapter.targets="),
    ("offload.nvme_paths=3", "offload.nvme_paths=3 | [/mnt/a,/mnt/b]"),
    (
        "optim.warmup_steps=6",
        "the 5 steps of | lower optim.warmup_steps, leave it out (it is then a tenth of the steps), or raise",
        "optim.warmup_steps=1",
        "optim.warmup_steps=6 run.steps=60",
    ),
    ("optim.final_fraction=2", "optim.final_fraction=2 | at most 1"),
    ("optim.weight_decay=1000", "optim.weight_decay=1000 | at most 10"),
    (
        "optim=sgd optim.lr=0.5 optim.weight_decay=4",
        "optim.weight_decay=4 | optim.lr=0.5 | leaves -1 | lower one of them",
        "optim=sgd optim.lr=0.1 optim.weight_decay=4",
        "optim=sgd optim.lr=0.5 optim.weight_decay=1",
    ),
    ("run.report_every=-3", "run.report_every=-3 | at least 1"),
    ("optim.betas=[0.9,1.0]", "optim.betas=[0.9, 1.0] | below 1"),
    ("optim.max_grad_norm=0", "optim.max_grad_norm=0 | set it to null for no clipping", "optim.max_grad_norm=null"),
    ("optim.max_grad_norm=-1", "optim.max_grad_norm=-1"),
    (
        f"{PACKED} task.packing=true offload.rows=2",
        "offload.rows=2 | task.packing=true | set offload.tokens instead, which cuts such a row, or one of them to "
        "null or false",
        *(f"{PACKED} {way}" for way in ("offload.rows=2", "task.packing=true", "task.packing=true offload.tokens=16")),
    ),
    ("+offload.tiers.x={gib:1}", "write one as in conf/tier/compressed.yaml", "tier=compressed"),
    (BEST, "set run.checkpoint_every to a number of steps", f"{BEST} run.checkpoint_every=5"),
    (
        "offload=none offload.activations=nvme",
        "set offload.activations=recompute, or choose offload=host or offload=nvme",
        "offload=none offload.activations=recompute",
        *(f"offload={place} offload.activations=nvme" for place in ("host", "nvme")),
    ),
    ("run.durable=always", "run.durable=always"),
    ("task=sft model=llama", "name one with model.path=FOLDER", "task=sft model.path=x"),
    ("task=sft model.path=x precision=fp16", "set precision=bf16 or precision=fp32", "task=sft model.path=x"),
    ("task=sft model.path=x precision.loss_scale=8", "precision.loss_scale=null", "task=sft model.path=x"),
    (
        "task=sft model.path=x adapter=lora adapter.merge=true run.export=false",
        "set run.export=true",
        "task=sft model.path=x adapter=lora adapter.merge=true run.export=true",
    ),
    (
        "run.durable=power offload=none",
        "choose offload=nvme or offload=host, or set run.durable=null",
        *("run.durable=power offload=host", "offload=none", "run.durable=power offload=nvme"),
    ),
    (
        f"{NVME} run.durable=power",
        "set run.durable=null, and run.checkpoint_every to a number of steps",
        f"{NVME} run.checkpoint_every=5",
    ),
]


@pytest.mark.advice("is empty; name a folder with", "; set it to null for", "does not name {}; change")
@pytest.mark.promise("offload-rows-key", "number-bounds", "no-backend", "messages-name-what-exists", "train-durable")
@pytest.mark.parametrize("row", MISTAKES, ids=[row[0] for row in MISTAKES])
def test_a_value_that_cannot_be_names_its_key_and_what_is_advised_passes(row):
    wrong, said, *ways = row
    with pytest.raises(ConfigError) as caught:
        checks.values(changed(*wrong.split()))
    for part in said.split(" | "):
        assert part in str(caught.value)
    for way in ways:
        checks.values(changed(*way.split()))


def numbers():
    """Every key whose type is a number, or a list of them: its section, the field, and whether it is an integer."""
    for section in dataclasses.fields(Config):
        if section.name in ("trl", "hardware"):  # whose values TRL and zero_offload check
            continue
        hints = typing.get_type_hints(section.default_factory)
        for key in dataclasses.fields(section.default_factory):
            kinds = {hints[key.name], *typing.get_args(hints[key.name])} & {int, float}
            if kinds and "allowed" not in key.metadata:
                yield pytest.param(section.name, key, int in kinds, id=f"{section.name}.{key.name}")


@pytest.mark.promise("number-bounds")
@pytest.mark.parametrize(("section", "key", "whole"), list(numbers()))
def test_every_number_has_a_smallest_and_a_largest_value(section, key, whole):
    """Fails for a new key without bounds, and for a bound that is not enforced."""
    bounds = key.metadata.get("bounds", {})
    low = bounds.get("at_least", bounds.get("above"))
    high = bounds.get("at_most", bounds.get("below"))
    assert low is not None and low >= 0 and high is not None and high < 2**63
    step = 1 if whole else 1e-9
    bad = [low - step, high * 2, float("inf"), -float("inf"), float("nan")]
    bad += [low] * ("above" in bounds) + [high] * ("below" in bounds)
    many = (lambda value: [0.5, value]) if key.name == "betas" else (lambda value: value)
    for value in bad:
        with pytest.raises(ConfigError, match=rf"^{section}\.{key.name}="):
            checks._declared(section, key, many(value))
    for value in [low] * ("at_least" in bounds) + [high] * ("at_most" in bounds) + [(low + high) / 2]:
        checks._declared(section, key, many(value))


FINE_TUNING = "task=sft model.path=x data.path=x"


@pytest.mark.advice(
    ", or choose optim=adamw", ", or choose offload=host", "tracker={} needs",
    "{} needs {}, which is not installed; pip install 'zero-train[{}]'",
)  # fmt: skip
@pytest.mark.parametrize(
    ("missing", "wrong", "advice", "way"),
    [
        ("zero_optim_cpu", "optim=lion", "pip install 'zero-train[cpu]', or choose optim=adamw", "optim=adamw"),
        ("zero_optim_cpu", "offload=host", "or choose offload=none", "offload=none"),
        ("zero_nvme", "offload=nvme", "pip install 'zero-train[nvme]', or choose offload=host", "offload=host"),
        ("trl", FINE_TUNING, "task=sft needs trl, which is not installed; pip install 'zero-train[finetune]'", ""),
        ("wandb", f"{FINE_TUNING} tracker=wandb", "needs wandb, which is not installed; pip install wandb", ""),
        ("tensorboard", f"{FINE_TUNING} tracker=tensorboard", "not installed; pip install tensorboard", ""),
    ],
)
def test_a_package_that_is_missing_is_installed_or_not_needed(monkeypatch, missing, wrong, advice, way):
    def check(words):
        made = changed(*words.split())
        checks.packages(made) if made.task.kind == "pretrain" else checks.tuning_packages(made, planned=False)

    real = importlib.util.find_spec
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else real("json"))
        with pytest.raises(ConfigError, match=re.escape(advice)):
            check(f"offload=none {wrong}")
        check(f"offload=none {way}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: real("json"))
    check(wrong)  # as after the installation


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


@pytest.mark.advice("describes a tier that offload.tiers does not have")
@pytest.mark.promise("hardware-tiers")
def test_figures_of_a_tier_go_with_the_tier_or_are_left_out():
    figures = "hardware.tiers.compressed={gib: 3}"
    with pytest.raises(ConfigError, match=r"tier=…, or delete its description with ~hardware\.tiers\.compressed"):
        checks.values(changed(figures))
    checks.values(changed("tier=compressed", "hardware.tiers.compressed.gib=3"))
    checks.values(changed(figures, "~hardware.tiers.compressed"))
