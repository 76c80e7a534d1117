"""Each architecture: the size asked for, causal, and refused with the key where sizes do not fit."""

import pytest
import torch

from zero_train.errors import ConfigError
from zero_train.model import causal_lm
from zero_train.schema import ModelConfig


def config(kind, **values):
    return ModelConfig(kind=kind, **{"hidden_size": 32, "intermediate_size": 48, "layers": 2, "heads": 4, **values})


@pytest.mark.parametrize("kind", ["llama", "gpt2", "moe"])
def test_scores_are_causal_and_of_the_vocabularys_size(kind):
    torch.manual_seed(0)
    model = causal_lm.build(config(kind), 16).eval()
    tokens = torch.randint(0, 256, (2, 12))
    with torch.no_grad():
        scores = causal_lm.logits(model, tokens)
        tokens[:, 8:] = 0
        changed = causal_lm.logits(model, tokens)
    assert scores.shape == (2, 12, 256) and scores.dtype == torch.float32
    torch.testing.assert_close(scores[:, :8], changed[:, :8])
    assert not torch.equal(scores[:, 8:], changed[:, 8:])


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


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_size": 30}, ["model.hidden_size=30", "model.heads=4"]),
        ({"key_value_heads": 3}, ["model.heads=4", "model.key_value_heads=3"]),
        ({"kind": "lama"}, ["model=lama", "llama"]),
        ({"kind": "moe", "experts": 2, "experts_per_token": 3}, ["model.experts_per_token=3"]),
        ({"kind": "hf", "path": "/nowhere"}, ["model.path=/nowhere", "config.json"]),
        ({"kind": "hf"}, ["model.path"]),
    ],
)
def test_sizes_that_do_not_fit_name_their_keys(values, words):
    with pytest.raises(ConfigError) as caught:
        causal_lm.build(config(**{"kind": "llama", **values}), 16)
    for word in words:
        assert word in str(caught.value)


@pytest.fixture
def saved(tmp_path):
    """`saved(vocabulary, *files)`: a pretrained folder without weights."""
    from transformers import LlamaConfig

    def make(vocabulary, *files):
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        LlamaConfig(vocab_size=vocabulary, **sizes).save_pretrained(tmp_path)
        for name in files:
            (tmp_path / name).write_text("{}")
        return ModelConfig(kind="hf", path=str(tmp_path))

    return make


@pytest.mark.promise("not-bytes")
@pytest.mark.parametrize(
    ("vocabulary", "files", "words"),
    [
        (256, ["tokenizer.json", "tokenizer_config.json"], "has a tokenizer (tokenizer.json)"),
        (300, ["vocab.json", "merges.txt"], "has a tokenizer (merges.txt)"),
        (300, [], "has a vocabulary of 300"),
    ],
)
def test_a_pretrained_model_that_does_not_read_bytes_is_refused_unless_asked(saved, vocabulary, files, words):
    """Fails if a model with a tokenizer is trained on byte values in silence."""
    described = saved(vocabulary, *files)
    with pytest.raises(ConfigError) as caught:
        causal_lm.build(described, 16)
    assert words in str(caught.value) and "data.as_bytes=true" in str(caught.value)
    assert causal_lm.build(described, 16, as_bytes=True).config.vocab_size == vocabulary
