"""A merged adapter is what PEFT's merge_and_unload gives. What is not plain LoRA is refused, with nothing written."""

import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import zero_hf
from zero_core.checkpoint import pretrained
from zero_hf.commands import main

pytestmark = pytest.mark.promise("merge")

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TOKENS = torch.arange(24).view(3, 8)


def model(kind):
    torch.manual_seed(0)
    if kind == "gpt2":
        made = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=16)
        return transformers.GPT2LMHeadModel(made)
    tied = {"tie_word_embeddings": kind == "tied"}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=40, **SMALL, **tied))


def saved(tmp_path, kind="llama", dtype=torch.float32, **options):
    """Writes a base and an adapter of random values. Returns the model with both."""
    peft = pytest.importorskip("peft")
    base = model(kind).to(dtype)
    base.save_pretrained(tmp_path / "base", max_shard_size="8KB")
    options = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", **options}
    adapted = peft.get_peft_model(base, peft.LoraConfig(**options, init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    return adapted


@pytest.mark.parametrize(
    ("kind", "options"),
    [("llama", {}), ("tied", {"use_rslora": True}), ("gpt2", {"fan_in_fan_out": True, "target_modules": ["c_attn"]})],
)
def test_it_is_what_peft_merges(tmp_path, monkeypatch, kind, options):
    """Fails if a weight is scaled or transposed wrongly, or a tile begins in the wrong row."""
    monkeypatch.setattr(pretrained, "_TILE_NUMEL", 100)  # tiles end in the middle of rows
    adapted = saved(tmp_path, kind, **options)
    assert main(["merge", *(str(tmp_path / name) for name in ("base", "adapter", "out"))]) == 0
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    wanted = adapted.merge_and_unload().state_dict()
    assert list(found) == list(wanted)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-6, atol=1e-7)
    assert any(not torch.equal(before[name], found[name]) for name in found)


def test_a_base_in_bf16_is_rounded_once(tmp_path):
    saved(tmp_path, dtype=torch.bfloat16)
    changed = zero_hf.merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert len(changed) == 14
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    for name in changed:
        a, b = (adapter[f"base_model.model.{name.replace('weight', f'lora_{x}.weight')}"].float() for x in "AB")
        wanted = (base[name].float() + b * (5 / 3) @ a).bfloat16()
        assert found[name].dtype == torch.bfloat16
        torch.testing.assert_close(found[name], wanted, rtol=2**-8, atol=0)


CHANGES_THE_BASE = ("loftq", "corda", "lora_ga")  # they need packages or data to begin


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *(({"init_lora_weights": init}, f"has init_lora_weights={init}. ") for init in CHANGES_THE_BASE),
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias=all"),
        ({"alpha_pattern": {"q_proj": 7}}, "alpha_pattern"),
        ({"peft_type": "IA3"}, "of type IA3"),
        ({"kasa_config": {"beta": 0.1}}, "kasa_config="),
        ({"layer_replication": [[0, 1]]}, "layer_replication=[[0, 1]]"),
        ({"use_qalora": True}, "use_qalora=True"),
        ({"arrow_config": {"top_k": 3}}, "arrow_config="),
        ({"a_key_of_a_later_version": 3}, "a_key_of_a_later_version=3"),
        ({"init_lora_weights": "a_later_one"}, "init_lora_weights=a_later_one"),
    ],
)
def test_what_is_not_plain_lora_is_refused(tmp_path, capsys, change, said):
    saved(tmp_path)
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert main(["merge", *(str(tmp_path / name) for name in ("base", "adapter", "out"))]) == 2
    assert said in (told := capsys.readouterr().err) and "merge_and_unload" in told
    assert not (tmp_path / "out").exists()


@pytest.mark.advice("save the adapter with save_pretrained")
def test_other_folders_are_refused_and_those_that_errors_name_are_merged(tmp_path):
    """The base is that of another adapter, or the file is of another model, is missing or would be written over."""
    adapted = saved(tmp_path)
    base, adapter, new = (tmp_path / name for name in ("base", "adapter", "new"))
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)

    def refused(match, *folders):
        with pytest.raises(zero_hf.ConfigError, match=match):
            zero_hf.merge_adapter(*folders)

    save_file({name.replace("layers.1", "layers.7"): value for name, value in tensors.items()}, file)
    refused(r"adapts model\.layers\.7.* name the folder of the base model that", base, adapter, new)
    save_file({name: value[..., :2].contiguous() for name, value in tensors.items()}, file)
    refused("name the folder of the base model that the adapter was trained on", base, adapter, new)
    refused("the base .* has no config.json: name the folder of the adapter's base model", adapter, adapter, new)
    file.unlink()
    refused("has no adapter_model.safetensors: save the adapter with save_pretra", base, adapter, new)
    adapted.save_pretrained(adapter)
    assert len(zero_hf.merge_adapter(base, adapter, new)) == 14
    (base / "notes.txt").write_text("")
    refused("has files already: name a new folder", base, adapter, base)


def logits(made):
    with torch.no_grad():
        return made(input_ids=TOKENS).logits


def answers(folder):
    return logits(transformers.AutoModelForCausalLM.from_pretrained(folder))


