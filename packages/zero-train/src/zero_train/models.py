"""The architectures that a run can name, from `transformers`, with random weights. No sharding, no data.

Each builder is one function; adding one is a function, a row of BUILDERS and a file in conf/model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from zero_train.errors import ConfigError, choices
from zero_train.schema import ModelConfig

_TOKENIZERS = ("tokenizer*", "vocab.*", "merges.txt", "spiece.model", "sentencepiece*", "*.tiktoken", "tekken.json")


def build(
    config: ModelConfig, sequence_length: int, may_checkpoint: bool = True, *, as_bytes: bool = False
) -> nn.Module:
    """The causal language model that `config` describes; call it under `zero_core.deferred_init`.

    `may_checkpoint`: as config.checkpointing says. False: somebody else decides what is kept for backward.
    `as_bytes`: accept a pretrained model whose token numbers are not byte values.

    Raises:
        ConfigError: sizes that do not fit together, a kind that does not exist, `transformers` missing, a pretrained
            model with a tokenizer or a vocabulary of its own.
    """
    if config.kind not in BUILDERS:
        raise choices("model", config.kind, BUILDERS)
    _check(config)
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"model={config.kind} needs transformers, which is not installed ({error}); pip install 'zero-train[hf]'"
        ) from error
    transformers.logging.set_verbosity_error()
    model: Any = BUILDERS[config.kind](config, sequence_length)
    if config.kind == "hf":
        _byte_level(Path(str(config.path)), model.config.get_text_config().vocab_size, as_bytes)
    model.config.use_cache = False
    if config.checkpointing and may_checkpoint:
        _recompute(model)
    return cast(nn.Module, model)


def _recompute(model: Any) -> None:
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # the name since transformers 5
        try:
            return model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        except TypeError:
            pass  # the keyword is not settled yet: the old name still does it
    return model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """(rows, length, vocabulary) fp32 scores of the next byte, for (rows, length) int64 tokens."""
    scores: Tensor = model(input_ids=tokens, use_cache=False).logits
    return scores.float()


def _check(config: ModelConfig) -> None:
    for key in ("hidden_size", "intermediate_size", "layers", "heads", "vocab_size"):
        if getattr(config, key) < 1:
            raise ConfigError(f"model.{key}={getattr(config, key)} must be at least 1")
    if config.kind == "hf":
        return
    if config.vocab_size < 256:
        raise ConfigError(f"model.vocab_size={config.vocab_size} is too small for bytes; set model.vocab_size=256")
    if config.hidden_size % config.heads or config.hidden_size // config.heads % 2:
        raise ConfigError(
            f"model.hidden_size={config.hidden_size} is not an even multiple of model.heads={config.heads}; change one"
        )
    if config.heads % (config.key_value_heads or config.heads):
        raise ConfigError(
            f"model.heads={config.heads} is no multiple of model.key_value_heads={config.key_value_heads}; change one"
        )


def _llama(config: ModelConfig, sequence_length: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_decoder(config, sequence_length)))


def _moe(config: ModelConfig, sequence_length: int) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    if not 1 <= config.experts_per_token <= config.experts:
        raise ConfigError(
            f"model.experts_per_token={config.experts_per_token} is not between 1 and model.experts={config.experts}"
        )
    routing: dict[str, Any] = {"num_local_experts": config.experts, "num_experts_per_tok": config.experts_per_token}
    return MixtralForCausalLM(MixtralConfig(**_decoder(config, sequence_length), **routing, sliding_window=None))


def _gpt2(config: ModelConfig, sequence_length: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size,
            n_embd=config.hidden_size,
            n_inner=config.intermediate_size,
            n_layer=config.layers,
            n_head=config.heads,
            n_positions=sequence_length,
            tie_word_embeddings=config.tie_embeddings,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def _hf(config: ModelConfig, sequence_length: int) -> nn.Module:
    """The architecture of the folder `model.path`; its weights are streamed in after sharding."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(config.path or "")
    if not config.path or not (folder / "config.json").is_file():
        raise ConfigError(f"model.path={config.path} has no config.json; name a folder saved by save_pretrained")
    try:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(f"model.path={config.path} is not a causal language model: {error}") from error


def _byte_level(folder: Path, vocabulary: int, as_bytes: bool) -> None:
    """Are the token numbers of this pretrained model byte values? Raises ConfigError where nothing says so."""
    if vocabulary < 256:
        raise ConfigError(
            f"model.path={folder} has a vocabulary of {vocabulary}, too small for the 256 values of a byte; "
            "name another model"
        )
    found = sorted(name for pattern in _TOKENIZERS for name in (path.name for path in folder.glob(pattern)))
    reason = f"has a tokenizer ({found[0]})" if found else f"has a vocabulary of {vocabulary}, not of the 256 bytes"
    if (found or vocabulary != 256) and not as_bytes:
        raise ConfigError(
            f"model.path={folder} {reason}, but text is fed as bytes: its token numbers would mean something else than "
            "the model was trained on; name a model that was trained on bytes, or set data.as_bytes=true to go on"
        )


def _decoder(config: ModelConfig, sequence_length: int) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_value_heads or config.heads,
        "max_position_embeddings": max(sequence_length, 16),
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
    }


BUILDERS: dict[str, Callable[[ModelConfig, int], nn.Module]] = {"llama": _llama, "gpt2": _gpt2, "moe": _moe, "hf": _hf}
