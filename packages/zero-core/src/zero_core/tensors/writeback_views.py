"""Makes views that write back: tensors over a full copy of a parameter or a gradient that has no memory here.

Owns the class of views, calls that are made with full copies, and the list of functions that need no memory of a tensor
(`METADATA`). The kinds of `FullCopy` in `parameter_home` and `grad_proxy` say whose values a copy has, when they are
out of date, and what happens to a write.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from copy import copy as copied_from
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..active_calls import unwrapped
from ..errors import ShardedParameterError
from .inner_tensors import wraps
from .version_counters import Stamp

_T: Any = Tensor  # its attributes are descriptors with __get__ and __set__, which their annotations hide
_Owner = TypeVar("_Owner", bound=Tensor)
NEW_PARAMETER = vars(nn.Parameter)["__new__"].__func__.__code__  # nn.Parameter(tensor), which detaches the tensor
REPLACING: set[Any] = {_T.data.__set__, Tensor.resize_, Tensor.set_, Tensor.share_memory_}
COPYING: set[Any] = {Tensor.cpu, Tensor.to}  # the caller will keep the result, though on the CPU torch does not copy
_SHARING: set[Any] = {Tensor.numpy, Tensor.__array__, Tensor.untyped_storage, Tensor.storage}
_DETACH = torch.ops.aten.detach.default


_ATTRIBUTES = (
    *("shape", "dtype", "device", "requires_grad", "is_leaf", "grad_fn", "ndim", "layout", "names", "is_cuda"),
    *("is_cpu", "is_sparse", "is_meta", "is_quantized", "is_nested", "is_mkldnn", "is_xpu", "is_mps", "is_sparse_csr"),
    *("_version", "output_nr", "retains_grad", "itemsize", "nbytes", "name", "_backward_hooks", "grad_dtype"),
    *("is_xla", "is_ipu", "is_hpu", "is_mtia", "is_maia", "is_vulkan", "is_ort", "_post_accumulate_grad_hooks"),
)
# By getter, never by the name `__get__`, which all of them share.
METADATA: set[Any] = {getattr(Tensor, name).__get__ for name in _ATTRIBUTES if hasattr(Tensor, name)} | {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.element_size, Tensor.ndimension),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.get_device, Tensor.requires_grad_),
    *(Tensor.register_hook, _T.requires_grad.__set__, Tensor.__len__),
    *(Tensor.storage_offset, Tensor.is_signed, Tensor.is_inference, _T._backward_hooks.__set__),
    *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size, Tensor.is_same_size),
    *(torch.is_tensor, Tensor.is_shared, Tensor._is_view),
}


def name_of(func: Callable[..., Any]) -> str:
    return torch.overrides.resolve_name(func) or getattr(func, "__name__", str(func))


class FullCopy:
    """The full values that a call was given, which its views share. owner: the tensor that has these values."""

    def __init__(self, owner: Any, values: Tensor, stamp: Stamp) -> None:
        self.owner, self.values, self.stamp = owner, values, stamp

    def check(self) -> None:
        """Raises an error if the values are old."""
        raise NotImplementedError

    def write_back(self) -> None:
        """Gives written values to the owner, and renews the stamp."""
        raise NotImplementedError

    def refuse(self, func: Any) -> None:
        """Raises an error if `func` cannot be called with the values: one of REPLACING, __dlpack__ or nn.Parameter."""
        raise NotImplementedError

    def is_owner(self, func: Any) -> bool:
        """Whether `func`, which returned the values themselves, returns the owner."""
        return True


class _ReadOnlyStorage(torch.UntypedStorage):
    """The storage of a full copy, which may only be read, as by code that looks for shared memory."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise ShardedParameterError(
            f"a write into the storage, {self.nbytes()} bytes, of a view (p.data, p.detach(), p.grad[i] ...) would be "
            "lost: write into the view itself, with copy_(tensor)"
        )

    __setitem__ = fill_ = copy_ = resize_ = _refuse

    def clone(self) -> torch.UntypedStorage:
        return torch.UntypedStorage(self.nbytes(), device=self.device).copy_(self)

    def __reduce__(self) -> Any:
        return copied_from, (self.clone(),)  # torch.save() knows a storage by its exact class