OTHERS = {
    "another type": ("IA3Config", {"target_modules": ["q_proj"], "feedforward_modules": []}),
    "another formula": ("LoraConfig", {"target_modules": ["q_proj"], "use_dora": True}),
    "an embedding": ("LoraConfig", {"target_modules": ["embed_tokens"]}),
    "other names": ("LoraConfig", {"target_modules": ["q_proj"]}),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_is_not_merged_here_is_merged_by_peft_as_the_error_says(tmp_path, case):
    """Fails if PEFT refuses it too, or the folder that it writes is another model's."""
    peft = pytest.importorskip("peft")
    folders = [tmp_path / name for name in ("base", "adapter", "out")]
    # Where the files lack the prefix of the names, they lack the head too, so it has to be tied.
    base = model("tied" if case == "other names" else "llama")
    (base.model if case == "other names" else base).save_pretrained(folders[0])
    kind, options = OTHERS[case]
    adapted = peft.get_peft_model(base, getattr(peft, kind)(**options))
    with torch.no_grad():
        for name, value in adapted.named_parameters():
            if value.requires_grad:
                value.copy_(torch.randn_like(value) if "magnitude" not in name else value * 1.5)
    adapted.save_pretrained(folders[1])
    way = "load base and adapter with PEFT, and call merge_and_unload() and save_pretrained()"
    with pytest.raises(zero_hf.ConfigError, match=re.escape(way)):
        zero_hf.merge_adapter(*folders)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folders[0])
    peft.PeftModel.from_pretrained(loaded, folders[1]).merge_and_unload().save_pretrained(folders[2])
    torch.testing.assert_close(answers(folders[2]), logits(adapted.eval()), rtol=1e-4, atol=1e-5)


def trained(tmp_path, init, kind="llama", dtype=torch.float32):
    """Writes a base, and an adapter that is trained beside it, first as it began. Returns the model and its logits."""
    peft = pytest.importorskip("peft")
    model(kind).to(dtype).save_pretrained(tmp_path / "base")
    layers = {"target_modules": ["q_proj", "down_proj"]}
    if kind == "gpt2":
        layers = {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}
    config = peft.LoraConfig(r=2, lora_alpha=4, init_lora_weights=init, **layers)
    adapted = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config)
    adapted.peft_config["default"].init_lora_weights = True  # what PEFT asks for, to convert the adapter later
    adapted.save_pretrained(tmp_path / "first")
    adapted.peft_config["default"].init_lora_weights = init
    optimizer = torch.optim.AdamW([each for each in adapted.parameters() if each.requires_grad], lr=1e-2)
    for _ in range(5):
        adapted(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    adapted.save_pretrained(tmp_path / "adapter")
    return adapted.eval(), logits(adapted)


@pytest.mark.parametrize("init", [True, False, "gaussian", "orthogonal", "mica", "eva"])
def test_a_beginning_that_leaves_the_base_as_it_is_is_merged(tmp_path, init):
    """Fails if one of these is refused, or if PEFT changes the base for it."""
    _, wanted = trained(tmp_path, init)
    zero_hf.merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert (answers(tmp_path / "base") - wanted).abs().max() > 1e-2
    torch.testing.assert_close(answers(tmp_path / "out"), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("init", "kind", "dtype"),
    [
        ("pissa", "llama", torch.float32),
        ("olora", "llama", torch.float32),
        ("pissa", "gpt2", torch.float32),
        ("pissa", "llama", torch.bfloat16),
    ],
)
def test_a_beginning_that_changes_the_base_is_merged_as_peft_merges_it(tmp_path, monkeypatch, init, kind, dtype):
    """Fails if B A is added to weights that it was not trained beside."""
    peft = pytest.importorskip("peft")
    monkeypatch.setattr(pretrained, "_TILE_NUMEL", 100)
    _, wanted = trained(tmp_path, init, kind, dtype)
    changed = zero_hf.merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(loaded, tmp_path / "adapter").merge_and_unload().state_dict()
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (2**-7, 1e-6)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=rtol, atol=atol)
    assert changed
    if dtype == torch.float32:
        torch.testing.assert_close(answers(tmp_path / "out"), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.advice("Or save the adapter as plain LoRA")
def test_a_beginning_that_peft_does_not_repeat_is_refused_and_each_way_out_merges(tmp_path):
    """Fails if B A is added to weights that it was not trained beside, or if a way out gives another model."""
    adapted, wanted = trained(tmp_path, "pissa_niter_4")
    told = r"has init_lora_weights=pissa_niter_4. .* Call merge_and_unload\(\) and save_pretrained\(\) on the trained"
    with pytest.raises(zero_hf.ConfigError, match=told):
        zero_hf.merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    adapted.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "first"))
    zero_hf.merge_adapter(tmp_path / "base", tmp_path / "converted", tmp_path / "out")
    torch.testing.assert_close(answers(tmp_path / "out"), wanted, rtol=1e-4, atol=1e-5)
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(answers(tmp_path / "merged"), wanted, rtol=1e-4, atol=1e-5)


def test_an_adapter_that_was_converted_to_plain_lora_keeps_the_settings_of_its_beginning(tmp_path):
    saved(tmp_path)
    file = tmp_path / "adapter" / "adapter_config.json"
    settings = {f"{init}_config": {"some": 1} for init in CHANGES_THE_BASE}
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    assert len(zero_hf.merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")) == 14
