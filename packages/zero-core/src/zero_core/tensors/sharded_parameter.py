"""Flips the class of the user's own Parameter object to `Sharded` while it has no memory.

Owns the class, and the gather for functions that need memory. It does not know units: it asks the `parameter_home.Home`
that a parameter belongs to.

[Note: the class flip]
Between uses `p.__class__ is Sharded`; inside its unit it is `nn.Parameter` and costs nothing. Identity, ties, hooks and
optimizers built earlier survive, because the object never changes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..active_calls import outside_transforms, refuse_tracing, set_compiler, skipped, unwrapped
from ..errors import ChangedParameterError, GradientError, ShardedParameterError
from .grad_proxy import HeldGradient
from .inner_tensors import wraps
from .parameter_home import ParameterCopy, home_of, refuse_another
from .refusals import refuse_grad_dtype, refuse_optimizer
from .writeback_views import METADATA, NEW_PARAMETER, View, call_with_copies

_T: Any = Tensor  # its attributes are descriptors with __get__ and __set__, which their annotations hide


class _Gather(torch.autograd.Function):
    """Full values of a sharded parameter for one call; the gradient goes back to the parameter as it is."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        home_of(parameter).note_external_use(parameter)
        return values_for_graphs(parameter)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class Sharded(nn.Parameter):
    """A parameter between uses: its true shape, dtype and name, no memory."""

    @classmethod
    @skipped
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        compiler = set_compiler(None)
        try:
            if special is not None and args and isinstance(args[0], Sharded):
                return special(*args, **kwargs)
            if func in _AUTOGRAD:
                return _AUTOGRAD[func](*args, **kwargs)
            if func in METADATA:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            return _call_gathered(func, args, kwargs)
        finally:
            set_compiler(compiler)

    _in_backward_optimizers = property(None, lambda self, _: refuse_optimizer(home_of(self).name))

    def as_subclass(self, cls: type[Any]) -> Any:  # C++ asks no class
        return self.view_as(self).as_subclass(cls)

    def set_(self, source: Any = None, *args: Any) -> Any:  # nor here
        if args or not isinstance(source, Tensor):
            _refuse_address(self)
        _set_data(self, source)
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"Sharded parameter of shape {tuple(self.shape)}, {self.dtype}, {self.device}"

    def __deepcopy__(self, memo: Any) -> Any:
        raise ShardedParameterError(f"{home_of(self).name} is sharded: deepcopy the model before zero_core.shard")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardedParameterError(f"{home_of(self).name} is sharded and cannot be pickled: save model.state_dict()")


@functools.cache
def sharded_class(kind: type[Tensor]) -> type[Sharded]:
    """The class of a parameter, or a part of one, of class `kind` between its uses: both `Sharded` and `kind`.

    Raises ShardedParameterError for a class whose memory cannot be found.
    """
    if issubclass(kind, Sharded) or kind in (nn.Parameter, Tensor):
        return Sharded
    # Moves of its own that a subclass has, as bitsandbytes' do, read memory: between uses they are those of Sharded.
    moves = {name: getattr(Tensor, name) for name in ("to", "cpu", "cuda", "xpu") if hasattr(Tensor, name)}
    own: dict[str, Any] = {name: method for name, method in moves.items() if getattr(kind, name) is not method}
    if wraps(kind):
        distributed = any(base.__module__.startswith("torch.distributed") for base in kind.__mro__)
        if distributed or not hasattr(kind, "__tensor_flatten__"):
            why = "are distributed already" if distributed else "have __torch_dispatch__ but no __tensor_flatten__"
            raise ShardedParameterError(
                f"parameters of class {kind.__qualname__} {why}, and cannot be sharded: convert them to plain "
                "parameters before zero_core.shard"
            )
        own["__tensor_flatten__"] = property(_refuse_flatten)
    # PEFT and transformers know some classes by name.
    return type(kind.__name__, (Sharded, kind), {**own, "__qualname__": f"Sharded{kind.__qualname__}"})


def _refuse_flatten(parameter: Sharded) -> Any:
    raise AttributeError(
        f"the inner tensors of {home_of(parameter).name} have no memory here: use `with zero_core.gathered(module):`"
    )


@outside_transforms
def _full(parameter: Sharded) -> Tensor:
    refuse_tracing()
    with torch._C.DisableTorchFunctionSubclass():
        if not torch.is_grad_enabled():
            return home_of(parameter).full_copy(parameter)
        if parameter.requires_grad:
            return _Gather.apply(parameter)
        return values_for_graphs(parameter)


def values_for_graphs(parameter: Tensor) -> Tensor:
    """Full values that share the parameter's version counter, so that autograd refuses tensors saved from them once
    the parameter has changed."""
    if wraps(type(parameter)):
        return home_of(parameter).full_copy(parameter)
    values = parameter.detach()
    values.data = home_of(parameter).full_copy(parameter)
    return values


