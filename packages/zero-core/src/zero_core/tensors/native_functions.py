"""Gives values to functions of torch's that read memory in C++ and ask no class for its `__torch_function__`.

Owns the replaced functions, which are replaced in the whole process, and only here. Otherwise C++ would read memory
that is not there, which ends the process. Views need it for DLPack alone, because all else that torch does with them
passes its dispatcher.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.dlpack
from torch import Tensor
from torch._C import _functorch as functorch
from torch._functorch import eager_transforms, vmap

from ..active_calls import outside_transforms
from ..errors import ShardedParameterError
from .grad_proxy import HeldGradient, HeldNorm
from .parameter_home import home_of
from .sharded_parameter import Sharded
from .writeback_views import View, each_of

ABSENT = (Sharded, HeldGradient, HeldNorm)


_MOVING = ("all", "broadcast", "gather", "recv", "reduce", "scatter", "send")
_COLLECTIVES = [name for name in dir(dist.ProcessGroup) if name.strip("_").startswith(_MOVING)]


def asking(call: Callable[..., Any], kinds: Any, do: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns `call` with every argument of these classes, also in containers, replaced by `do(argument)`."""

    @functools.wraps(call)
    def asked(*args: Any, **kwargs: Any) -> Any:
        return call(*each_of(kinds, args, do), **each_of(kinds, kwargs, do))

    return asked


@outside_transforms
def values(absent: Tensor) -> Tensor:
    """Returns the values: in the graph, where one is recorded; else as a View."""
    return absent.view_as(absent)


# For each running transform, by level: each tensor without memory that it was given, its values, and their version.
_transformed: dict[int, list[tuple[Tensor, Tensor, int]]] = defaultdict(list)


def transformed(absent: Tensor) -> Tensor:
    """Returns the same as `values`, and notes their version: a transform's writes would be lost, see `unwritten`."""
    given = values(absent)
    _transformed[functorch.current_level()].append((absent, given, given._version))
    return given


def unwritten(end: Callable[[], Any]) -> Callable[[], None]:
    """Returns `end`, by which a transform of torch.func ends, with a check that raises ShardedParameterError where a
    write would be lost."""

    @functools.wraps(end)
    def ended() -> None:
        level = functorch.current_level()
        end()
        for absent, given, version in _transformed.pop(level, ()):
            if given._version != version:
                raise ShardedParameterError(
                    "under a transform of torch.func, a function wrote into a parameter of shape "
                    f"{tuple(absent.shape)} that was passed to it, and the write would be lost. Pass copies, "
                    "{name: p.detach().clone()}, and write into the parameter outside of the transform"
                )

    return ended


def refuse(tensor: Any) -> Any:
    """Raises the error of the tensor's class: writes through DLPack would be lost."""
    return tensor.__dlpack__()


def refuse_swap(parameter: Tensor) -> Any:
    """Raises ShardedParameterError: the shards would stay with the other parameter."""
    raise ShardedParameterError(
        f"torch.utils.swap_tensors of {home_of(parameter).name}, which is sharded: copy the values, p.copy_(tensor)"
    )


PLACES: list[tuple[Any, str, Any, Callable[[Any], Any]]] = [
    (torch._C.ScriptFunction, "__call__", ABSENT, values),
    (eager_transforms, "_wrap_for_grad", ABSENT, transformed),
    (vmap, "_add_batch_dim", ABSENT, values),
    *((dist.ProcessGroup, name, ABSENT, Tensor.detach) for name in _COLLECTIVES),
    (torch.utils, "swap_tensors", Sharded, refuse_swap),
    (torch, "to_dlpack", (*ABSENT, View), refuse),
    (torch.utils.dlpack, "to_dlpack", (*ABSENT, View), refuse),
]


@functools.cache
def replace_natives() -> None:
    """Replaces these functions, and keeps torch.compile from looking for the memory of sharded parameters."""
    import torch._dynamo.config

    torch._dynamo.config.nontraceable_tensor_subclasses.add(Sharded)
    for owner, name, kinds, do in PLACES:
        setattr(owner, name, asking(getattr(owner, name), kinds, do))
    for name in ("_grad_decrement_nesting", "exit_jvp_nesting"):
        setattr(eager_transforms, name, unwritten(getattr(eager_transforms, name)))
