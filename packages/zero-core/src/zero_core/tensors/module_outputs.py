"""Finds and hooks the tensors that a module returned, in any container or wrapper, and says whether autograd runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch as functorch

_NOT_TRACED = (
    "zero_core gathers parameters between modules, which cannot be compiled: leave fullgraph=True out, or compile the "
    "blocks one by one"
)


def in_backward() -> bool:
    """Whether autograd runs a backward on this thread now."""
    return torch._C._current_graph_task_id() != -1


def hook_outputs(output: Any, sequence: int, hook: Callable[[Tensor], Any]) -> bool:
    """Hooks every tensor of `output` that was made since autograd's count was `sequence`; others only pass through.

    Returns whether there is one.
    """
    found = False
    for tensor in tensors_of(output):
        made = tensor.grad_fn
        if made is not None and made._sequence_nr() >= sequence:
            tensor.register_hook(hook)
            found = True
    return found


def unwrapped(tensor: Tensor) -> Tensor:
    """Returns the tensor inside the wrappers of torch.func's transforms, or the tensor itself."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def outside_transforms(method: Callable[..., Any]) -> Callable[..., Any]:
    """Runs the method outside of torch.func's transforms and of inference mode: its work on memory and between ranks is
    not the user's arithmetic, and the tensors that it makes are written later."""

    @functools.wraps(method)
    def run(*args: Any, **options: Any) -> Any:
        if torch.is_inference_mode_enabled():
            with torch._C._InferenceMode(False), torch.no_grad():
                return run(*args, **options)
        if not torch._C._are_functorch_transforms_active():
            return method(*args, **options)
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

        with temporarily_clear_interpreter_stack():
            return method(*args, **options)

    return run


def tensors_of(value: Any, depth: int = 5) -> Iterator[Tensor]:
    """Yields every tensor in nested containers, dataclasses and plain objects (a cache of keys and values is one)."""
    if isinstance(value, Tensor):
        yield value
    elif depth == 0 or isinstance(value, (str, bytes, int, float, nn.Module, type)) or value is None:
        return
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item, depth - 1)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_of(item, depth - 1)
    else:
        yield from tensors_of(getattr(value, "__dict__", None), depth - 1)
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                yield from tensors_of(getattr(value, name, None), depth - 1)


def not_traced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the hook, which torch.compile calls instead of tracing when it compiles the module.

    This imports torch._dynamo, as the construction of any torch optimizer has done already.
    """
    return torch.compiler.disable(hook, reason=_NOT_TRACED)


def skipped(call: Any) -> Any:
    """Returns the function, which torch.compile does not trace. Its callees may be compiled, unlike in `not_traced`."""
    from torch._dynamo.decorators import skip

    call._torchdynamo_disable_msg = _NOT_TRACED
    return skip(call)
