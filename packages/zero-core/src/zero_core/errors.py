"""Every exception a user's mistake can raise. Each text holds the fact, the values and the way out."""

from __future__ import annotations

__all__ = [
    "AlreadyShardedError",
    "ChangedParameterError",
    "CollectiveError",
    "GradientError",
    "ShardedParameterError",
    "StageError",
    "StoreError",
    "UnsupportedOptimizerError",
    "ZeroError",
]


class ZeroError(RuntimeError):
    """Base of the errors that zero-core raises on purpose."""


class StageError(ZeroError, ValueError):
    """A stage that does not exist, or an option that this stage does not have."""


class AlreadyShardedError(ZeroError):
    """A model or an optimizer that is sharded already."""


class UnsupportedOptimizerError(ZeroError, TypeError):
    """An optimizer, or an operation on one, that sharding cannot honour."""


class ShardedParameterError(ZeroError):
    """An operation that a sharded parameter cannot answer: it has no memory between uses."""


class ChangedParameterError(ZeroError):
    """A parameter changed its shape, dtype or device after the model was sharded."""


class CollectiveError(ZeroError):
    """A collective failed or timed out: names the unit and the collective."""


class GradientError(ZeroError):
    """A gradient that cannot be used: clipped twice, edited after it left, or not finite."""


class StoreError(ZeroError):
    """A store called out of order, or after its background failed."""
