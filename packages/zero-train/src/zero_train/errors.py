"""Defines the two errors that zero-train prints without a traceback, and how their messages are worded.

A `ConfigError` ends the program with exit code 2, a `RunError` with exit code 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches


class ConfigError(ValueError):
    """The configuration cannot be run. The message names the mistake, the value, and the key to change."""


class RunError(RuntimeError):
    """Training began and could not continue. The message names the failure, its place, and the results that remain."""


@contextmanager
def told(said: str, *kinds: type[Exception], way_out: str = "") -> Iterator[None]:
    """Turns an error of these kinds into a ConfigError of one line: `said`, the error's text, and the way out."""
    try:
        yield
    except ConfigError:  # a ValueError whose message is complete
        raise
    except kinds as error:
        raise ConfigError(f"{said}{' '.join(str(error).split()).rstrip('.' if way_out else '')}{way_out}") from error


def choices(key: str, value: object, allowed: Iterable[object]) -> ConfigError:
    """Returns the error for a `key` whose `value` is not one of `allowed`."""
    names = [str(item) for item in allowed]
    near = get_close_matches(str(value), names, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return ConfigError(f"{key}={value} does not exist; {hint}choose {key} from {', '.join(names)}")