class View(Tensor):
    """A view of a full copy (`p.data`, `p[1]`, `p.grad[0]`): writes into it change the owner.

    It raises an error once the owner has changed, where a view of torch's would show the new values. torch's functions
    come here below autograd, so that a view can be a leaf, with hooks and a gradient of its own, as in plain torch.
    The methods below are those that torch answers without its dispatcher.
    """

    copy: FullCopy
    _inner: Tensor  # the same memory, in a plain tensor
    kept: bool  # as the values of a state dict: it may still be read when it is out of date, but not written

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, values: Tensor, copy: FullCopy, *, kept: bool) -> View:
        inner = values._inner if isinstance(values, View) else values
        self: View = Tensor._make_subclass(cls, inner.data)  # with a version counter of its own
        self._inner, self.copy, self.kept = inner, copy, kept
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func is _DETACH and sys._getframe(1).f_code is NEW_PARAMETER:
            args[0].copy.refuse(nn.Parameter)
        writes, past, aliases = _of_operator(func)
        written: list[View] = []
        for position, name in writes:
            given = args[position] if position < len(args) else kwargs.get(name)
            each_of(View, given, (lambda view: view.copy.refuse(Tensor.resize_)) if past else written.append)
        for copy in {id(view.copy): view.copy for view in written}.values():
            copy.check()
        result = func(*each_of(View, args, View.read), **each_of(View, kwargs, View.read))
        for copy in {id(view.copy): view.copy for view in written}.values():
            copy.write_back()
        same = {id(view._inner): view for view in written}
        of = args[0] if aliases and not written and isinstance(args[0], View) else None

        def viewed(tensor: Tensor) -> Tensor:
            return same.get(id(tensor), tensor) if of is None else View(tensor, of.copy, kept=of.kept)

        return tree_map_only(Tensor, viewed, result) if written or of is not None else result

    def read(self) -> Tensor:
        """Returns the same values in a plain tensor. Raises an error if they are old."""
        if not self.kept:
            self.copy.check()
        return self._inner

    def as_subclass(self, cls: type[Any]) -> Any:
        return self if cls is Tensor else super().as_subclass(cls)

    def shares(self, values: Tensor) -> bool:
        """Whether this is all of `values`, in the same order."""
        return (self.data_ptr(), self.stride()) == (values.data_ptr(), values.stride())

    def _plain(self) -> Tensor:
        return self.read().detach().requires_grad_(self.requires_grad)

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._keep(Tensor.cpu(self, *args, **kwargs))

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._keep(Tensor.to(self, *args, **kwargs))

    def _keep(self, result: Tensor) -> Tensor:
        return View(self.read(), self.copy, kept=True) if result is self and not self.requires_grad else result

    def numpy(self, **kwargs: Any) -> Any:
        return _read_only(self._plain().numpy(**kwargs))

    def tolist(self) -> Any:
        return self.read().tolist()

    def untyped_storage(self) -> Any:
        return _read_only(super().untyped_storage())

    def storage(self) -> Any:
        return _read_only(super().storage())

    def share_memory_(self) -> Any:
        self.copy.refuse(Tensor.share_memory_)

    def __dlpack__(self, **kwargs: Any) -> Any:
        self.copy.refuse(Tensor.__dlpack__)

    def __format__(self, spec: str) -> str:
        return self._plain().__format__(spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._plain())

    def __deepcopy__(self, memo: Any) -> Tensor:
        plain = self._plain()
        plain.grad = self.grad
        return deepcopy(plain, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)


setattr(View, "data", property(_T.data.__get__, lambda view, _: view.copy.refuse(_T.data.__set__)))  # noqa: B010


def each_of(kinds: Any, given: Any, do: Callable[[Any], Any]) -> Any:
    """Returns the arguments with `do(tensor)` for each tensor of these classes. Takes a fifth of pytree's time."""
    if isinstance(given, kinds):
        return do(given)
    if isinstance(given, dict):
        return {name: each_of(kinds, each, do) for name, each in given.items()}
    if type(given) in (list, tuple):
        return type(given)([each_of(kinds, each, do) for each in given])
    return given


@functools.cache
def _of_operator(func: Any) -> tuple[list[tuple[int, str]], bool, bool]:
    """Returns the arguments that it writes into; whether past a view, as into other memory, or later; and whether it
    returns views."""
    collective = func.namespace == "c10d"
    past = collective or torch.Tag.inplace_view in func.tags

    def writes(argument: Any) -> bool:
        if collective:
            return not argument.name.startswith("input") and func.overloadpacket is not torch.ops.c10d.send
        return past or (argument.alias_info is not None and argument.alias_info.is_write)

    written = [(i, argument.name) for i, argument in enumerate(func._schema.arguments) if writes(argument)]
    return written, past, any(each.alias_info for each in func._schema.returns)


def call_with_copies(
    kind: type[_Owner], copied: Callable[[_Owner], FullCopy], func: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Calls `func` with a full copy of each argument of class `kind`, and writes copies that it changed back."""
    made: dict[int, tuple[FullCopy, int, torch.Size]] = {}
    collective = str(getattr(func, "__module__", None)).startswith("torch.distributed")  # it may write later

    def full(owner: _Owner) -> Tensor:
        if id(owner) not in made:
            copy = copied(owner)
            copy.refuse(func)
            made[id(owner)] = copy, copy.values._version, copy.values.shape
        copy = made[id(owner)][0]
        return View(copy.values, copy, kept=False) if collective else copy.values

    args, kwargs = tree_map_only(kind, full, (args, kwargs))
    result = func(*args, **kwargs)
    for copy, version, shape in made.values():
        if copy.values.shape != shape:
            copy.refuse(Tensor.resize_)
        if copy.values._version != version:
            copy.write_back()
    copies = [copy for copy, *_ in made.values()]
    if (itself := next((copy for copy in copies if result is copy.values and copy.is_owner(func)), None)) is not None:
        return itself.owner
    return _with_views(func, result, [copy for copy in copies if not wraps(type(copy.values))])


def _with_views(func: Any, result: Any, copies: Sequence[FullCopy]) -> Any:
    """Returns `result` with a View for every tensor over the memory of a copy, and a read-only array or storage."""

    def viewed(tensor: Tensor) -> Tensor:
        plain = type(tensor) is Tensor and tensor.layout is torch.strided
        if not plain or tensor.grad_fn is not None or not tensor.numel():
            return tensor
        if unwrapped(tensor) is not tensor:
            return tensor  # torch.func's, without a storage to ask for
        for copy in copies:
            if tensor.untyped_storage().data_ptr() == copy.values.untyped_storage().data_ptr():
                return View(tensor, copy, kept=func in COPYING)
        return tensor

    return _read_only(result) if func in _SHARING else tree_map_only(Tensor, viewed, result)


def _read_only(memory: Any) -> Any:
    """Makes an array or a storage refuse writes, which would be lost, and returns it."""
    if hasattr(memory, "flags"):
        memory.flags.writeable = False
        return memory
    storage = getattr(memory, "_untyped_storage", memory)
    storage.__class__ = _ReadOnlyStorage
    if memory is not storage:  # a typed one, which writes through a tensor
        memory._setitem = storage._refuse
    return memory
