"""Loads the pretrained model of a run: its folder, its tokenizer, and its weights, with adapters beside them.

Weights are read slice by slice when the model is sharded, see zero_hf.from_pretrained. Two adapters need them earlier,
on every rank: adapter=qlora reads all but stacked experts layer by layer, and adapter.dora reads the whole model. Owns
no data and no trainer.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

import zero_core
from zero_train.errors import told
from zero_train.model import dtypes
from zero_train.schema import Config

TOKENIZERS = ("tokenizer*", "vocab.*", "merges.txt", "spiece.model", "sentencepiece*", "*.tiktoken", "tekken.json")


def tokenizer_files(folder: Path) -> list[Path]:
    """Returns the files of the folder's tokenizer."""
    return sorted({file for pattern in TOKENIZERS for file in folder.glob(pattern)})


def tokenizer_digest(folder: Path) -> str:
    """Returns a text that changes if a file of the folder's tokenizer does, or the library that reads it."""
    import transformers

    hashed = hashlib.sha256(transformers.__version__.encode())
    for file in tokenizer_files(folder):
        hashed.update(file.name.encode() + file.read_bytes())
    return hashed.hexdigest()


def tokenizer_of(folder: Path) -> Any:
    """Loads the tokenizer of a folder. Raises ConfigError if it has none."""
    from transformers import AutoTokenizer

    with told(f"model.path={folder} has no tokenizer: ", OSError, ValueError, KeyError):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def base(folder: Path, config: Config) -> nn.Module:
    """Returns the model of a folder, whose weights are read when it is sharded. In a dry run they need not be there.

    Raises:
        ConfigError: it is not a causal language model, or its weights cannot be read.
    """
    import transformers

    import zero_hf

    transformers.logging.set_verbosity_error()
    scores = config.task.kind == "reward"
    auto = transformers.AutoModelForSequenceClassification if scores else transformers.AutoModelForCausalLM
    one: dict[str, Any] = {"num_labels": 1} if scores else {}
    quantised = config.adapter.kind == "qlora"
    dtype = dtypes.DTYPES[config.precision.parameters] if quantised else torch.float32
    torch.manual_seed(config.run.seed)
    with told(f"model.path={folder}: ", zero_core.ZeroError, ValueError, OSError, KeyError):
        if config.run.dry:
            found = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, **one)
            with zero_core.deferred_init():
                model = auto.from_config(found, dtype=dtype)
            if quantised:
                _pack(model)
        elif quantised:
            how = transformers.BitsAndBytesConfig(  # nf4 with double quantisation (Dettmers et al. 2023)
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=dtype,
            )
            model = zero_hf.from_pretrained(auto, folder, dtype=dtype, quantization_config=how, **one)
        elif config.adapter.dora:  # whose first values are the lengths of the weights
            transformers.logging.disable_progress_bar()
            model = auto.from_pretrained(folder, dtype=torch.float32, local_files_only=True, **one)
        else:
            model = zero_hf.from_pretrained(auto, folder, dtype=torch.float32, **one)
    model.config.use_cache = False
    return cast(nn.Module, model)


def _pack(model: nn.Module) -> None:
    """Gives linear layers except the head, and stacks of experts, 4-bit weights without memory, for a plan."""
    from zero_hf.weights_4bit import pack_experts

    pack_experts(model)
    head = cast(Any, model).get_output_embeddings() or getattr(model, "score", None)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not head:
            numel = module.weight.numel()
            blocks = -(-numel // 64)
            packed = nn.Parameter(_none(-(-numel // 2), 1), requires_grad=False)
            packed.quant_state = SimpleNamespace(  # type: ignore[attr-defined]
                absmax=_none(blocks),
                offset=_none(dtype=torch.float32),
                state2=SimpleNamespace(absmax=_none(-(-blocks // 256), dtype=torch.float32)),
            )
            module.weight = packed


def _none(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _train_head(model: nn.Module) -> None:
    """Trains the head of a reward model itself, not PEFT's copy of it, which has no values where the head has none."""
    from peft.utils.other import ModulesToSaveWrapper

    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            module.modules_to_save["default"] = module.original_module.requires_grad_()
            module.original_module = nn.Identity()


def build(folder: Path, config: Config) -> nn.Module:
    """Returns the model to train, with its adapters. Raises ConfigError as `base` does, and for unknown targets."""
    model: Any = base(folder, config)
    adapter = config.adapter
    if adapter.kind != "none":
        import peft

        given = adapter.targets
        named = not isinstance(given, str) or (given != "all-linear" and re.fullmatch(r"[\w.]+", given))
        texts = [given] if isinstance(given, str) else list(given)
        wanted = peft.LoraConfig(
            r=adapter.rank,
            lora_alpha=cast(int, adapter.alpha),  # any number will do
            lora_dropout=adapter.dropout,
            target_modules=texts if named else given,  # PEFT takes a text as a pattern
            use_rslora=adapter.rslora,
            use_dora=adapter.dora,
            task_type="SEQ_CLS" if config.task.kind == "reward" else "CAUSAL_LM",
        )
        torch.manual_seed(config.run.seed)
        with told(f"adapter.targets={adapter.targets}: ", ValueError):
            # Where the base has no memory yet, adapters have none: zero-core draws their first values, each by itself.
            plain = adapter.kind == "lora" and not adapter.dora
            with zero_core.deferred_init() if config.run.dry or plain else nullcontext():
                model = peft.get_peft_model(model, wanted)
            if config.run.dry or not adapter.dora:
                _train_head(model)
        # TRL rounds the adapters of a model with this mark to bf16. Here they have the format of `precision`.
        model.get_base_model().is_loaded_in_4bit = False
    return cast(nn.Module, model.train())
