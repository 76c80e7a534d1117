"""Each architecture: the size asked for, causal, refused with the key where sizes do not fit; and precision=auto."""

import pytest
import torch

from zero_train.errors import ConfigError
from zero_train.model import causal_lm, dtypes, folders
from zero_train.run import assemble
from zero_train.schema import ModelConfig
from zero_train.settings import compose


def config(kind, **values):
    return ModelConfig(kind=kind, **{"hidden_size": 32, "intermediate_size": 48, "layers": 2, "heads": 4, **values})


@pytest.mark.promise("device-train-wait")
@pytest.mark.parametrize("kind", ["llama", "gpt2", "moe"])
def test_attention_without_masks_has_the_bits_of_transformers_own(kind, tmp_path):
    """Scores and gradients; and nothing of it is in the model's configuration."""
    made = config(kind, hidden_size=32, intermediate_size=48, layers=2, heads=4)
    torch.manual_seed(0)
    model = causal_lm.build(made, 16)
    tokens = torch.randint(256, (3, 16), generator=torch.Generator().manual_seed(1))

    def seen():
        model.zero_grad()
        scores = causal_lm.logits(model, tokens)
        scores.square().mean().backward()
        return [scores, *(p.grad.clone() for p in model.parameters())]

    assert model.config._attn_implementation != "sdpa"
    ours = seen()
    model.config.save_pretrained(tmp_path)
    assert "zero_train" not in (tmp_path / "config.json").read_text()
    model.set_attn_implementation("sdpa")
    assert all(map(torch.equal, ours, seen()))


@pytest.mark.advice("model.{}; change one")
@pytest.mark.parametrize(
    ("values", "words", "ways"),
    [
        (
            {"hidden_size": 30},
            ["model.hidden_size=30", "does not give model.heads=4 heads of an even size"],
            [{"hidden_size": 24}, {"heads": 3}],
        ),
        ({"key_value_heads": 3}, ["model.heads=4", "model.key_value_heads=3"], [{"key_value_heads": 2}, {"heads": 3}]),
        ({"kind": "lama"}, ["model=lama", "llama"], []),
        ({"kind": "moe", "experts": 2, "experts_per_token": 3}, ["model.experts_per_token=3"], [{"experts": 3}]),
        ({"kind": "moe", "experts": 1}, ["model.experts=1; change one"], [{"experts_per_token": 1}, {"experts": 2}]),
        ({"kind": "hf", "path": "/nowhere"}, ["model.path=/nowhere", "name a folder saved by save_pretrained"], []),
        ({"kind": "hf"}, ["model.path"], []),
    ],
)
def test_sizes_that_do_not_fit_name_their_keys(values, words, ways):
    sizes = {"kind": "llama", "hidden_size": 24, "vocab_size": 256} | values
    with pytest.raises(ConfigError) as caught:
        causal_lm.build(config(**sizes), 16)
    for word in words:
        assert word in str(caught.value)
    for way in ways:
        causal_lm.build(config(**sizes | way), 16)


def test_a_folder_that_an_error_asks_for_is_taken(saved, tmp_path):
    path = saved(256).path
    (tmp_path / "empty").mkdir()
    for wrong, said in (
        (str(tmp_path / "empty"), "name a folder saved by save_pretrained$"),
        ("/model", "name a folder saved by save_pretrained$"),  # which no hub has
        ("someone/model", "or download it with `hf download someone/model --local-dir FOLDER`"),
    ):
        with pytest.raises(ConfigError, match=said):
            folders.local(wrong)
    assert folders.local(path) == tmp_path
    with pytest.raises(ConfigError, match="of 100 tokens, .* or name a model that was trained on bytes$"):
        causal_lm.build(saved(100), 16)
    for words in ("data.tokenizer=x", "task=sft"):
        read = compose.compose([f"model.path={tmp_path}", "run.dir=x", "run.dry=true", words])
        assert assemble.model_of(read).config.vocab_size == 100


@pytest.mark.advice("set model.vocab_size={}", "leave data.tokenizer out")
def test_the_embeddings_are_as_many_as_the_tokens_or_the_tokenizer_is_the_models_own(saved):
    small, large = config("llama", vocab_size=256), config("llama", vocab_size=400)
    with pytest.raises(ConfigError, match="fewer than the tokenizer's 400 tokens; set model.vocab_size=400"):
        causal_lm.check_vocabulary(causal_lm.build(small, 16), small, 400)
    causal_lm.check_vocabulary(causal_lm.build(large, 16), large, 400)
    own = saved(256)
    with pytest.raises(ConfigError, match="400 tokens; leave data.tokenizer out"):
        causal_lm.check_vocabulary(causal_lm.build(own, 16), own, 400)
    causal_lm.check_vocabulary(causal_lm.build(own, 16), own, 256)


@pytest.fixture
def saved(tmp_path):
    """`saved(vocabulary)`: a pretrained folder without weights."""
    from transformers import LlamaConfig

    def make(vocabulary):
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        LlamaConfig(vocab_size=vocabulary, **sizes).save_pretrained(tmp_path)
        return ModelConfig(kind="hf", path=str(tmp_path))

    return make


@pytest.mark.advice("name the model's tokenizer with data.tokenizer=FOLDER")
@pytest.mark.promise("not-bytes")
def test_a_pretrained_model_that_does_not_read_bytes_is_refused_unless_asked(saved):
    """Fails if a model of another vocabulary is trained on byte values in silence."""
    with pytest.raises(ConfigError, match="of 300 tokens, .* trained on bytes, or set data.as_bytes=true"):
        causal_lm.build(saved(300), 16)
    assert causal_lm.build(saved(300), 16, as_bytes=True).config.vocab_size == 300


CPU, GPU = torch.device("cpu"), torch.device("cuda")


def resolved(tmp_path, device, flags, *overrides):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{flags}\n")
    composed = compose.compose(["recipe=tiny", "run.dir=x", *overrides])
    reason = dtypes.resolve(composed, device, cpuinfo)
    return composed.precision.parameters, composed.precision.states, reason


@pytest.mark.parametrize(
    ("device", "flags", "expected"),
    [
        (CPU, "flags\t\t: fpu avx512f", ("fp32", "fp32")),
        (CPU, "flags\t\t: fpu avx512_bf16", ("bf16", "split")),
        (CPU, "Features\t: fp asimd bf16", ("bf16", "split")),
        (CPU, "", ("fp32", "fp32")),
        (GPU, "flags\t\t: fpu", ("bf16", "split")),
    ],
)
def test_auto_follows_the_device(tmp_path, device, flags, expected):
    parameters, states, reason = resolved(tmp_path, device, flags)
    assert (parameters, states) == expected
    assert reason.startswith(parameters)


@pytest.mark.promise("device-bf16")
@pytest.mark.parametrize(("computes", "expected"), [(True, "bf16"), (False, "fp32")])
def test_auto_asks_the_device_whether_it_computes_in_bf16(tmp_path, monkeypatch, computes, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated=True: emulated or computes)
    assert resolved(tmp_path, GPU, "")[0] == expected
    assert resolved(tmp_path, CPU, "", "run.dry=true", "hardware.device=cuda")[0] == "bf16"  # described, not asked
