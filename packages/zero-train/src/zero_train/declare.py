"""Declares the keys of `schema`: their defaults, their accepted values, and lists that several files share."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from omegaconf import MISSING

TUNES = ("sft", "dpo", "reward", "kto", "grpo")  # tasks of TRL's trainers
ROW_KINDS = ("jsonl", "parquet", "csv", "datasets")  # of data: rows for a tokenizer
FORMATS = ("fp32", "bf16", "fp16")
OPTIMIZERS = {  # the keys of OptimConfig that each one takes besides lr and weight_decay
    "adamw": ("betas", "eps"),
    "adam": ("betas", "eps"),
    "lion": ("betas",),
    "adagrad": ("eps",),
    "sgd": ("momentum",),
    "muon": ("betas", "eps", "momentum", "matrix_lr", "adjust_lr", "orthogonal"),
    "own": ("target", "options", "contract"),
}
RATES = {"lion": 0.3, "adagrad": 10, "sgd": 100}  # of optim.lr to optim.base_lr; of the others 1
ADAPTER_RATES = {"none": 1, "lora": 10, "qlora": 10}  # the same, once more (Schulman et al. 2025, LoRA Without Regret)
# The largest values guard against slips, such as a rate of 1e5 for 1e-5. The planner checks memory.
COUNT, SIZE, BYTES = 10**9, 10**6, 1 << 60


def number(default: Any, **bounds: float) -> Any:
    """Declares a key's default and its bounds, which settings/checks.py enforces: at_least or above, and at_most or
    below.
    """
    made = {"default_factory": default} if callable(default) else {"default": default}
    return field(**made, metadata={"bounds": bounds})


def one_of(*allowed: object, default: Any = MISSING) -> Any:
    """Declares a key's default and all its values, which settings/checks.py enforces."""
    return field(default=default, metadata={"allowed": allowed})


def count(default: Any, most: int = COUNT) -> Any:
    """Declares a key that counts something, from 1 to `most`."""
    return number(default, at_least=1, at_most=most)


def rate(base_lr: float, optim: str, adapter: str) -> float:
    """Returns the learning rate of an optimizer and an adapter if optim.lr is not given."""
    return float(f"{base_lr * RATES.get(optim, 1) * ADAPTER_RATES.get(adapter, 1):.6g}")


def tenth(steps: int) -> int:
    """Returns the steps of warm-up if optim.warmup_steps is not given."""
    return -(-steps // 10)
