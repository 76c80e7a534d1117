"""The table of DeepSpeed's keys: which are mapped, needless or refused, and what values they take. Data, and checks.

Written for DeepSpeed 0.19.8; keys of earlier versions that it has removed are in the table, too. What a mapped key
becomes is in `translation`; the parameters of optimizers and schedules are in `optimizers` and `schedules`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["KEYS", "REMOVED", "RENAMED", "SECTIONS", "Key", "flag", "nearest", "number", "numbers", "one_of", "whole"]

Check = Callable[[Any], Any]


def whole(least: int = 0, *, exponent: bool = True) -> Check:
    """Takes an integer of at least `least`. exponent: also 5e8, which JSON reads as a float."""

    def check(value: Any) -> int:
        if isinstance(value, float) and math.isfinite(value) and value == int(value):
            if not exponent:
                raise ValueError(f"{value!r} is a float: write {int(value)}, without a point or an exponent")
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{value!r} is no whole number of at least {least}")
        return value

    return check


def number(least: float = 0.0, most: float = math.inf) -> Check:
    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
            limits = f" of at least {least:g}" if most == math.inf else f" from {least:g} to {most:g}"
            raise ValueError(f"{value!r} is no number" + (limits if least > -math.inf else ""))
        if not math.isfinite(value):
            raise ValueError(f"{value!r} is not finite")
        return value

    return check


def numbers(count: int | None = None) -> Check:
    """Takes a list of numbers. count: how many; None: one number will do, too, as will one for each group."""

    def check(value: Any) -> Any:
        if count is None and not isinstance(value, (list, tuple)):
            return number(-math.inf)(value)
        if not isinstance(value, (list, tuple)) or count is not None and len(value) != count:
            raise ValueError(f"{value!r} is no list of {count or 'some'} numbers")
        return tuple(number(-math.inf)(item) for item in value)

    return check


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def one_of(*allowed: Any) -> Check:
    def check(value: Any) -> Any:
        wanted = value.lower() if isinstance(value, str) else value
        if wanted not in allowed or isinstance(wanted, bool) != any(isinstance(a, bool) for a in allowed):
            raise ValueError(f"{value!r} is none of {', '.join(map(repr, allowed))}")
        return wanted

    return check


def anything(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Key:
    """What becomes of one key of DeepSpeed's.

    kind: "mapped", "needless" or "refused". takes: returns a value as it is meant, or raises ValueError. remark: why it
    is needless, or why it is refused and what to write instead. default: DeepSpeed's own. off: says of a refused key's
    value that it asks for nothing. inside: False where the value is a section that nobody looks into.
    """

    kind: str
    takes: Check
    remark: str = ""
    default: Any = None
    off: Callable[[Any], bool] = lambda value: not value


def mapped(takes: Check, default: Any = None, remark: str = "") -> Key:
    return Key("mapped", takes, remark, default)


def needless(takes: Check, remark: str) -> Key:
    return Key("needless", takes, remark)


def refused(takes: Check, remark: str, off: Callable[[Any], bool] | None = None) -> Key:
    return Key("refused", takes, remark) if off is None else Key("refused", takes, remark, off=off)


KEYS: dict[str, Key] = {
    "train_batch_size": mapped(whole(1, exponent=False)),
    "train_micro_batch_size_per_gpu": mapped(whole(1, exponent=False)),
    "gradient_accumulation_steps": mapped(whole(1, exponent=False)),
    "gradient_clipping": mapped(number(), 1.0),
    "zero_optimization.stage": mapped(one_of(0, 1, 2, 3), 0),
    "zero_optimization.offload_optimizer.device": mapped(one_of("none", "cpu", "nvme"), "none"),
    "zero_optimization.offload_optimizer.nvme_path": mapped(text),
    "zero_optimization.offload_param.device": mapped(one_of("none", "cpu", "nvme"), "none"),
    "zero_optimization.offload_param.nvme_path": mapped(text),
    "bf16.enabled": mapped(flag, False),
    "fp16.enabled": mapped(flag, False),
    "fp16.loss_scale": mapped(number(), 0),
    "fp16.initial_scale_power": mapped(whole(), 16),
    "fp16.loss_scale_window": mapped(whole(1), 1000),
    "fp16.hysteresis": mapped(whole(1), 2),
    "fp16.consecutive_hysteresis": mapped(flag, False),
    "fp16.min_loss_scale": mapped(whole(1), 1),
    "optimizer.type": mapped(text),
    "scheduler.type": mapped(text),
}
RENAMED: dict[str, str] = {"bfloat16.enabled": "bf16.enabled"}
REMOVED: frozenset[str] = frozenset()
SECTIONS = frozenset(key.rpartition(".")[0] for key in KEYS if "." in key)


def nearest(name: str, known: Iterable[str]) -> str | None:
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None
