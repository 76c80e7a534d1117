"""Goes through a DeepSpeed JSON once: checks each key, resolves "auto", and records a row. Does not know ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from . import optimizers
from .keys import KEYS, RENAMED, SECTIONS, Key, nearest, needless
from .schedules import params_of

__all__ = ["Auto", "Reading", "Row"]

_ABSENT: Any = object()
_ARGUMENTS = {
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size",),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("max_grad_norm",),
    "optimizer.params.lr": ("learning_rate",),
    "optimizer.params.betas": ("adam_beta1", "adam_beta2"),
    "optimizer.params.eps": ("adam_epsilon",),
    "optimizer.params.weight_decay": ("weight_decay",),
    "scheduler.params.warmup_max_lr": ("learning_rate",),
    "fp16.enabled": ("fp16", "fp16_full_eval"),
    "bf16.enabled": ("bf16", "bf16_full_eval"),
}


@dataclass(frozen=True)
class Row:
    """One key of the file. kind: "mapped", "needless" or "refused". ours: its name here, empty unless mapped."""

    key: str
    value: Any
    ours: str
    kind: str
    remark: str = ""


class Auto:
    """Resolves "auto" as transformers does, and compares other values with the TrainingArguments."""

    def __init__(self, arguments: Any, model: Any, ranks: int, steps: int | None) -> None:
        self.arguments = args = arguments
        if steps is None and args is not None and args.max_steps > 0:
            steps = args.max_steps
        # By key, the value, and the name of the argument with which a given one must agree; None: with none.
        self._known: dict[str, tuple[Any, str | None]] = {}
        if (hidden := _hidden_size(model)) is not None:
            self._known["zero_optimization.stage3_prefetch_bucket_size"] = int(0.9 * hidden * hidden), None
        if steps is not None:
            self._known["scheduler.params.total_num_steps"] = steps, "num_training_steps (calculated)"
        if args is None:
            return
        for key, names in _ARGUMENTS.items():
            values = tuple(getattr(args, name) for name in names)
            found = any(values) if key.endswith(".enabled") else values[0] if len(values) == 1 else values
            self._known[key] = found, ("|" if key.endswith(".enabled") else "+").join(names)
        rows = ranks * args.per_device_train_batch_size * args.gradient_accumulation_steps
        self._known["train_batch_size"] = rows, "train_batch_size (calculated)"
        self._known["scheduler.params.warmup_min_lr"] = 0.0, None
        if steps is not None or args.warmup_steps >= 1:
            warmup = max(1, args.get_warmup_steps(steps or 0))
            self._known["scheduler.params.warmup_num_steps"] = warmup, "warmup_steps"

    def value(self, key: str) -> Any:
        return self._known.get(key, (_ABSENT, None))[0]

    def contradicts(self, key: str, value: Any) -> str | None:
        """Says which argument has another value; None: none has."""
        wanted, name = self._known.get(key, (_ABSENT, None))
        given = tuple(value) if isinstance(value, list) else value
        if name is None or wanted is _ABSENT or given == wanted:
            return None
        return f'the TrainingArguments have {name}={wanted!r}: make them agree, or write "auto"'

    def unresolved(self, key: str) -> str:
        if self.arguments is None:
            return 'nothing resolves "auto": pass arguments= to from_deepspeed, or write a value'
        if "num_steps" in key:
            return (
                'nothing resolves "auto": pass num_training_steps= to from_deepspeed, or give the arguments max_steps'
            )
        return 'nothing resolves "auto": write a value'


def _hidden_size(model: Any) -> int | None:
    config = getattr(model, "config", model)
    for found in (config, getattr(config, "text_config", None)):
        size = getattr(found, "hidden_size", None) or max(getattr(found, "hidden_sizes", None) or [0])
        if size:
            return int(size)
    return None


class Reading:
    """The keys of a file. rows: by the key as it is written. values: of mapped keys, by the name they have now."""

    def __init__(self, given: Mapping[str, Any], auto: Auto) -> None:
        self.auto = auto
        self.rows: dict[str, Row] = {}
        self.values: dict[str, Any] = {}
        self._written: dict[str, str] = {}  # the name that a key has now -> the one in the file
        self._raw: dict[str, Any] = {}
        self._keys = dict(KEYS)
        for section, params_of_type in (("optimizer", optimizers.params_of), ("scheduler", params_of)):
            found = given.get(section)
            found = found if isinstance(found, Mapping) else {}
            params = params_of_type(str(found.get("type")))
            if params is None:  # the parameters of a refused type are not known
                names = found.get("params")
                names = names if isinstance(names, Mapping) else ()
                params = dict.fromkeys(names, needless(f"the {section} is refused"))
            self._keys |= {f"{section}.params.{name}": key for name, key in params.items()}
        for written, value in _flat("", given):
            self._raw[written] = value
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
        empty = value is None or value == {}
        if found is None or written in SECTIONS and (empty or not isinstance(value, bool)):
            if written in SECTIONS and empty:
                self._say(written, "needless", "it is empty")
            else:
                self._say(written, "refused", self._unknown(written))
            return
        if key in self._written:
            self.rows[written] = Row(written, value, "", "refused", f"{self._written[key]} says the same: keep one")
            return
        self._written[key] = written
        if meanings and isinstance(value, bool):
            value = meanings[value]
        elif meanings:
            self._say(key, "refused", f"{value!r} is neither true nor false")
            return
        if value is None:
            self._say(key, "needless", "null asks for DeepSpeed's default")
            return
        self._take(key, value, found)

    def _take(self, key: str, value: Any, found: Key) -> None:
        if value == "auto":
            value = self.auto.value(key)
            value = found.default if value is _ABSENT else value
            if value is None:
                if found.kind == "mapped":
                    self._say(key, "refused", self.auto.unresolved(key))
                else:
                    self._say(key, "needless", found.remark if found.kind == "needless" else "it asks for nothing")
                return
        elif (other := self.auto.contradicts(key, value)) is not None:
            self._say(key, "refused", other)
            return
        try:
            value = found.takes(value)
        except ValueError as error:
            self._say(key, "refused", str(error))
            return
        if found.kind == "refused" and found.off(value):
            self._say(key, "needless", "it asks for nothing")
            return
        self._say(key, found.kind, found.remark)
        if found.kind == "mapped":
            self.values[key] = value

    def _unknown(self, key: str) -> str:
        if key in SECTIONS:
            return "it is a section: give an object of keys"
        section = key.partition(".params.")[0]
        if section in ("optimizer", "scheduler") and section != key:
            start = f"{section}.params."
            close = nearest(key, (name for name in self._keys if name.startswith(start)))
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
