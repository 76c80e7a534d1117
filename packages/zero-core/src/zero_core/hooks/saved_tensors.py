"""Lets the graph ask for its parameters: a saved tensor over a unit's memory opens the unit when a node reads it.

Owns the hooks on saved tensors while a unit's module runs, and the two functions of torch's that are replaced for them.
Not here: opening a unit (in engine.py).

[Note: the graph asks]
Between uses a parameter has no memory, and autograd keeps tensors over it. A gradient need not enter a unit through the
tensors that its module returned: a loss of attention maps, of a cache, of an inner module's output enters inside. So
each saved tensor over the unit's memory is packed with the unit's visit. Autograd unpacks it just before the node
computes, and finds the visit open.

Torch calls only the innermost hooks. So ours pass tensors on to the hooks around them, and hooks that are pushed inside
of a unit, as by a checkpoint there, are pushed within ours. These open the visit for every tensor that they load,
because a checkpoint may run a part of the module for it. `nested_checkpoint.hooks_around` skips ours.

torch.func refuses to run under any hooks. It does not see ours, which are not the user's, if there are no others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch as functorch

from ..active_calls import skipped, unwrapped
from ..moe.nested_checkpoint import Unseen, hooks_around
from ..unit_memory.unit import Unit
from .schedule import Pass, Visit

_autograd: Any = torch._C._autograd
_push, _disable = _autograd._push_saved_tensors_default_hooks, _autograd._saved_tensors_hooks_disable
_PLAIN = {Tensor, nn.Parameter}
_storage_id: Any = torch._C._storage_id  # type: ignore[attr-defined]  # without an object of the storage
_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
_Asked = tuple[Pass | None, Visit | None]
_Ask = Callable[[Pass | None, Visit | None], None]


class Asking:
    """Hooks on the saved tensors of one sharded model. visit_of: returns the innermost visit under way, or that of a
    unit. ask: opens it."""

    def __init__(self, units: Sequence[Unit], visit_of: Callable[[int | None], _Asked], ask: _Ask) -> None:
        self._visit_of, self._ask = visit_of, ask
        self._storages = {unit.flat.untyped_storage()._cdata: unit.index for unit in units}
        self._alone = self._hooks()  # the same objects each time: torch.compile may guard on them
        _autograd._push_saved_tensors_default_hooks, _autograd._saved_tensors_hooks_disable = _push_inside, _pass_by

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `call` with these hooks in force."""

        def asking(*args: Any, **kwargs: Any) -> Any:
            top = _autograd._top_saved_tensors_default_hooks(True)
            if self._is_in(top):
                return call(*args, **kwargs)
            message = _autograd._saved_tensors_hooks_get_disabled_error_message()
            if message is not None:  # inside of torch.func
                _autograd._saved_tensors_hooks_enable()
            try:
                _push(*(self._alone if top is None else self.within(top)))
                try:
                    return call(*args, **kwargs)
                finally:
                    _autograd._pop_saved_tensors_default_hooks()
            finally:
                if message is not None:
                    _disable(message)

        return skipped(asking)

    def _is_in(self, hooks: _Hooks | None) -> bool:
        unseen: Unseen | None = None if hooks is None else getattr(hooks[0], "unseen", None)
        return unseen is not None and (unseen.owner is self or self._is_in(unseen.around))

    def within(self, hooks: _Hooks) -> _Hooks:
        """Returns hooks that open visits, and pack and unpack tensors by `hooks`."""
        save, load = hooks

        def pack(tensor: Tensor) -> Any:
            of, visit = self._visit_of(self._unit_of(tensor))
            return save(tensor), of, visit

        def unpack(kept: Any) -> Tensor:
            packed, of, visit = kept
            self._ask(of, visit)
            tensor = load(packed)
            self._ask(of, visit)  # it may have run modules
            return tensor

        pack.unseen = Unseen(self, hooks)  # type: ignore[attr-defined]
        return skipped(pack), skipped(unpack)

    def _hooks(self) -> _Hooks:
        """Returns hooks for use without others. They are closures, as they run for each saved tensor. They compare
        versions, which torch does only without hooks."""
        unit_of, visit_of, ask = self._unit_of, self._visit_of, self._ask
        storages = self._storages

        def pack(tensor: Tensor) -> Any:
            """Returns the tensor, the one whose version counts, the version; and over a unit's memory the visit."""
            try:
                unit = storages.get(_storage_id(tensor)) if type(tensor) in _PLAIN else unit_of(tensor)
                kept = counted = tensor if tensor.is_leaf else tensor.detach()  # an output itself would be a cycle
            except NotImplementedError:
                unit, kept, counted = unit_of(tensor), _without_its_node(tensor), unwrapped(tensor)
            if unit is None:
                return kept, counted, counted._version
            return kept, counted, counted._version, *visit_of(unit)

        def unpack(kept: Any) -> Tensor:
            tensor: Tensor = kept[0]
            if len(kept) == 5:
                ask(kept[3], kept[4])
            if kept[1]._version != kept[2]:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{tensor.type()} {list(tensor.shape)} is at version {kept[1]._version}; expected version {kept[2]}"
                )
            return tensor

        pack.unseen = Unseen(self, None)  # type: ignore[attr-defined]
        return skipped(pack), skipped(unpack)

    def _unit_of(self, tensor: Tensor) -> int | None:
        try:
            with torch._C.DisableTorchFunctionSubclass():  # a parameter between uses would be gathered
                return self._storages.get(unwrapped(tensor).untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # of a class without a storage
            return None


def _without_its_node(tensor: Tensor) -> Tensor:
    """Unwraps torch.func's tensor and wraps it again: detach() would cut the graphs of outer transforms, too."""
    if tensor.is_leaf or not functorch.is_gradtrackingtensor(tensor):
        return tensor
    return functorch._wrap_for_grad(functorch.get_unwrapped(tensor), functorch.maybe_get_level(tensor))


def _push_inside(save: Callable[[Tensor], Any], load: Callable[[Any], Tensor]) -> None:
    """Replaces torch's function, so that hooks that are pushed inside of a unit see the tensors as without ours."""
    _push(*_inside(_autograd._top_saved_tensors_default_hooks(True), (save, load)))


def _inside(top: _Hooks | None, hooks: _Hooks) -> _Hooks:
    unseen = None if top is None else getattr(top[0], "unseen", None)
    return hooks if unseen is None else unseen.owner.within(_inside(unseen.around, hooks))


def _pass_by(message: str, *options: bool) -> None:
    """Replaces the function by which torch.func refuses hooks. Ours alone are not refused."""
    if hooks_around() is not None or _autograd._top_saved_tensors_default_hooks(True) is None:
        _disable(message, *options)
