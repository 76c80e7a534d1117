"""Small models of real architectures, their batches and their loss. Importable in spawned ranks."""

from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 96
LENGTH = 12
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # name: the class in transformers, its configuration
    "llama": ("LlamaForCausalLM", SIZES | {"intermediate_size": 56, "num_hidden_layers": 3, "num_key_value_heads": 2}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 4}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "moe": (
        "MixtralForCausalLM",
        SIZES
        | {"intermediate_size": 40, "num_hidden_layers": 2, "num_key_value_heads": 2}
        | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        | {"dropout_rate": 0.0, "decoder_start_token_id": 0},
    ),
    "bert": (
        "BertForMaskedLM",
        SIZES
        | {"intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 32}
        | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
}


def drawn(name: str, **options: Any) -> nn.Module:
    """A model of a known architecture, from the state of torch's generator."""
    import transformers

    kind = getattr(transformers, MODELS[name][0])
    return kind(kind.config_class(**MODELS[name][1], **options))


def build(name: str, seed: int = 0, **options: Any) -> nn.Module:
    """The same seed gives the same weights."""
    torch.manual_seed(seed)
    return drawn(name, **options)


def batch(step: int, rank: int, rows: int = 2) -> Tensor:
    """(rows, LENGTH) int64: the tokens of one rank at one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(1, VOCABULARY, (rows, LENGTH), generator=generator)


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss
