"""The two errors that the app prints without a traceback: exit code 2 for the configuration, 1 for a failed run."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ConfigError(ValueError):
    """A configuration that cannot be run: the fact, the values, and the key to change."""


class RunError(RuntimeError):
    """Training that began and could not go on: what failed, where, and what is left."""


def suggestion(word: str, known: Iterable[str]) -> str:
    """`did you mean 'steps'?` for the nearest of `known`, or an empty string where none is near."""
    near = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'?" if near else ""


def choices(key: str, value: object, allowed: Iterable[object]) -> ConfigError:
    """The error for a `key` whose `value` is not one of `allowed`."""
    names = [str(item) for item in allowed]
    hint = suggestion(str(value), names)
    return ConfigError(
        f"{key}={value} does not exist; {hint + ' ' if hint else ''}choose {key} from {', '.join(names)}"
    )
