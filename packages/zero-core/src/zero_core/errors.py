"""Defines every exception that a user's mistake can raise. Each text holds the fact, the values and the way out."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class ZeroError(RuntimeError):
    """Base of the errors that zero-core raises on purpose."""


class ConfigError(ValueError):
    """A setting of a package above that is not known, or cannot be followed. Names it, and the way out."""


class StageError(ZeroError, ValueError):
    """A stage that does not exist, or an option that this stage does not have."""


class AlreadyShardedError(ZeroError):
    """A model or an optimizer that is sharded already."""


class UnsupportedOptimizerError(ZeroError, TypeError):
    """An optimizer, or an operation on one, that sharding cannot honour."""


class PretrainedError(ZeroError):
    """Pretrained weights that do not fit the model, or files that are damaged."""


class ShardedParameterError(ZeroError):
    """An operation that a sharded parameter cannot answer: it has no memory between uses."""


class ChangedParameterError(ZeroError):
    """A parameter changed its shape, dtype or device after the model was sharded."""


class CheckpointError(ZeroError):
    """A checkpoint that is cut short, is of another model, or cannot be written."""


class CollectiveError(ZeroError):
    """A collective failed or timed out: names the unit and the collective."""


class DeferredInitError(ZeroError):
    """A parameter whose value cannot be made: on meta without a recording, or never initialised."""


class GradientError(ZeroError):
    """A gradient that cannot be used: clipped twice, edited after it left, or not finite."""


class StoreError(ZeroError):
    """A store called out of order, or after its background failed."""


def listed(names: Sequence[str], most: int = 8) -> str:
    """Names in an error: the first `most`, and how many more there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def noted(error: BaseException, text: str) -> None:
    """Adds `text` to an error that is raised as it is. Python 3.10 has no notes, and warns."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        warnings.warn(text, stacklevel=2)


@contextmanager
def reached(rank: int, size: int) -> Iterator[None]:
    """Around a collective of torch's that has no unit: its failure is a CollectiveError, and names the rank."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(
            f"rank {rank} of {size} did not reach the others: {error}. Another rank has stopped (its own "
            "error says why), or the link to its machine is cut. End all ranks, and resume from the last checkpoint"
        ) from error
