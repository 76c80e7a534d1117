"""Goes through a DeepSpeed JSON once: checks each key, resolves "auto", and records a row. Does not know ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from . import optimizers, schedules
from .keys import KEYS, RENAMED, SECTIONS, nearest, needless

__all__ = ["Known", "Reading", "Row", "known"]

Known = Mapping[str, tuple[Any, str | None]]

_ARGUMENTS = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "adam_beta1+adam_beta2",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "fp16.enabled": "fp16|fp16_full_eval",
    "bf16.enabled": "bf16|bf16_full_eval",
}


@dataclass(frozen=True)
class Row:
    """One key of the file. kind: "mapped", "needless" or "refused". ours: its name here, empty unless mapped."""

    key: str
    value: Any
    ours: str
    kind: str
    remark: str = ""


def known(arguments: Any, model: Any, ranks: int, steps: int | None) -> Known:
    """Returns what "auto" means in transformers, by key, and the argument with which another value must agree.

    Without such an argument the second is None. arguments: TrainingArguments, or None.
    """
    if steps is None and arguments is not None and arguments.max_steps > 0:
        steps = arguments.max_steps
    found: dict[str, tuple[Any, str | None]] = {}
    if (hidden := _hidden_size(model)) is not None:
        found["zero_optimization.stage3_prefetch_bucket_size"] = int(0.9 * hidden * hidden), None
    if steps is not None:
        found["scheduler.params.total_num_steps"] = steps, "num_training_steps (calculated)"
    if arguments is None:
        return found
    for key, names in _ARGUMENTS.items():
        values = tuple(getattr(arguments, name) for name in names.replace("|", "+").split("+"))
        found[key] = any(values) if "|" in names else values if "+" in names else values[0], names
    rows = ranks * arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    found["train_batch_size"] = rows, "train_batch_size (calculated)"
    found["scheduler.params.warmup_min_lr"] = 0.0, None
    if steps is not None or arguments.warmup_steps >= 1:
        warmup = max(1, arguments.get_warmup_steps(steps or 0))
        found["scheduler.params.warmup_num_steps"] = warmup, "warmup_steps"
    return found


def _hidden_size(model: Any) -> int | None:
    config = getattr(model, "config", model)
    for found in (config, getattr(config, "text_config", None)):
        size = getattr(found, "hidden_size", None) or max(getattr(found, "hidden_sizes", None) or [0])
        if size:
            return int(size)
    return None


class Reading:
    """The keys of a file. rows: by the key as it is written. values: of mapped keys, by the name they have now."""

    def __init__(self, given: Mapping[str, Any], known: Known) -> None:
        self._known = known
        self.rows: dict[str, Row] = {}
        self.values: dict[str, Any] = {}
        self._written: dict[str, str] = {}  # the name that a key has now -> the one in the file
        self._raw = dict(_flat("", given))
        self._keys = dict(KEYS)
        for section, module in (("optimizer", optimizers), ("scheduler", schedules)):
            names = [key for key in self._raw if key.startswith(f"{section}.params.")]
            params = module.params_of(str(self._raw.get(f"{section}.type")))
            if params is None:  # the parameters of a refused type are not known
                self._keys |= dict.fromkeys(names, needless(f"the {section} is refused"))
            else:
                self._keys |= {f"{section}.params.{name}": key for name, key in params.items()}
        for written, value in self._raw.items():
            self._read(written, value)

    def __contains__(self, key: str) -> bool:
        return key in self._written

    def get(self, key: str) -> Any:
        """The value of a mapped key, else DeepSpeed's default."""
        return self.values.get(key, self._keys[key].default)

    def params(self, section: str) -> dict[str, Any]:
        start = f"{section}.params."
        return {key[len(start) :]: value for key, value in self.values.items() if key.startswith(start)}

    def say(self, key: str, ours: str) -> None:
        """Names a key here."""
        written = self._written[key]
        self.rows[written] = replace(self.rows[written], ours=ours)

    def refuse(self, key: str, remark: str) -> None:
        """Refuses a key that contradicts others, or is missing. From then on it has DeepSpeed's default."""
        self.values.pop(key, None)
        self._say(key, "refused", remark)

    def _say(self, key: str, kind: str, remark: str = "") -> None:
        written = self._written.get(key, key)
        if written != key:
            remark = f"an older name of {key}" + (f": {remark}" if remark else "")
        ours = self._keys[key].ours or key.rpartition(".")[2] if kind == "mapped" else ""
        self.rows[written] = Row(written, self._raw.get(written), ours, kind, remark)

    def _read(self, written: str, value: Any) -> None:
        key, meanings = RENAMED.get(written, (written, {}))
        found = self._keys.get(key)
        if written in SECTIONS and value in (None, {}):
            return self._say(written, "needless", "it is empty")
        if found is None or written in SECTIONS and not isinstance(value, bool):
            return self._say(written, "refused", self._unknown(written))
        if key in self._written:
            self.rows[written] = Row(written, value, "", "refused", f"{self._written[key]} says the same: keep one")
            return None
        self._written[key] = written
        if meanings and value is not None:
            if not isinstance(value, bool):
                return self._say(key, "refused", f"{value!r} is not true or false")
            value = meanings[value]
        wanted, argument = self._known.get(key, (found.default, None))
        if value is None:
            return self._say(key, "needless", "null asks for DeepSpeed's default")
        if value == "auto" and wanted is None:
            way_out = 'nothing resolves "auto": write a value, or pass arguments= or num_training_steps='
            return self._say(
                key, *(("refused", way_out) if found.kind == "mapped" else ("needless", "it asks for nothing"))
            )
        if value != "auto" and argument and (tuple(value) if isinstance(value, list) else value) != wanted:
            remark = f'the TrainingArguments have {argument}={wanted!r}: make them agree, or write "auto"'
            return self._say(key, "refused", remark)
        try:
            value = found.takes(wanted if value == "auto" else value)
        except ValueError as error:
            return self._say(key, "refused", str(error))
        if found.kind == "refused" and not found.asks(value):
            return self._say(key, "needless", "it asks for nothing")
        self._say(key, found.kind, found.remark)
        if found.kind == "mapped":
            self.values[key] = value
        return None

    def _unknown(self, key: str) -> str:
        if key in SECTIONS:
            return "it is a section: give an object of keys"
        section, params, _ = key.partition(".params.")
        if params:
            close = nearest(key, (name for name in self._keys if name.startswith(f"{section}.params.")))
            what = f"it is no parameter of {self._raw.get(f'{section}.type', f'this {section}')}"
        else:
            close, what = nearest(key, (*self._keys, *RENAMED, *sorted(SECTIONS))), "DeepSpeed has no such key"
        return what + (f": did you mean {close}?" if close else ": leave it out")


def _flat(prefix: str, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in given.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key in SECTIONS:
            yield from _flat(f"{key}.", value)
        else:
            yield key, value
