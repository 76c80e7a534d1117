"""Compares a Trainer's run with the run that left steps on disk: arguments, settings, model and data.

Not here: where the identity of a run is kept (in durable.py).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.trainer_utils import has_length

from ..config import ConfigError, ZeroConfig

_ROWS = 64  # rows compared of a data set, which may have millions
# Arguments that change no number of the training itself. A name that ends with _ is a prefix.
_FREE = (
    "output_dir run_name project trackio_ report_to disable_tqdm logging_ log_ eval_ per_device_eval_batch_size save_ "
    "hub_ push_to_hub load_best_model_at_end metric_for_best_model greater_is_better do_train do_eval do_predict "
    "resume_from_checkpoint local_rank ddp_ debug skip_memory_metrics prediction_loss_only include_for_metrics "
    "include_num_input_tokens_seen batch_eval_metrics enable_jit_checkpoint restore_callback_states_from_checkpoint "
    "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
    "dataloader_multiprocessing_context torch_empty_cache_steps"
).split()
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_PREFIXES = ("_", *(name for name in _FREE if name.endswith("_")))


def identity(trainer: Trainer, zero: ZeroConfig) -> dict[str, str]:
    """Returns the identity of a run: the values that must not change, by name, as text."""
    arguments = trainer.args.to_dict().items()
    found = {name: str(v) for name, v in arguments if name not in _FREE and not name.startswith(_PREFIXES)}
    found |= {f"zero.{name}": str(getattr(zero, name)) for name in ("param_dtype", "states", "rows", "activations")}
    if zero.tokens is not None:  # steps from before this setting existed stay valid
        found["zero.tokens"] = str(zero.tokens)
    config = getattr(trainer.model, "config", None)
    found["model"] = f"{type(trainer.model).__name__} {getattr(config, '_name_or_path', '')}".strip()
    found["train_dataset"] = digest(trainer.train_dataset)
    return found


def refuse_another(output_dir: str, before: Mapping[str, str], now: Mapping[str, str], where: str) -> None:
    """Raises ConfigError that lists the differences and says what to do. where: the files with the steps."""
    differ = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    if differ:
        listed = "; ".join(f"{n} was {before.get(n, 'not there')}, is {now.get(n, 'not there')}" for n in differ[:5])
        raise ConfigError(
            f"output_dir={output_dir} has steps of a run with other settings ({listed}). To continue that run, set "
            f"them back. To begin a new run, name another output_dir, or remove {where} and all checkpoints in "
            "output_dir"
        )


def digest(dataset: Any) -> str:
    """Returns the length of a data set and a digest of some rows; for a stream, which has no length, its class only."""
    if isinstance(dataset, IterableDataset) or not has_length(dataset):
        return type(dataset).__name__
    count = len(dataset)
    found = hashlib.blake2b(digest_size=8)
    for place in (count * i // min(_ROWS, count) for i in range(min(_ROWS, count))):
        row = _bytes(dataset[place])
        found.update(row if row == _bytes(dataset[place]) else b"drawn anew each time")
    return f"{count} rows, {found.hexdigest()}"


def _bytes(row: Any) -> bytes:
    """Returns a row as JSON: tensors and arrays by their bytes, other objects by their text without its address."""

    def said(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().reshape(-1).view(torch.uint8).numpy()
        if isinstance(value, np.ndarray) and value.dtype != object:
            return value.tobytes().hex()
        if isinstance(value, np.ndarray):
            return value.tolist()
        if isinstance(value, Mapping):
            return dict(value)
        return sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else _ADDRESS.sub("", repr(value))

    return json.dumps(row, default=said, skipkeys=True).encode()
