"""Builds the architectures that a run can name, from `transformers`, with random weights, and samples text of them.

Adding an architecture takes a row of ARCHITECTURES, its sizes in `_from_sizes`, and a file in conf/model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from zero_train.errors import ConfigError, choices, told
from zero_train.model import folders
from zero_train.schema import ModelConfig, RunConfig
from zero_train.settings import extras

CONTEXT_BYTES = 128  # context of each draw, at most: enough to show progress, and cheap without a cache
ARCHITECTURES = {"llama": "llama", "gpt2": "gpt2", "moe": "mixtral"}  # model.kind, and transformers' model_type


def build(config: ModelConfig, sequence_length: int, *, as_bytes: bool | None = False) -> nn.Module:
    """Returns the causal language model that `config` describes. Call it under `zero_core.deferred_init`.

    as_bytes: True accepts a pretrained model whose token numbers are not byte values. None: a tokenizer reads the text.

    Raises:
        ConfigError: the sizes do not fit together, the kind does not exist, `transformers` does not load, or a
            pretrained model has a vocabulary other than bytes.
    """
    if config.kind not in (*ARCHITECTURES, "hf"):
        raise choices("model", config.kind, (*ARCHITECTURES, "hf"))
    extras.loaded("transformers").logging.set_verbosity_error()
    if config.kind == "hf":
        model = _pretrained(config)
        _byte_level(Path(str(config.path)), model.config.get_text_config().vocab_size, as_bytes)
    else:
        model = _from_sizes(config, sequence_length)
        _without_masks(model)
    model.config.use_cache = False
    return cast(nn.Module, model)


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Returns the fp32 scores of the next byte, (rows, length, vocabulary), for int64 tokens (rows, length)."""
    scores: Tensor = model(input_ids=tokens, use_cache=False).logits
    return scores.float()


@torch.no_grad()
def sample(
    model: nn.Module,
    run: RunConfig,
    context: int,
    device: torch.device,
    stop: Callable[[], bool] = lambda: False,
    tokenizer: Any = None,
) -> str:
    """Returns run.sample_prompt followed by up to run.sample_bytes bytes, as text. `stop` ends it early. Collective.

    The text is the same on every rank, because the draw has its own generator. Bytes that are not UTF-8 become
    replacement marks. The model sees `context` bytes at most. With a tokenizer of transformers, counts are in tokens.
    """
    was_training = model.training
    model.eval()
    dice = torch.Generator().manual_seed(run.seed)
    prompt = run.sample_prompt or "\n"
    text = list(prompt.encode()) if tokenizer is None else tokenizer.encode(prompt, add_special_tokens=False)
    known = 256 if tokenizer is None else len(tokenizer)
    for _ in range(run.sample_bytes):
        if stop():
            break
        tokens = torch.tensor([text[-min(context, CONTEXT_BYTES) :]], device=device)
        scores = logits(model, tokens)[0, -1, :known].cpu()
        if run.sample_temperature > 0:
            text.append(int(torch.multinomial((scores / run.sample_temperature).softmax(-1), 1, generator=dice)))
        else:
            text.append(int(scores.argmax()))
    model.train(was_training)
    return bytes(text).decode(errors="replace") if tokenizer is None else str(tokenizer.decode(text))


def check_vocabulary(model: Any, config: ModelConfig, tokens: int) -> None:
    """Raises ConfigError if the model has fewer embeddings than the tokenizer has tokens."""
    vocabulary = model.config.get_text_config().vocab_size
    if vocabulary < tokens:
        key = f"model.path={config.path} has" if config.kind == "hf" else f"model.vocab_size={vocabulary} gives"
        way_out = "leave data.tokenizer out or change it" if config.kind == "hf" else f"set model.vocab_size={tokens}"
        raise ConfigError(f"{key} {vocabulary} embeddings, fewer than the tokenizer's {tokens} tokens; {way_out}")


def numel(model: nn.Module) -> int:
    """Returns the number of the model's parameters. A linear layer with packed bytes counts its unpacked matrix."""
    packed = [m for m in model.modules() if isinstance(m, nn.Linear) and not m.weight.is_floating_point()]
    hidden = sum(m.in_features * m.out_features - m.weight.numel() for m in packed)
    return hidden + sum(p.numel() for p in model.parameters())


def _from_sizes(config: ModelConfig, sequence_length: int) -> Any:
    """Builds a model of ARCHITECTURES. Raises ConfigError if the sizes do not fit together."""
    from transformers import AutoConfig, AutoModelForCausalLM

    groups, experts = config.key_value_heads or config.heads, config.experts_per_token if config.kind == "moe" else 0
    width, heads, most = config.hidden_size, config.heads, config.experts
    for wrong, why in (
        (width % (2 * heads), f"hidden_size={width} does not give model.heads={heads} heads of an even size"),
        (heads % groups, f"heads={heads} is no multiple of model.key_value_heads={groups}"),
        (experts > most, f"experts_per_token={experts} is above model.experts={most}"),
    ):
        if wrong:
            raise ConfigError(f"model.{why}; change one")
    sizes: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "max_position_embeddings": sequence_length,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if config.kind == "gpt2":
        sizes |= {"n_inner": config.intermediate_size, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    else:
        sizes["intermediate_size"] = config.intermediate_size
        sizes["num_key_value_heads"] = groups
    if config.kind == "moe":
        sizes |= {"num_local_experts": config.experts, "num_experts_per_tok": config.experts_per_token}
        sizes["sliding_window"] = None
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(ARCHITECTURES[config.kind], **sizes))


def _pretrained(config: ModelConfig) -> Any:
    """Builds the architecture of the folder `model.path`. Its weights are read once the model is sharded."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = folders.local(config.path)
    with told(f"model.path={config.path} is not a causal language model: ", ValueError, OSError, KeyError):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))


def _without_masks(model: Any) -> None:
    """Makes attention causal without a mask, which is enough where each row is one sequence.

    transformers makes no mask for an attention of this name. For "sdpa", which computes the same, it reads from the
    device in each forward whether the positions are of one sequence.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("zero_train_whole_rows", sdpa_attention_forward)
    model.set_attn_implementation("zero_train_whole_rows")


def _byte_level(folder: Path, vocabulary: int, as_bytes: bool | None) -> None:
    """Raises ConfigError if nothing says that this pretrained model's token numbers are byte values."""
    if as_bytes is not None and vocabulary != 256 and (vocabulary < 256 or not as_bytes):
        anyway = "" if vocabulary < 256 else ", or set data.as_bytes=true to train it anyway"
        raise ConfigError(
            f"model.path={folder} has a vocabulary of {vocabulary} tokens, and text without a tokenizer is fed as "
            "bytes, the tokens of a vocabulary of 256; name the model's tokenizer with data.tokenizer=FOLDER, or name "
            f"a model that was trained on bytes{anyway}"
        )
