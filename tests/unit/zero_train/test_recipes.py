"""What each recipe for a named machine plans, from the model's config.json alone: what lies where."""

import re
from pathlib import Path

import pytest
import transformers

from zero_train.cli.app import main

RECIPES = Path(__file__).parents[3] / "conf" / "recipe"
SHAPES = {  # of Llama 3.1
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
GIB = {  # recipe: tier -> what it holds
    "sft_8b_1x24gib_lora": {"device": 20.7, "host": 4.4, "nvme": 0.0},
    "sft_8b_1x24gib_nvme": {"device": 16.1, "host": 53.6, "nvme": 89.7},
    "sft_70b_1x80gib_nvme": {"device": 56.4, "host": 341.6, "nvme": 788.5},
    "qlora_70b_1x24gib": {"device": 20.7, "host": 43.4, "nvme": 0.0},
    "pretrain_1b_8x80gib": {"device": 9.5, "host": 0.0, "nvme": 0.0},
}


@pytest.mark.promise("plan-from-config")
@pytest.mark.parametrize("name", GIB)
def test_a_recipe_plans_what_it_says(name, tmp_path, capsys):
    """Fails if a recipe does not fit its machine, or a change of the planner moves a tenth of a GiB of it."""
    words = [f"recipe={name}", "run.dry=true"]
    size = name.split("_")[1]
    if "lora" in name:
        pytest.importorskip("peft")
    if not name.startswith("pretrain"):
        sizes = SHAPES[size] | {"num_key_value_heads": 8, "vocab_size": 128256, "dtype": "bfloat16"}
        config = transformers.LlamaConfig(architectures=["LlamaForCausalLM"], **sizes)
        config.save_pretrained(tmp_path)
        words.append(f"model.path={tmp_path}")
    assert main(words) == 0
    printed = capsys.readouterr().out
    table = re.findall(r"^(device|host|nvme) +(\d.*)$", printed, re.MULTILINE)
    totals = {tier: float(row.split()[-2]) for tier, row in table}
    assert totals == pytest.approx(GIB[name], abs=0.1)
    assert re.search(r"predicted for \d+ steps: [\d.]+ (minutes|hours|days)$", printed, re.MULTILINE)
    assert ("of the" in printed and "TB that the drives are rated for" in printed) == (GIB[name]["nvme"] > 0)


@pytest.mark.promise("recipe-7b")
@pytest.mark.parametrize(
    ("words", "most"),
    [
        ([], {"read": 95, "gradients": 12.6, "seconds": 43}),
        (["offload.rows=4"], {"read": 95, "gradients": 12.6, "seconds": 43}),
        (["offload=auto"], {"read": 95, "gradients": 12.6, "seconds": 27.5}),
        (["offload=auto", "offload.rows=4"], {"read": 95, "gradients": 12.6, "seconds": 27.5}),
    ],
)
def test_7b_parameters_are_read_once_a_direction(words, most, capsys):
    """Fails if the plan of 7b_1x24gib_nvme exceeds its bounds. As four micro-batches it does."""
    plan = ["recipe=7b_1x24gib_nvme", "run.dry=true"]
    assert main([*plan, *words]) == 0
    now = facts(capsys.readouterr().out)
    assert all(now[name] <= bound for name, bound in most.items()), now
    assert main([*plan, *words, "run.micro_batch=4", "run.accumulate=4", "offload.rows=null"]) == 0
    before = facts(capsys.readouterr().out)
    assert any(before[name] > bound for name, bound in most.items()), before
    assert before["gradients"] == pytest.approx(2 * now["gradients"], rel=1e-3)


def facts(printed):
    """GB that a step reads, GiB of gradients on all tiers, predicted seconds."""
    table = re.findall(r"^(?:device|host|nvme) +(\d.*)$", printed, re.MULTILINE)
    return {
        "read": float(re.search(r"each step reads ([\d.]+) GB", printed)[1]),
        "gradients": sum(float(row.split()[1]) for row in table),
        "seconds": float(re.search(r"predicted step: ([\d.]+) s", printed)[1]),
    }


@pytest.mark.promise("plan-from-config")
def test_the_recipe_for_a_laptop_keeps_the_states_on_disk(tmp_path, capsys):
    """Fails if smollm2_laptop takes more than 1.8 GiB of memory for a model of SmolLM2-135M's shape."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    config = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"], num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True, **sizes
    )
    config.save_pretrained(tmp_path)
    assert main(["recipe=smollm2_laptop", f"model.path={tmp_path}", "precision=bf16", "run.dry=true"]) == 0
    printed = capsys.readouterr().out
    rows = re.findall(r"^(device|host|nvme) +(\d.*)$", printed, re.MULTILINE)
    totals = {tier: float(row.split()[-2]) for tier, row in rows}
    assert totals == pytest.approx({"device": 1.07, "host": 0.727, "nvme": 1.503}, abs=0.02)
    assert "50 steps of 512 tokens" in printed


def test_every_recipe_for_a_named_machine_has_a_test():
    named = {
        path.stem for path in RECIPES.glob("*.yaml") if path.stem.startswith(("sft_", "qlora_", "dpo_", "pretrain_"))
    }
    assert named == set(GIB) | {name for name in MIXTURES if name.startswith("qlora")}


def mixture(kind, **sizes):
    return getattr(transformers, f"{kind}Config")(architectures=[f"{kind}ForCausalLM"], dtype="bfloat16", **sizes)


QWEN = {
    "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936,
}  # fmt: skip
FOUR = {
    "hidden_size": 1536, "moe_intermediate_size": 512, "num_experts": 48, "num_experts_per_tok": 4, "head_dim": 96,
    "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 50304,
}  # fmt: skip
MIXTURES = {  # recipe: the mixture, its parameters in billions, and what a tier holds in GiB
    "lora_30b_a3b_1x24gib": ("Qwen3Moe", QWEN, 30.5, {"device": 20.8, "host": 53.0, "nvme": 0.0}),
    "qlora_30b_a3b_laptop_16gib": ("Qwen3Moe", QWEN, 30.5, {"device": 1.0, "host": 2.0, "nvme": 17.0}),
    "full_moe_4b_16gib": ("Qwen3Moe", FOUR, 4.0, {"device": 0.5, "host": 10.9, "nvme": 44.4}),
    "lora_deepseek_v3_8x80gib": ("DeepseekV3", {}, 671, {"device": 74.0, "host": 127.4, "nvme": 1.2}),
}


@pytest.mark.promise("recipes-mixtures")
@pytest.mark.parametrize("name", MIXTURES)
def test_a_recipe_for_a_mixture_plans_what_it_says(name, tmp_path, capsys):
    """Fails if a mixture does not fit its machine, is built in memory, or a change moves a tenth of a GiB of it."""
    pytest.importorskip("peft")
    kind, sizes, billions, gib = MIXTURES[name]
    mixture(kind, **sizes).save_pretrained(tmp_path)
    assert main([f"recipe={name}", "run.dry=true", f"model.path={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    assert float(re.search(r"hf: ([\d.]+) M parameters", printed)[1]) == pytest.approx(billions * 1e3, rel=0.01)
    table = re.findall(r"^(device|host|nvme) +(\d.*)$", printed, re.MULTILINE)
    assert {tier: float(row.split()[-2]) for tier, row in table} == pytest.approx(gib, abs=0.1)
