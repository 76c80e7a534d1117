"""Makes the user's optimizer again over segments of parameters: its class, with its options and without its states.

Owns these copies, and the list of the class's own attributes. Not here: whether it may step segments (in contracts.py).
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..errors import UnsupportedOptimizerError
from ..tensors.refusals import is_refusal
from .contracts import WHOLE, contract_of
from .joint import JointOptimizer, members_of, placed

# Methods that a scheduler, or `replace_optimizer`, has put on an optimizer in place of its class's.
_TAKEN = ("step", "state_dict", "load_state_dict", "add_param_group")
# Other attributes that a scheduler puts there, and one of torch's fused optimizers.
_OTHERS = {*_TAKEN, "_step_count", "_opt_called", "_need_device_dtype_check_for_fused"}
_BASE_ATTRIBUTES = frozenset(vars(torch.optim.SGD([nn.Parameter(torch.empty(0))], lr=0.1))) | _OTHERS


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the attributes that the optimizer's class added to those of every torch.optim.Optimizer."""
    added = ((key, value) for key, value in vars(optimizer).items() if key not in _BASE_ATTRIBUTES)
    return {k: v for k, v in added if not k.startswith("_zero") and not is_refusal(v)}  # shard()'s begin with _zero


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal. False where a comparison raises."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    try:
        return bool(one is other or one == other)
    except Exception:
        return False


def over_segments(optimizer: torch.optim.Optimizer, views: Sequence[nn.Parameter], groups: Sequence[int | None]) -> Any:
    """Returns an optimizer of the user's class over `views`, in its groups, with each group's index as "zero_group"."""
    if isinstance(optimizer, JointOptimizer):
        return _joint_over_segments(optimizer, views, groups)
    members: dict[int, list[nn.Parameter]] = defaultdict(list)
    for view, group in zip(views, groups, strict=True):
        if group is not None:
            members[group].append(view)
    options = [options_of(group) for group in optimizer.param_groups]
    if contract_of(optimizer) in WHOLE and members:  # its step may look at a group's number, and write into each
        members |= {g: members.get(g, []) for g in range(len(options))}
        options = tree_map_only(Tensor, torch.clone, options)
    made = [{**options[g], "params": params, "zero_group": g} for g, params in sorted(members.items())]
    if not made:
        return SimpleNamespace(param_groups=[], state={}, step=lambda: None)
    accepted = inspect.signature(type(optimizer).__init__).parameters
    defaults = {k: v for k, v in optimizer.defaults.items() if k in accepted}
    try:
        again = type(optimizer)(made, **defaults)
    except TypeError:
        again = None
    own = own_attributes(optimizer)
    alike = again is not None and own.keys() == own_attributes(again).keys()
    if not alike or not all(same(value, getattr(again, key)) for key, value in own.items()):
        # A class of the user's, built from other arguments: the same object, over other parameters.
        again = object.__new__(type(optimizer))  # copy.copy would only take the names in Optimizer.__getstate__
        again.__dict__.update(vars(optimizer))
        again.state = defaultdict(dict)
        again.param_groups = made
        again._optimizer_step_pre_hooks, again._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        for name in [name for name, value in vars(again).items() if name in _TAKEN or is_refusal(value)]:
            del again.__dict__[name]
    again.__dict__["add_param_group"] = _add_none
    return again


def _add_none(group: Mapping[str, Any]) -> None:
    raise UnsupportedOptimizerError(
        "step() adds a param group, whose parameters were not there when zero_core.shard cut the shards: add it to "
        "the optimizer before zero_core.shard"
    )


def _joint_over_segments(optimizer: JointOptimizer, views: Sequence[nn.Parameter], groups: Sequence[int | None]) -> Any:
    """Does the same as `over_segments`: joins the members that have any of the views."""
    made = []
    for member, first in placed(optimizer):
        mine = [g is not None and 0 <= g - first < len(member.param_groups) for g in groups]
        if any(mine):
            inside = [g - first for g, own in zip(groups, mine, strict=True) if own]  # type: ignore[operator]
            again = over_segments(member, [v for v, own in zip(views, mine, strict=True) if own], inside)
            for group in again.param_groups:
                group["zero_group"] += first
            made.append(again)
    return JointOptimizer(*made) if made else over_segments(members_of(optimizer)[0], views, groups)
