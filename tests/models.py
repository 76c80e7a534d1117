"""Small models of real architectures, their batches and their loss. Importable in spawned ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 96
LENGTH = 12


def llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        **options,
    )
    return LlamaForCausalLM(config)


def gpt2(**options: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=32,
        n_layer=3,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **options,
    )
    return GPT2LMHeadModel(config)


def moe(**options: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        **options,
    )
    return MixtralForCausalLM(config)


def t5(**options: Any) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        **options,
    )
    return T5ForConditionalGeneration(config)


def bert(**options: Any) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **options,
    )
    return BertForMaskedLM(config)


MODELS = {"llama": llama, "gpt2": gpt2, "moe": moe, "t5": t5, "bert": bert}


def build(name: str, seed: int = 0, **options: Any) -> nn.Module:
    """A model of a known architecture; the same seed gives the same weights."""
    torch.manual_seed(seed)
    return MODELS[name](**options)


def batch(step: int, rank: int, rows: int = 2) -> Tensor:
    """(rows, LENGTH) int64: the tokens of one rank at one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(1, VOCABULARY, (rows, LENGTH), generator=generator)


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss
