"""Views that write back: tensors over a full copy of what has no memory here, a parameter or a gradient.

Owns the class of views, and calls that are made with full copies. The kinds of `FullCopy` in `parameter` and `held`
say whose values a copy has, when they are out of date, and what happens to a write.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from copy import copy as copied_from
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..building.parts import wraps
from ..errors import ShardedParameterError
from .memoryless import METADATA
from .outputs import unwrapped
from .versions import Stamp

__all__ = ["COPYING", "NEW_PARAMETER", "REPLACING", "FullCopy", "View", "call_with_copies", "makes_leaf"]

_T: Any = Tensor
_Owner = TypeVar("_Owner", bound=Tensor)
NEW_PARAMETER = vars(nn.Parameter)["__new__"].__func__.__code__  # nn.Parameter(tensor), which detaches the tensor
REPLACING: set[Any] = {_T.data.__set__, Tensor.resize_}
COPYING: set[Any] = {Tensor.cpu, Tensor.to}  # the caller will keep the result, though on the CPU torch does not copy
_LEAVES: set[Any] = {Tensor.requires_grad_, _T.requires_grad.__set__}
_ARRAYS: set[Any] = {Tensor.numpy, Tensor.__array__}
_STORAGES: set[Any] = {Tensor.untyped_storage, Tensor.storage}


class FullCopy:
    """The full values that a call was given, which its views share. owner: the tensor whose values they are."""

    def __init__(self, owner: Any, values: Tensor, stamp: Stamp) -> None:
        self.owner, self.values, self.stamp = owner, values, stamp

    def check(self) -> None:
        """Raise an error if the values are old."""
        raise NotImplementedError

    def write_back(self) -> None:
        """The values were written: let them be the owner's, and renew the stamp."""
        raise NotImplementedError

    def refuse(self, func: Any) -> None:
        """Raise an error if `func` cannot be called with the values: one of REPLACING, __dlpack__, nn.Parameter, or
        requires_grad_, for any call that makes a leaf over them."""
        raise NotImplementedError

    def is_owner(self, func: Any) -> bool:
        """Whether `func`, which returned the values themselves, returns the owner."""
        return True


class _ReadOnlyStorage(torch.UntypedStorage):
    """The storage of a full copy, which may be read, as whoever looks for shared memory does."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise ShardedParameterError(
            f"a write into the storage of {self.nbytes()} bytes that a view (p.data, p.detach(), p.grad[i] ...) gave, "
            "which would be lost: write into the view itself, with copy_(tensor)"
        )

    __setitem__ = fill_ = copy_ = resize_ = _refuse

    def clone(self) -> torch.UntypedStorage:
        return torch.UntypedStorage(self.nbytes(), device=self.device).copy_(self)

    def __reduce__(self) -> Any:
        return copied_from, (self.clone(),)  # torch.save() knows a storage by its exact class


class View(Tensor):
    """A view of a full copy (`p.data`, `p[1]`, `p.grad[0]`): what is written into it becomes the owner's.

    It raises an error once the owner has changed, where a view of torch's would show the new values.
    """

    copy: FullCopy
    kept: bool  # as the values of a state dict: it may still be read when it is out of date, but not written

    def __new__(cls, values: Tensor, copy: FullCopy, *, kept: bool) -> View:
        with torch._C.DisableTorchFunctionSubclass():
            self: View = values.as_subclass(cls)
        self.copy, self.kept = copy, kept
        return self

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views: list[View] = []
        makes_parameter = func is Tensor.detach and sys._getframe(1).f_code is NEW_PARAMETER
        leaf = makes_leaf(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():

            def plain(view: View) -> Tensor:
                if func not in METADATA and not view.kept:
                    view.copy.check()
                    view.copy.refuse(nn.Parameter if makes_parameter else func)
                if leaf or (view.requires_grad and view.is_leaf):  # its gradient would be that of one use's alias
                    view.copy.refuse(Tensor.requires_grad_)
                if func is Tensor.__dlpack__:
                    view.copy.refuse(func)
                views.append(view)
                return view.as_subclass(Tensor)

            args, kwargs = tree_map_only(View, plain, (args, kwargs or {}))
            before = [view._version for view in views]
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            for view, version in zip(views, before, strict=True):
                if view._version != version:
                    view.copy.check()
                    view.copy.write_back()
            return _with_views(func, result, [(view.copy, view.kept) for view in views])

    def shares(self, values: Tensor) -> bool:
        """Whether this is all of `values`, in the same order."""
        with torch._C.DisableTorchFunctionSubclass():
            return (self.data_ptr(), self.stride()) == (values.data_ptr(), values.stride())

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not self.kept:
            self.copy.check()
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)


def makes_leaf(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether `func` lets a tensor require a gradient."""
    return func in _LEAVES and bool([*args[1:], *kwargs.values(), True][0])


def call_with_copies(
    kind: type[_Owner], copied: Callable[[_Owner], FullCopy], func: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Call `func` with a full copy of each argument of class `kind`, and keep what it changed in place."""
    made: dict[int, tuple[FullCopy, int]] = {}

    def full(owner: _Owner) -> Tensor:
        if id(owner) not in made:
            copy = copied(owner)
            copy.refuse(func)
            made[id(owner)] = copy, copy.values._version
        return made[id(owner)][0].values

    args, kwargs = tree_map_only(kind, full, (args, kwargs))
    result = func(*args, **kwargs)
    for copy, version in made.values():
        if copy.values._version != version:
            copy.write_back()
    copies = [copy for copy, _ in made.values()]
    itself = next((copy for copy in copies if result is copy.values and copy.is_owner(func)), None)
    if itself is not None:
        return itself.owner
    # The views get version counters of their own, by which a write into one is told from a write into another.
    return _with_views(func, result, [(copy, False) for copy in copies if not wraps(type(copy.values))], apart=True)


def _with_views(func: Any, result: Any, copies: Iterable[tuple[FullCopy, bool]], *, apart: bool = False) -> Any:
    """`result`, in which every tensor over the memory of a copy is a View. copies: each, and whether it is kept."""

    def viewed(tensor: Tensor) -> Tensor:
        if type(tensor) is not Tensor or tensor.grad_fn is not None or not tensor.numel():
            return tensor
        if unwrapped(tensor) is not tensor:
            return tensor  # torch.func's, without a storage to ask for
        for copy, kept in copies:
            if tensor.untyped_storage().data_ptr() == copy.values.untyped_storage().data_ptr():
                return View(tensor.data if apart else tensor, copy, kept=kept or func in COPYING)
        return tensor

    if func in _ARRAYS:
        result.flags.writeable = False  # a write into the array would be lost, so numpy has to refuse it
        return result
    if func in _STORAGES:
        storage = getattr(result, "_untyped_storage", result)
        storage.__class__ = _ReadOnlyStorage
        if result is not storage:  # a typed one, which writes through a tensor
            result._setitem = storage._refuse
        return result
    return tree_map_only(Tensor, viewed, result)
