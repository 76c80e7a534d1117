"""Defines `Init` and `GatheredParameters`, as deepspeed.zero has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from torch import Tensor, nn

import zero_core
from zero_core.errors import ConfigError

__all__ = ["GatheredParameters", "Init"]


def Init(module: nn.Module | None = None, *, enabled: bool = True, **others: Any) -> AbstractContextManager[Any]:
    """A `with` block in which a model is built without memory for its parameters; initialize() makes them in shards.

    DeepSpeed's other arguments are ignored, because initialize() reads the same settings from the JSON. Raises
    ConfigError for mpu, and for `module`, a model that is built already: initialize() shards it as it is.
    """
    if module is not None:
        raise ConfigError("zero.Init(module=...): this model is built. Leave zero.Init out; initialize() shards it")
    if others.get("mpu") is not None:
        raise ConfigError("mpu= is not supported, because all ranks are data parallel: leave mpu= out")
    return zero_core.deferred_init() if enabled else nullcontext()


class _Discarded(Exception):
    pass


@contextmanager
def GatheredParameters(
    params: Tensor | nn.Module | Iterable[Any],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Gathers the parameters inside the `with` block. modifier_rank=0 keeps rank 0's writes, None discards all writes.

    params: parameters, or a module with all of its own. Those that are not sharded are left as they are. Collective.
    Raises ConfigError for another modifier_rank.
    """
    if modifier_rank not in (None, 0):
        raise ConfigError(f"modifier_rank={modifier_rank}: only rank 0's writes are kept. Write with modifier_rank=0")
    given = [params] if isinstance(params, Tensor) else params.parameters() if isinstance(params, nn.Module) else params
    given = list(given)
    if enabled and modifier_rank is not None and any(isinstance(p, Tensor) and p.is_meta for p in given):
        raise ConfigError(
            "GatheredParameters before initialize(): parameters built in zero.Init have no values yet. Load values "
            "after initialize(), or build the model with zero_hf.from_pretrained"
        )
    sharded = [p for p in given if isinstance(p, nn.Parameter) and "_zero_home" in p.__dict__]
    if not (enabled and sharded):
        yield
        return
    with suppress(_Discarded), zero_core.gathered(nn.ParameterList(sharded)):
        yield
        if modifier_rank is None:
            raise _Discarded
