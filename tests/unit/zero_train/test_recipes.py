"""What each recipe for a named machine plans, from the model's config.json alone: what lies where."""

import re
from pathlib import Path

import pytest
import transformers

from tests.swap import needs_swap
from zero_train.cli.app import main

RECIPES = Path(__file__).parents[3] / "conf" / "recipe"
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip
SMOLLM2 = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
QWEN = {
    "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936,
}  # fmt: skip
FOUR = {
    "hidden_size": 1536, "moe_intermediate_size": 512, "num_experts": 48, "num_experts_per_tok": 4, "head_dim": 96,
    "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 50304,
}  # fmt: skip
PLANS = {  # recipe: the model, its parameters in billions, and what the device, the host and NVMe hold in GiB
    "sft_8b_1x24gib_lora": ("Llama", LLAMA_8B, None, (20.7, 4.4, 0.0)),
    "sft_8b_1x24gib_nvme": ("Llama", LLAMA_8B, 8.03, (16.1, 53.6, 89.7)),
    "sft_70b_1x80gib_nvme": ("Llama", LLAMA_70B, 70.6, (56.4, 341.6, 788.5)),
    "qlora_70b_1x24gib": ("Llama", LLAMA_70B, None, (20.7, 43.4, 0.0)),
    "pretrain_1b_8x80gib": (None, {}, None, (9.5, 0.0, 0.0)),
    "smollm2_laptop": ("Llama", SMOLLM2, 0.1345, (1.07, 0.727, 1.503)),
    "lora_30b_a3b_1x24gib": ("Qwen3Moe", QWEN, 30.5, (20.8, 53.0, 0.0)),
    "qlora_30b_a3b_laptop_16gib": ("Qwen3Moe", QWEN, 30.5, (1.0, 2.0, 17.0)),
    "full_moe_4b_16gib": ("Qwen3Moe", FOUR, 4.0, (0.5, 10.9, 44.4)),
    "lora_deepseek_v3_8x80gib": ("DeepseekV3", {}, 671, (74.0, 127.4, 1.2)),
}


@pytest.mark.promise("plan-from-config", "recipes-mixtures")
@needs_swap
@pytest.mark.parametrize("name", PLANS)
def test_a_recipe_plans_what_it_says(name, tmp_path, capsys):
    """Fails if a recipe does not fit its machine, its model is built in memory, or a tenth of a GiB of it moves."""
    kind, sizes, billions, gib = PLANS[name]
    if "lora" in name:
        pytest.importorskip("peft")
    words = [f"recipe={name}", "run.dry=true", *(["precision=bf16"] if "smollm2" in name else [])]
    if kind is not None:
        made = getattr(transformers, f"{kind}Config")(architectures=[f"{kind}ForCausalLM"], dtype="bfloat16", **sizes)
        made.save_pretrained(tmp_path)
        words.append(f"model.path={tmp_path}")
    assert main(words) == 0
    printed = capsys.readouterr().out
    if billions is not None:
        assert float(re.search(r"hf: ([\d.]+) M parameters", printed)[1]) == pytest.approx(billions * 1e3, rel=0.01)
    table = re.findall(r"^(device|host|nvme) +(\d.*)$", printed, re.MULTILINE)
    totals = {tier: float(row.split()[-2]) for tier, row in table}
    near = 0.02 if "smollm2" in name else 0.1
    assert totals == pytest.approx(dict(zip(("device", "host", "nvme"), gib, strict=True)), abs=near)
    if name.startswith(("sft", "pretrain")):
        assert re.search(r"predicted for \d+ steps: [\d.]+ (minutes|hours|days)$", printed, re.MULTILINE)
        assert ("of the" in printed and "TB that the drives are rated for" in printed) == (gib[2] > 0)


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


def test_every_recipe_for_a_named_machine_has_a_test():
    kinds = ("sft_", "qlora_", "dpo_", "pretrain_")
    assert {path.stem for path in RECIPES.glob("*.yaml") if path.stem.startswith(kinds)} <= set(PLANS)
