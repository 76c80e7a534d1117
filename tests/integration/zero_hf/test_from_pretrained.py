"""zero_hf.from_pretrained: the model that transformers would load, read slice by slice by each rank that shards it."""

import json
import math
import warnings
from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.core_model_loading import Chunk, Transpose, WeightConverter

import zero_core
import zero_hf
from tests import kit
from tests.integration.zero_core import mixtures
from tests.integration.zero_core.mixtures import GROUP, STACKS, adamw, grouped
from zero_core import ZeroError
from zero_core.checkpoint.pretrained import FileValues
from zero_core.checkpoint.safetensors import Reader
from zero_hf import ZeroConfig, pretrained

from .accelerated import Script, launched

pytestmark = pytest.mark.promise("from-pretrained")

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}


def saved(folder, name, *, parts=None, **options):
    """A small model of that name in `folder`, in files of at most `parts` bytes."""
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    sizes = SIZES
    if name.startswith("T5"):
        sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    elif name.startswith("Bert"):
        sizes = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
    elif name.startswith("GPT2"):
        sizes = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    model = kind(kind.config_class(**sizes | options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, **({} if parts is None else {"max_shard_size": parts}))
    return model


def load(kind, folder, **options):
    """The model sharded on this process, and what was warned about."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model, info = zero_hf.from_pretrained(kind, folder, output_loading_info=True, **options)
    assert all(p.is_meta for p in model.parameters())
    zero_core.shard(model)
    return model, info, [str(w.message) for w in said if "newly initialised" in str(w.message) or "used" in str(w)]


def same(model, stock, but=()):
    ours, theirs = model.state_dict(), stock.state_dict()
    assert ours.keys() == theirs.keys()
    assert [n for n in ours if ours[n].dtype != theirs[n].dtype or not torch.equal(ours[n], theirs[n])] == list(but)
    ours, theirs = dict(model.named_buffers()), dict(stock.named_buffers())
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


@pytest.mark.parametrize(
    ("name", "auto", "options"),
    [
        ("LlamaForCausalLM", "AutoModelForCausalLM", {"parts": "5KB"}),
        ("LlamaForCausalLM", "LlamaForCausalLM", {"tie_word_embeddings": True}),
        ("GPT2LMHeadModel", "AutoModelForCausalLM", {}),
        ("T5ForConditionalGeneration", "AutoModelForSeq2SeqLM", {}),
        ("MixtralForCausalLM", "AutoModelForCausalLM", {"num_local_experts": 3}),
        ("Qwen3MoeForCausalLM", "AutoModel", {"num_experts": 4, "moe_intermediate_size": 8, "head_dim": 8}),
        ("LlamaModel", "LlamaModel", {}),
    ],
)
def test_weights_are_those_that_transformers_loads(tmp_path, name, auto, options):
    """Fails if a tie, a prefix, a file of an index, a stacked expert or a buffer gets other values."""
    saved(tmp_path, name, **options)
    kind = getattr(transformers, auto)
    model, info, said = load(kind, tmp_path)
    stock, stock_info = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert type(model) is type(stock) and not model.training
    same(model, stock)
    assert info["missing_keys"] == stock_info["missing_keys"] == set()
    assert info["unexpected_keys"] == stock_info["unexpected_keys"] and len(said) == len(info["unexpected_keys"])
    assert model.config.to_dict() == stock.config.to_dict()


def test_a_parameter_that_transformers_computes_is_computed_by_it(tmp_path):
    """Fails if a conversion is left out or taken for stacking: q and k are one tensor of the file, and v is turned."""
    model = saved(tmp_path, "LlamaForCausalLM", num_key_value_heads=2)
    tensors = dict(model.state_dict())
    for layer in range(2):
        at = f"model.layers.{layer}.self_attn"
        both = [tensors.pop(f"{at}.{which}_proj.weight") for which in "qk"]
        tensors[f"{at}.both.weight"] = torch.cat(both).contiguous()
        tensors[f"{at}.turned.weight"] = tensors.pop(f"{at}.v_proj.weight").t().contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    halves = ["self_attn.q_proj.weight", "self_attn.k_proj.weight"]
    table = [
        WeightConverter("self_attn.both.weight", halves, operations=[Chunk(dim=0)]),
        WeightConverter("self_attn.turned.weight", "self_attn.v_proj.weight", operations=[Transpose(0, 1)]),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained, "get_model_conversion_mapping", lambda model, mapping: table)
        again = pretrained.from_pretrained(transformers.LlamaForCausalLM, tmp_path)
    zero_core.shard(again)
    same(again, model)


@pytest.mark.advice("Train the model before you use it")
def test_a_missing_head_is_initialised_and_warned_about(tmp_path):
    """Fails if a head keeps no values, values of another distribution than transformers', or is not warned about."""
    saved(tmp_path, "LlamaForCausalLM", initializer_range=0.5)
    kind = transformers.AutoModelForSequenceClassification
    torch.manual_seed(0)
    model, info, said = load(kind, tmp_path, num_labels=50)
    stock, stock_info = kind.from_pretrained(tmp_path, num_labels=50, output_loading_info=True)
    same(model, stock, but=["score.weight"])
    assert model.state_dict()["score.weight"].std().item() == pytest.approx(0.5, rel=0.1)
    assert info["missing_keys"] == stock_info["missing_keys"] == {"score.weight"}
    assert info["unexpected_keys"] == stock_info["unexpected_keys"] == {"lm_head.weight"}
    assert len(said) == 2 and "1 weights of LlamaForSequenceClassification" in said[0] and "lm_head.weight" in said[1]
    optimizer = zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    given = {"input_ids": torch.arange(8).view(1, 8), "labels": torch.tensor([3])}
    losses = [kit.step(optimizer, model(**given).loss).item() for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.advice("give a floating-point torch.dtype, its name, or 'auto'")
def test_the_dtype_is_the_files_the_configs_or_the_one_given(tmp_path):
    """Fails if values are rounded that should not be, or modules that a class keeps in fp32 are not."""
    saved(tmp_path, "T5ForConditionalGeneration").to(torch.bfloat16).save_pretrained(tmp_path)
    kind = transformers.AutoModelForSeq2SeqLM
    for given in ("auto", torch.float32, "float16"):
        model, *_ = load(kind, tmp_path, dtype=given)
        stock = kind.from_pretrained(tmp_path, dtype=given)
        assert model.dtype == stock.dtype and model.config.dtype == stock.config.dtype
        same(model, stock)
    assert {p.dtype for p in model.parameters()} == {torch.float16, torch.float32}  # T5's wo
    mixed = saved(tmp_path, "LlamaForCausalLM").to(torch.bfloat16)
    mixed.model.norm.float()
    kind, config = transformers.AutoModelForCausalLM, tmp_path / "config.json"
    for save in (partial(zero_core.save_pretrained, mixed), mixed.save_pretrained):
        mixed.config.dtype = torch.float32
        save(tmp_path)
        assert json.loads(config.read_text())["dtype"] == "bfloat16"
    del (written := json.loads(config.read_text()))["dtype"]  # then it is that of the first tensor, in order of names
    config.write_text(json.dumps(written))
    assert load(kind, tmp_path)[0].dtype == kind.from_pretrained(tmp_path).dtype == torch.bfloat16
    with pytest.raises(zero_hf.ConfigError, match="dtype='int': give a floating-point torch.dtype"):
        zero_hf.from_pretrained(kind, tmp_path, dtype="int")


def test_wrong_shapes_are_refused_or_initialised(tmp_path):
    """Fails if a slice of another shape's tensor is read as this one's."""
    saved(tmp_path, "LlamaForCausalLM")
    kind = transformers.AutoModelForCausalLM
    told = r"embed_tokens.weight: file \(64, 16\), model \(65, 16\).* Give the config that fits. Or pass ignore_mism"
    with pytest.raises(ZeroError, match=told):
        zero_hf.from_pretrained(kind, tmp_path, vocab_size=65)
    model, info, said = load(kind, tmp_path, vocab_size=65, ignore_mismatched_sizes=True)
    stock = kind.from_pretrained(tmp_path, vocab_size=65, ignore_mismatched_sizes=True)
    same(model, stock, but=["model.embed_tokens.weight", "lm_head.weight"])
    assert {name for name, *_ in info["mismatched_keys"]} == {"model.embed_tokens.weight", "lm_head.weight"} and said
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    same(load(kind, tmp_path, config=config)[0], kind.from_pretrained(tmp_path))


def test_two_values_for_tied_weights_are_refused(tmp_path):
    """Fails if one of two different tensors is silently dropped."""
    saved(tmp_path, "LlamaForCausalLM")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    kind = transformers.AutoModelForCausalLM
    with pytest.raises(Exception, match="different values for .*pass tie_word_embeddings=False"):
        zero_hf.from_pretrained(kind, tmp_path)
    same(load(kind, tmp_path, tie_word_embeddings=False)[0], kind.from_pretrained(tmp_path, tie_word_embeddings=False))


def test_generation_settings_and_arguments_of_the_class_are_taken(tmp_path):
    """Fails if generation_config.json, a config given or attn_implementation is not read.

    Nor is a model quantised whose weights transformers read from a GGUF file.
    """
    saved(tmp_path, "LlamaForCausalLM")
    (tmp_path / "generation_config.json").write_text(json.dumps({"max_new_tokens": 7}))
    config = transformers.AutoConfig.from_pretrained(tmp_path, rms_norm_eps=0.25)
    kind = transformers.AutoModelForCausalLM
    config.quantization_config = {"quant_method": "gguf"}
    model = zero_hf.from_pretrained(kind, tmp_path, config=config, attn_implementation="eager")
    assert not hasattr(model.config, "quantization_config")
    assert model.generation_config.max_new_tokens == 7 and model.config.rms_norm_eps == 0.25
    assert model.config._attn_implementation == "eager" and model.name_or_path == str(tmp_path)


def test_what_cannot_be_read_in_slices_is_refused_with_the_way_out(tmp_path):
    """Fails if every rank reads a whole model without saying so."""
    kind = transformers.AutoModelForCausalLM
    convert = r"Convert the model once: call AutoModelForCausalLM.from_pretrained\(...\) of transformers, and save"
    for given, options, said in (
        ("gpt2", {}, "not a local folder: fetch it with huggingface_hub.snapshot_download"),
        (tmp_path / "a.gguf", {}, convert),
        (tmp_path, {"gguf_file": "b.gguf"}, convert),
        (tmp_path, {"device_map": "auto"}, r"from_pretrained\(device_map=...\): .* Leave device_map= out"),
        (
            tmp_path,
            {"distributed_config": {"tp_plan": "auto"}},
            "itself. Leave distributed_config= out",
        ),
        (tmp_path, {}, rf"must hold config.json and \*.safetensors, .*{convert}"),
    ):
        with pytest.raises(zero_hf.ConfigError, match=said):
            zero_hf.from_pretrained(kind, given, **options)


def _reads(folder, zero):
    """What one rank reads to shard a model: the largest piece, and all of them; and a loss."""
    read, found = Reader.read, []

    def counted(self, entry, start, stop):
        found.append(stop - start)
        return read(self, entry, start, stop)

    Reader.read = counted
    try:
        model = zero_hf.from_pretrained(transformers.AutoModelForCausalLM, folder)
        before = sum(found)
        run = zero_hf.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), ZeroConfig.of(zero))
    finally:
        Reader.read = read
    tokens = torch.arange(8).view(1, 8)
    loss = model(input_ids=tokens, labels=tokens).loss.item()
    run.close()
    return before, max(found), sum(found), loss