def _call_gathered(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call `func` with the full values of every sharded argument; keep its in-place writes."""
    counts = func != _T.data.__get__  # autograd counts every write but those through `.data`
    return call_with_copies(
        Sharded, lambda parameter: ParameterCopy(parameter, _full(parameter), counts), func, args, kwargs
    )


def _inputs(given: Any) -> tuple[list[Any], Callable[[Sequence[Tensor | None]], Tensor | None]]:
    """The inputs that autograd differentiates by instead of `given`, and a function that joins their gradients.

    Gradient edges need no memory, so that torch functions stay enabled meanwhile: a recomputation in backward may use
    other sharded parameters.
    """
    if not isinstance(given, Sharded):
        return [given], lambda gradients: gradients[0]
    home = home_of(given)
    with torch._C.DisableTorchFunctionSubclass():
        return [torch.autograd.graph.get_gradient_edge(p) for p in home.inputs(given)], home.joined


def _grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs torch.autograd.grad with respect to sharded parameters, whose gradients may arrive in parts."""
    given = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    replaced = [_inputs(each) for each in given]
    parts = [part for found, _ in replaced for part in found]
    zeros = kwargs.pop("materialize_grads", False)
    unused = kwargs.get("allow_unused", False)
    if zeros or len(parts) > len(given):
        kwargs["allow_unused"] = True
    rest = iter(torch.autograd.grad(outputs, parts, *args, **kwargs))
    gradients = tuple(join([next(rest) for _ in found]) for found, join in replaced)
    if zeros:
        pairs = zip(given, gradients, strict=True)
        return tuple(torch.zeros(p.shape, dtype=p.dtype, device=p.device) if g is None else g for p, g in pairs)
    if kwargs.get("allow_unused", False) != unused and any(gradient is None for gradient in gradients):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph, and allow_unused is False"
        )
    return gradients


def _backward(tensors: Any, *args: Any, inputs: Any = None, **kwargs: Any) -> None:
    """Runs torch.autograd.backward with respect to sharded parameters, and from them: gradients that a caller has."""
    roots = [tensors] if isinstance(tensors, Tensor) else tensors
    tensors = [each.view_as(each) if isinstance(each, Sharded) else each for each in roots]
    given = [inputs] if isinstance(inputs, Tensor) else inputs
    places = given and [part for each in given for part in _inputs(each)[0]]
    torch.autograd.backward(tensors, *args, inputs=places, **kwargs)  # type: ignore[misc]


def _get_grad(parameter: Sharded) -> Tensor | None:
    with torch._C.DisableTorchFunctionSubclass():
        if parameter.grad is not None:
            return parameter.grad
        home = home_of(parameter).held_gradient(parameter)
        return None if home is None else HeldGradient(parameter, home)


def _set_grad(parameter: Sharded, value: Tensor | None) -> None:
    if isinstance(value, HeldGradient) and value.home is home_of(parameter):
        value.check()
        return  # p.grad *= c: done already
    if value is not None:
        raise GradientError(
            "p.grad = tensor on a sharded parameter: gradients leave during backward. p.grad = None drops this one, "
            "zero_core.set_full_gradient(p, tensor) changes it, torch.autograd.backward(p, tensor) adds to it, if any, "
            "and p.register_hook changes it on its way"
        )
    with torch._C.DisableTorchFunctionSubclass():
        parameter.grad = None
    home_of(parameter).drop_gradient(parameter)


def _set_grad_dtype(parameter: Sharded, wanted: torch.dtype | None) -> None:
    if wanted != parameter.dtype:
        refuse_grad_dtype(home_of(parameter).name, wanted, parameter.dtype)


def _set_data(parameter: Sharded, value: Tensor) -> None:
    if value is parameter or (isinstance(value, Sharded) and home_of(value) is home_of(parameter)):
        return  # model.to() where it is already; the other tensor over the same memory
    if wraps(type(parameter)):
        raise ChangedParameterError(
            f"p.data = tensor for {home_of(parameter).name}, a sharded tensor subclass, would be lost: write values "
            "with p.copy_(tensor). Quantise the model before zero_core.shard"
        )
    with torch._C.DisableTorchFunctionSubclass():
        kinds = [(tuple(t.shape), t.dtype, t.device) for t in (value, parameter)]
    if changes := ", ".join(f"{new}, was {old}" for new, old in zip(*kinds, strict=True) if new != old):
        raise ChangedParameterError(
            f"p.data = tensor for {home_of(parameter).name}, which is sharded, changes its shape, dtype or device "
            f"({changes}). Move, cast or resize the model before zero_core.shard. To compute on another device or in "
            "another dtype, pass device= or param_dtype= to zero_core.shard"
        )
    if not isinstance(value, View) or not isinstance(value.copy, ParameterCopy):
        home_of(parameter).take_values(parameter, value)
    elif value.copy.owner is parameter and value.shares(value.copy.values):
        value.copy.check()  # p.data += x: written through already
    else:
        raise ChangedParameterError(
            f"p.data = q.data for the sharded {home_of(parameter).name} and {home_of(value.copy.owner).name}: they "
            "cannot share memory, as they would in torch. To copy the values, write p.data.copy_(q.data)"
        )


def _get_data(parameter: Sharded) -> Tensor:
    if wraps(type(parameter)):
        raise ShardedParameterError(
            f"p.data of {home_of(parameter).name}, a sharded tensor subclass: writes into it would be lost. Read with "
            "p.detach(), write with p.copy_() or inside zero_core.gathered(module)"
        )
    return _call_gathered(_T.data.__get__, (parameter,), {})


def _to(parameter: Sharded, *args: Any, **kwargs: Any) -> Tensor:
    """`parameter.to(...)`: nothing is gathered where nothing changes. torch itself copies from "cpu" to "cpu:0"."""
    with torch._C.DisableTorchFunctionSubclass():
        here = parameter.device
        try:
            device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        except (TypeError, RuntimeError):  # copy=True, which it does not take
            device, dtype, layout = None, None, torch.preserve_format
        moves = device is not None and device != here and not (device.type == here.type == "cpu")
        if layout is None and not moves and dtype in (None, parameter.dtype):
            return parameter
    return _call_gathered(Tensor.to, (parameter, *args), kwargs)


def _copy(parameter: Sharded, source: Any, non_blocking: bool = False) -> Tensor:
    """`parameter.copy_(source)`, as load_state_dict does it: nothing is gathered to be overwritten."""
    plain = isinstance(source, Tensor) and not isinstance(source, Sharded) and unwrapped(source) is source
    if plain and not torch.is_grad_enabled() and not wraps(type(parameter)):
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device).copy_(source)
        if home_of(parameter).overwrite(parameter, values):
            return parameter
    return _call_gathered(Tensor.copy_, (parameter, source, non_blocking), {})


def _detach(parameter: Sharded) -> Tensor:
    if sys._getframe(2).f_code is NEW_PARAMETER:  # above __torch_function__
        refuse_another(parameter)
    return _call_gathered(Tensor.detach, (parameter,), {})


def _register_after_accumulation(parameter: Sharded, hook: Callable[[Tensor], None]) -> Any:
    """`parameter.register_post_accumulate_grad_hook(hook)`: our own hook, which takes the gradient away, stays last."""
    home_of(parameter).refuse_hook(parameter)
    with torch._C.DisableTorchFunctionSubclass():
        handle = parameter.register_post_accumulate_grad_hook(hook)
        hooks: Any = parameter._post_accumulate_grad_hooks
    for key in [key for key, each in hooks.items() if getattr(each, "takes_gradient", False)]:
        hooks[key] = hooks.pop(key)  # move_to_end() would not move it in the plain dict that torch reads
    return handle


def _register_hook(parameter: Sharded, hook: Callable[[Tensor], Any]) -> Any:
    home_of(parameter).refuse_hook(parameter)
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.register_hook(hook)


def _same_shape(func: Callable[..., Any], parameter: Any, other: Any) -> Any:
    """`p.view_as(p)`, by which torch and others find the node that accumulates p's gradient: one step behind it."""
    if other is parameter and parameter.requires_grad and torch.is_grad_enabled():
        return _full(parameter)
    return _call_gathered(func, (parameter, other), {})


def _refuse_address(parameter: Sharded, *args: Any, **kwargs: Any) -> Any:
    raise ShardedParameterError(
        f"{home_of(parameter).name} has no memory here: use `with zero_core.gathered(module):`. For torch.export, load "
        "the state_dict() of the sharded model into a plain one"
    )


class _Address:
    """data_ptr() of a parameter without memory: two of them are equal if the parameters are tied. PEFT compares them.

    It is no number, so that nothing reads or writes there.
    """

    def __init__(self, parameter: Sharded) -> None:
        self._parameter = parameter

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Address) and home_of(other._parameter) is home_of(self._parameter)

    def __hash__(self) -> int:
        return id(home_of(self._parameter))

    def _refuse(self, *args: Any) -> Any:
        _refuse_address(self._parameter)

    __index__ = __int__ = __add__ = __radd__ = __sub__ = __rsub__ = __mod__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse


_AUTOGRAD: dict[Any, Callable[..., Any]] = {torch.autograd.grad: _grad, torch.autograd.backward: _backward}

_SPECIAL: dict[Any, Callable[..., Any]] = {
    _T.grad.__get__: _get_grad,
    _T.grad.__set__: _set_grad,
    _T.data.__get__: _get_data,
    _T.data.__set__: _set_data,
    Tensor.copy_: _copy,
    Tensor.to: _to,
    Tensor.detach: _detach,
    Tensor.register_post_accumulate_grad_hook: _register_after_accumulation,
    Tensor.register_hook: _register_hook,
    Tensor.view_as: functools.partial(_same_shape, Tensor.view_as),
    Tensor.expand_as: functools.partial(_same_shape, Tensor.expand_as),
    Tensor.data_ptr: _Address,
    Tensor.untyped_storage: _refuse_address,
    Tensor.share_memory_: _refuse_address,
}
if hasattr(Tensor, "grad_dtype"):  # since torch 2.10
    _SPECIAL[_T.grad_dtype.__set__] = _set_grad_dtype
