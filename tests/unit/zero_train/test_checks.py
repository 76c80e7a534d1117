"""Values and paths that cannot be used are refused before anything is built, each by the key to change."""

import dataclasses
import typing

import pytest

from zero_train.errors import ConfigError
from zero_train.schema import Config
from zero_train.settings import checks, compose, placement


def changed(*overrides):
    return compose.compose(["recipe=tiny", "precision=bf16", "run.dir=runs/x", *overrides])


@pytest.mark.promise("offload-rows-key", "number-bounds", "no-backend")
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["zero.stage=4"], ["zero.stage=4", "0, 1, 2, 3"]),
        (["run.steps=0"], ["run.steps=0"]),
        (["run.dir="], ["run.dir is empty", "leave run.dir out"]),
        (["run.resume="], ["run.resume is empty"]),
        (["run.micro_batch=0"], ["run.micro_batch=0"]),
        (["model.layers=0"], ["model.layers=0", "at least 1"]),
        (["offload.kind=disk"], ["offload=disk", "none, placed, auto"]),
        (["optim.lr=-1"], ["optim.lr=-1"]),
        (["optim.kind=adamx"], ["optim=adamx", "adamw"]),
        (["precision.parameters=fp8"], ["precision.parameters=fp8", "bf16"]),
        (["precision.parameters=fp32"], ["precision.states=split", "fp32"]),
        (["hardware.tiers.cxl={gib: -1}"], ["hardware.tiers.cxl", "offload.tiers"]),
        (["zero.stage=1", "zero.no_sync=false"], ["zero.no_sync=false", "zero.stage=2"]),
        (["optim.betas=[0.9]"], ["optim.betas"]),
        (["data.validation_fraction=1.5"], ["data.validation_fraction"]),
        (["data=text", "data.validation_fraction=0"], ["data.validation_fraction=0"]),
        (["data=jsonl", "data.validation_fraction=1"], ["data.validation_fraction=1"]),
        (["precision.loss_scale=big"], ["precision.loss_scale=big"]),
        (["precision.loss_scale=true"], ["precision.loss_scale=True"]),
        (["adapter.targets=3"], ["adapter.targets=3", "[q_proj,v_proj]"]),
        (["adapter.targets=[]"], ["adapter.targets=[]"]),
        (["adapter.targets=''"], ["adapter.targets="]),
        (["offload.nvme_paths=3"], ["offload.nvme_paths=3", "[/mnt/a,/mnt/b]"]),
        (["precision.loss_scale=inf"], ["precision.loss_scale=inf"]),
        (["optim.warmup_steps=6"], ["optim.warmup_steps=6", "run.steps=5", "a tenth"]),
        (["optim.final_fraction=2"], ["optim.final_fraction=2", "at most 1"]),
        (["optim.weight_decay=1000"], ["optim.weight_decay=1000", "at most 10"]),
        (["optim=sgd", "optim.lr=0.5", "optim.weight_decay=4"], ["optim.weight_decay=4", "optim.lr=0.5", "leaves -1"]),
        (["run.report_every=-3"], ["run.report_every=-3", "at least 1"]),
        (["optim.betas=[0.9,1.0]"], ["optim.betas=[0.9, 1.0]", "below 1"]),
        (["optim.max_grad_norm=0"], ["optim.max_grad_norm=0", "null"]),
        (["optim.max_grad_norm=-1"], ["optim.max_grad_norm=-1"]),
        (
            ["task=sft", "model.path=x", "task.packing=true", "offload.activations=host", "offload.rows=2"],
            ["offload.rows=2", "task.packing=true", "set offload.tokens instead"],
        ),
    ],
)
def test_a_value_that_cannot_be_names_its_key(overrides, words):
    with pytest.raises(ConfigError) as caught:
        checks.values(changed(*overrides))
    for word in words:
        assert word in str(caught.value)


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


def test_only_what_is_on_nvme_needs_a_disk():
    assert placement.uses_nvme(changed("offload=nvme"))
    assert placement.uses_nvme(changed("offload=host", "offload.optimizer={host: 0.5, nvme: 0.5}"))
    assert not placement.uses_nvme(changed("offload=host"))
    assert not placement.uses_nvme(changed("offload=none", "offload.optimizer=nvme"))
    assert placement.uses_nvme(changed("offload=auto"))


@pytest.mark.advice("has figures of a tier that offload.tiers does not have")
@pytest.mark.promise("hardware-tiers")
def test_figures_of_a_tier_go_with_the_tier_or_are_left_out():
    figures = "hardware.tiers.compressed={gib: 3}"
    with pytest.raises(ConfigError, match=r"tier=…, or leave the figures out: ~hardware\.tiers\.compressed"):
        checks.values(changed(figures))
    checks.values(changed("tier=compressed", "hardware.tiers.compressed.gib=3"))
    checks.values(changed(figures, "~hardware.tiers.compressed"))
