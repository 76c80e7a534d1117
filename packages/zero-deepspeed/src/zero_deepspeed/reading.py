"""Reads a DeepSpeed JSON once: checks each key, resolves "auto", and records a row. Knows none of our settings."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from zero_core.errors import ConfigError

from . import optimizers, schedules
from .keys import KEYS, NEEDLESS, REFUSED, RENAMED, SECTIONS, asks, nearest, parameter

_TOTAL, _WARMUP = "scheduler.params.total_num_steps", "scheduler.params.warmup_num_steps"


@dataclass(frozen=True)
class Row:
    """One key of the file. kind: "mapped", "needless" or "refused". ours: its name here, empty unless mapped."""

    key: str
    value: Any
    ours: str
    kind: str
    remark: str = ""


class _Resolved(dict[str, tuple[Any, str | None]]):
    """Maps each key to its value for "auto", and to the argument that any other value must equal (None: no argument).

    transformers' own code calls these methods, which are those of its HfTrainerDeepSpeedConfig.
    """

    mismatches = ()

    def __init__(self, raw: Mapping[str, Any], arguments: Any, model: Any, steps: int | None) -> None:
        super().__init__({_TOTAL: (steps, "num_training_steps")} if steps is not None else {})
        self.config = dict(raw) if model is not None else {}  # transformers may write into it
        if arguments is None:
            return
        theirs = importlib.import_module("transformers.integrations.deepspeed").HfTrainerDeepSpeedConfig
        steps = arguments.max_steps if steps is None and arguments.max_steps > 0 else steps
        theirs.trainer_config_process(self, arguments)
        found = SimpleNamespace(config=getattr(model, "config", model))
        try:
            theirs.trainer_config_finalize(self, arguments, found, steps or 0)
        except ValueError as error:
            raise ConfigError(f"{error}") from error  # the model has no hidden size
        if steps is None:
            self.fill_only(_TOTAL, None)
            if not arguments.get_warmup_steps(0):  # it may be a share of the steps
                self.fill_only(_WARMUP, None)

    def fill_match(self, key: str, value: Any, argument: str | None = None, must_match: bool = True) -> None:
        self[key] = value, argument if must_match else None

    def fill_only(self, key: str, value: Any) -> None:
        self[key] = value, None

    def is_auto(self, key: str) -> bool:
        """Returns whether a key that is followed here is "auto". transformers asks for sizes from the hidden size."""
        return key in KEYS and self.config.get(key) == "auto"

    def is_true(self, key: str) -> bool:
        return False  # transformers calls it for its own use

    def is_zero3(self) -> bool:
        return True


class Reading:
    """The keys of a file. rows: by the key as it is written. values: of mapped keys, by the name they have now.

    arguments, model, steps: what "auto" is resolved by. Raises ConfigError where transformers cannot resolve it.
    """

    def __init__(self, given: Mapping[str, Any], arguments: Any, model: Any, steps: int | None) -> None:
        raw = dict(_flat("", given))
        self.rows: dict[str, Row] = {}
        self.values: dict[str, Any] = {}
        self._written: dict[str, str] = {}  # the name that a key has now -> the one in the file
        self._resolved = _Resolved(raw, arguments, model, steps)
        self._keys, self._refused = dict(KEYS), set[str]()
        for section, module in (("optimizer", optimizers), ("scheduler", schedules)):
            defaults = module.defaults_of(str(raw.get(f"{section}.type")))
            if defaults is None:
                self._refused.add(f"{section}.params")
            else:
                self._keys |= {f"{section}.params.{name}": parameter(each) for name, each in defaults.items()}
        for written, value in raw.items():
            key, yes = RENAMED.get(written, (written, None))
            try:
                if (first := self._written.setdefault(key, written)) != written:
                    raise ValueError(f"{first} says the same: keep one")
                meant = value if yes is None or type(value) is not bool else yes if value else KEYS[key].default
                kind, remark = self._judged(key, meant)
            except ValueError as error:
                kind, remark = "refused", str(error)
            older = "" if key == written else f"an older name of {key}"
            ours = self._keys[key].ours or key.rpartition(".")[2] if kind == "mapped" else ""
            self.rows[written] = Row(written, value, ours, kind, ": ".join(filter(None, (older, remark))))

    def get(self, key: str) -> Any:
        """The value of a mapped key, else DeepSpeed's default."""
        return self.values.get(key, self._keys[key].default)

    def params(self, section: str) -> dict[str, Any]:
        start = f"{section}.params."
        return {key[len(start) :]: value for key, value in self.values.items() if key.startswith(start)}

    def refuse(self, key: str, remark: str) -> None:
        """Refuses a key that contradicts others, or is missing. From then on it has DeepSpeed's default."""
        self.values.pop(key, None)
        written = self._written.get(key, key)
        value = self.rows[written].value if written in self.rows else None
        self.rows[written] = Row(written, value, "", "refused", remark)

    def _judged(self, key: str, value: Any) -> tuple[str, str]:
        """Returns the kind of a key and the remark, and keeps a value that is followed. Raises ValueError to refuse."""
        if value in (None, {}):
            return "needless", "it asks for DeepSpeed's default"
        if key in SECTIONS:
            raise ValueError("it is a section: give an object of keys")
        if key in NEEDLESS:
            return "needless", NEEDLESS[key]
        if key in REFUSED:
            if value != "auto" and asks(key, value):
                raise ValueError(f"not supported: leave it out{REFUSED[key]}")
            return "needless", "it asks for nothing"
        if key not in self._keys:
            if key.rpartition(".")[0] in self._refused:
                return "needless", "its type is refused"
            close = nearest(key, self._keys)
            raise ValueError("DeepSpeed has no such key: " + (f"did you mean {close}?" if close else "leave it out"))
        takes, default, _ = self._keys[key]
        wanted, argument = self._resolved.get(key, (default, None))
        if value == "auto" and wanted is None:
            raise ValueError(
                'no argument resolves "auto": write a value. Or pass from_deepspeed arguments= or num_training_steps='
            )
        if value != "auto" and argument and value != wanted:
            raise ValueError(f'the TrainingArguments have {argument}={wanted!r}: make them agree, or write "auto"')
        meant = _plain(wanted if value == "auto" else value)
        if not takes.fits(meant):
            raise ValueError(f"{value!r} is not {takes.what}")
        self.values[key] = meant
        return "mapped", ""


def _plain(value: Any) -> Any:
    """A list as a tuple, and a whole number as an integer: JSON reads 5e8 as a float."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return tuple(value) if isinstance(value, list) else value


def _flat(prefix: str, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in given.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key in SECTIONS:
            yield from _flat(f"{key}.", value)
        else:
            yield key, value
