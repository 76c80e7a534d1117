"""Tracks which calls use a sharded model now, asks torch what runs around them, and hooks the tensors that they return.

Owns which thread made a forward, a backward or a step, whether it still runs, and whether Ctrl-C came inside of our
part of it. What runs around: autograd's backward, torch.func's transforms, torch.compile. Not here: mending the model
after Ctrl-C (in hooks/engine.py).

[Note: one thread at a time]
A call is identified by the Python frame that made it. While that frame is among the callers of a new call, the old one
is under way and encloses the new one. If another thread runs the frame, the model is in use there, and the new call is
refused. Otherwise the old call is over: Ctrl-C has ended it, which skips the hooks of a module. Autograd's own threads
have no callers. The caller of backward waits for them, so they are never refused.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import threading
from collections.abc import Callable, Container, Iterator
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C import _functorch as functorch

from .errors import ZeroError

_MODULES = nn.modules.module.__file__
_Method = TypeVar("_Method", bound=Callable[..., Any])
set_compiler: Any = torch._C._dynamo.eval_frame.set_eval_frame  # torch.compile's callback for frames; None: not traced
_TRACERS = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)  # of torch.export and make_fx
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


def refuse_tracing() -> None:
    """Raises ZeroError if a tracer of torch runs around this call: it would keep parameters without memory."""
    if torch.jit.is_tracing() or any(torch._C._get_dispatch_mode(key) is not None for key in _TRACERS):
        raise ZeroError(
            "a sharded model cannot be traced, exported or run on fake tensors: its parameters have no memory between "
            "uses. Do so before zero_core.shard, or with a plain model that loads this one's state_dict()"
        )


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


def map_tensors(value: Any, change: Callable[[Tensor], Tensor], objects: int = 5) -> Any:
    """Returns `value` with `change(tensor)` for every tensor in its dicts, tuples, lists and dataclasses.

    objects: how deep plain objects, such as a distribution, are given changed attributes.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        changed = {key: map_tensors(item, change, objects) for key, item in value.items()}
        if type(value) is dict:
            return changed
        for key, item in changed.items():  # transformers' ModelOutput keeps attributes and items alike
            if item is not value[key]:
                value[key] = item
    elif isinstance(value, (tuple, list)):
        items = [map_tensors(item, change, objects) for item in value]
        if any(new is not old for new, old in zip(items, value, strict=True)):
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **{k: map_tensors(v, change, objects) for k, v in fields.items()})
    elif objects and not isinstance(value, (nn.Module, type)):
        for name, item in list(getattr(value, "__dict__", {}).items()):
            if (new := map_tensors(item, change, objects - 1)) is not item:
                value.__dict__[name] = new
    return value


def without_views(output: Any, memories: Container[int]) -> Any:
    """Returns `output` with copies of the tensors whose storage is one of `memories`, which are freed after the module.

    Returns `output` itself where there is none.
    """

    def is_view(tensor: Tensor) -> bool:  # not a parameter, which is gathered where it is read
        plain = type(tensor) is Tensor and tensor.layout is torch.strided
        return (
            plain and not functorch.is_functorch_wrapped_tensor(tensor) and tensor.untyped_storage()._cdata in memories
        )

    if not any(map(is_view, tensors_of(output))):
        return output
    return map_tensors(output, lambda tensor: tensor.clone() if is_view(tensor) else tensor)


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


def mended(method: _Method) -> _Method:
    """Marks the engine interrupted if an exception such as KeyboardInterrupt cuts the method short: see `Engine.mend`.
    torch.compile traces neither the method nor its callees, at less cost a call than `not_traced`.

    The method's object has `calls`, or an `engine` that has them.
    """

    @functools.wraps(method)
    def run(self: Any, *args: Any, **options: Any) -> Any:
        grad, compiler = torch.is_grad_enabled(), set_compiler(None)
        try:
            return method(self, *args, **options)
        except BaseException as error:
            torch._C._set_grad_enabled(grad)  # Ctrl-C at the end of a no_grad block leaves it off
            if not isinstance(error, Exception):
                getattr(self, "engine", self).calls.interrupted = True
            raise
        finally:
            set_compiler(compiler)

    return skipped(run)


class Calls:
    """The calls under way on one sharded model, by name: "forward", "backward" and so on."""

    def __init__(self, model: str) -> None:
        self._model, self._process = model, os.getpid()
        self._lock = threading.Lock()
        self._frames: dict[str, FrameType] = {}
        self.interrupted = False  # by Ctrl-C inside of a method that is mended

    def begin(self, what: str) -> None:
        """Notes that a call begins. Raises as `refuse_others` does."""
        frame = _caller()
        with self._lock:
            self.refuse_others(what)
            if frame is not None:
                self._frames[what] = frame

    def end(self, what: str) -> None:
        self._frames.pop(what, None)

    def over(self, what: str) -> bool:
        """Whether the call that began last is known not to be among the callers of this line."""
        frame = self._frames.get(what)
        return frame is not None and not _encloses(frame, sys._getframe())

    def refuse_others(self, what: str) -> None:
        """Raises ZeroError if a call is under way in another thread, or if the model was sharded in another process."""
        if os.getpid() != self._process:
            raise ZeroError(
                f"{what} of {self._model} began in process {os.getpid()}, which was forked from process "
                f"{self._process}. Only that process has the sharded model's threads and memory: call the model there. "
                "In a worker of a DataLoader, use a plain model that loaded this one's state_dict() before the fork"
            )
        for other, frame in list(self._frames.items()):
            # A dummy thread is one that Python did not start: autograd's own.
            own = in_backward() and isinstance(threading.current_thread(), threading._DummyThread)
            if own or _encloses(frame, sys._getframe()):
                continue
            if (thread := _thread_in(frame)) is not None:
                raise ZeroError(
                    f"{what} of {self._model} began in thread {threading.current_thread().name!r}, while thread "
                    f"{thread!r} is in {other} of the same model. Only one thread at a time may use a sharded model: "
                    "share one threading.Lock between the threads, and hold it from forward to the end of step()"
                )


def _caller() -> FrameType | None:
    """Returns the innermost call of a module, of autograd or of an optimizer that encloses this line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _MODULES or code.co_name in ("_engine_run_backward", "step"):
            return frame
        frame = frame.f_back
    return None


def _encloses(wanted: FrameType, inside: FrameType | None) -> bool:
    while inside is not None and inside is not wanted:
        inside = inside.f_back
    return inside is not None


def _thread_in(wanted: FrameType) -> str | None:
    """Returns the name of the thread that runs the frame, or None."""
    for ident, frame in sys._current_frames().items():
        if _encloses(wanted, frame):
            return next((each.name for each in threading.enumerate() if each.ident == ident), str(ident))
    return None