@pytest.mark.parametrize("zero", [{}, {"offload": "host"}])
def test_a_rank_reads_its_slices_and_nothing_else(ranks, tmp_path, zero):
    """Fails if any rank reads a whole parameter that is cut over two, or the model more than once."""
    model = saved(tmp_path, "LlamaForCausalLM", num_hidden_layers=3)
    numel = sum(p.numel() for p in model.parameters())
    largest = max(p.numel() for p in model.parameters())
    tokens = torch.arange(8).view(1, 8)
    expected = model.eval()(input_ids=tokens, labels=tokens).loss.item()
    found = ranks(2).run(_reads, str(tmp_path), zero)
    for before, piece, total, loss in found:
        assert before == 0 and piece <= largest and total <= math.ceil(numel / 2) + 64
        assert loss == pytest.approx(expected, rel=1e-5)
    assert sum(total for _, _, total, _ in found) == numel


def _train(folder, ours):
    kind = transformers.AutoModelForCausalLM
    with launched():
        model = zero_hf.from_pretrained(kind, folder) if ours else kind.from_pretrained(folder)
        script = Script({"offload": "host"} if ours else None, model=model.train())
        losses = script.train()
        script.accelerator.free_memory()
    return losses


def test_an_accelerator_trains_it_as_stock_trains_what_transformers_loads(ranks, tmp_path):
    """Fails if prepare moves, reads or initialises a model without weights before it shards it."""
    saved(tmp_path, "LlamaForCausalLM")
    stock = ranks(2).run(_train, str(tmp_path), False)
    assert ranks(2).run(_train, str(tmp_path), True)[0] == pytest.approx(stock[0], rel=1e-5)


@pytest.mark.promise("from-pretrained-experts")
@pytest.mark.parametrize("stacked", [True, False])
def test_from_pretrained_reads_one_group_of_experts_at_a_time(tmp_path, monkeypatch, stacked):
    """stacked: files hold the stacks, as zero_core writes them; else each expert apart, as transformers does."""
    from transformers import AutoModelForCausalLM

    stock = mixtures.qwen()
    zero_core.save_pretrained(stock, tmp_path) if stacked else stock.save_pretrained(tmp_path)
    values, pieces = [], []
    for kind, sizes in ((FileValues, values), (Reader, pieces)):
        read = kind.read

        def counting(self, *given, read=read, sizes=sizes):
            sizes.append(given[-1] - given[-2])
            return read(self, *given)

        monkeypatch.setattr(kind, "read", counting)
    model = zero_hf.from_pretrained(AutoModelForCausalLM, tmp_path, attn_implementation="eager")
    assert not values and not pieces
    run = zero_hf.shard(model, adamw(model.parameters()), zero_hf.ZeroConfig(offload="host", expert_bytes=GROUP))
    assert run.plan.store.held == run.store.describe().held
    stack = stock.get_parameter(f"{STACKS[0]}.gate_up_proj")
    assert len(grouped(model)) == 8
    assert max(values) == stack.numel() // 4
    assert sum(pieces) == sum(p.numel() for p in stock.parameters())  # each value once
    with zero_core.gathered(model):
        assert all(map(torch.equal, model.parameters(), stock.parameters()))
    run.close()
