"""Decides by an optimizer's declared contract what may be stepped separately, and makes the optimizer over such parts.

Owns the declarations and the list of them, and the copies of the user's optimizer over segments of parameters: its
class, with its options and without its states. Not here: the step of one parameter by itself (in single_parameter.py).

[Note: contracts]
*elementwise*: parts of a parameter may be stepped separately. *by itself*: a parameter's step reads no other parameter.
*together*: anything else. The user declares one by `shard(optimizer_contract=...)`, the optimizer by an attribute
`optimizer_contract`, or by `needs_uncut()` for each parameter (see `uncut`). `contracts.json` lists those that
`nox -s optimizers` has compared with plain torch, by package and version, and by the options that were on or off. An
optimizer without a declaration is *together*. A trial step cannot tell: a norm over all gradients in a local variable
leaves no trace.

On one device that has all parameters, an optimizer steps them together, in one call as in plain torch.
"""

from __future__ import annotations

import inspect
import json
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from ..errors import UnsupportedOptimizerError
from ..store import GroupStep
from ..tensors.refusals import is_refusal
from .joint import JointOptimizer, kind_of, member_of, members_of, placed

ELEMENTWISE, BY_ITSELF, TOGETHER = CONTRACTS = ("elementwise", "by itself", "together")
WHOLE = (BY_ITSELF, TOGETHER)  # a step is given each parameter in its shape
_MUON: Any = getattr(torch.optim, "Muon", None)  # from torch 2.9 on
_LIST = Path(__file__).with_name("contracts.json")
_WORD, _DECLARED, _SETTLED = "optimizer_contract", "_zero_contract", "_zero_contract_of_run"
# Methods that a scheduler, or `replace_optimizer`, has put on an optimizer in place of its class's.
TAKEN = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")
# Other attributes that a scheduler or accelerate puts there, and one of torch's fused optimizers.
NOTES = {"_step_count", "_opt_called", "_is_accelerate_prepared", "_need_device_dtype_check_for_fused"}
_BASE_ATTRIBUTES = frozenset(vars(torch.optim.SGD([nn.Parameter(torch.empty(0))], lr=0.1))) | NOTES | {*TAKEN}


def declare(optimizer: torch.optim.Optimizer, contract: str | None) -> None:
    """Settles the contract of each member for the run, whatever options change in it: `contract`, or the declared one.
    Raises UnsupportedOptimizerError where it is no contract."""
    for member in members_of(optimizer):
        vars(member).pop(_SETTLED, None)
        if contract is not None:
            vars(member)[_DECLARED] = contract
        if (found := TOGETHER if _listed(member) == TOGETHER else contract_of(member)) is not None:
            vars(member)[_SETTLED] = found
        if found not in (None, *CONTRACTS):
            raise UnsupportedOptimizerError(
                f"optimizer_contract={found!r} of optimizer {kind_of(member)} is unknown. It must be 'elementwise' if "
                "step() handles each element separately, 'by itself' if each parameter, or 'together'"
            )


def contract_of(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns the contract by the user, the optimizer or the list, for an optimizer that is not joint; "together"
    without any. None: it says for each parameter whether it needs it whole, see `uncut.NeedsUncut`."""
    own = vars(optimizer)
    said = own.get(_SETTLED) or own.get(_DECLARED) or _by_attribute(optimizer)
    if said is None and not (_says(optimizer, "needs_uncut") or is_muon(optimizer)):
        return _listed(optimizer) or TOGETHER
    return said


def _by_attribute(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns the contract that the optimizer declares itself."""
    return getattr(optimizer, _WORD) if _says(optimizer, _WORD) else None


def _says(optimizer: torch.optim.Optimizer, name: str) -> bool:
    """Whether the optimizer has an attribute, other than from a base class whose step() a subclass has replaced."""
    kind = type(optimizer)
    owner = next((each for each in kind.__mro__ if name in vars(each)), None)
    inherited = owner is not None and inspect.unwrap(kind.step) is inspect.unwrap(owner.step)  # type: ignore[attr-defined]
    return inherited or name in vars(optimizer)


def is_muon(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is torch.optim.Muon."""
    return _MUON is not None and type(optimizer) is _MUON


def steps_whole(optimizer: torch.optim.Optimizer, group: int) -> bool:
    """Whether a step takes each parameter of this group in its shape, by itself or together with the others."""
    return contract_of(member_of(optimizer, group)[0]) in WHOLE


def is_together(optimizer: torch.optim.Optimizer) -> bool:
    """Whether any of the optimizer's members steps its parameters together."""
    return any(contract_of(member) == TOGETHER for member in members_of(optimizer))


def apart(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns why the optimizer cannot step parameters one after another, with the way out; None: it can."""
    if (member := next((each for each in members_of(optimizer) if contract_of(each) == TOGETHER), None)) is None:
        return None
    declared = _listed(member) or vars(member).get(_DECLARED) or _by_attribute(member)
    kind = f"optimizer {kind_of(member)}"
    why = (
        f"{kind} steps its parameters together (optimizer_contract='together')"
        if declared
        else f"{kind} has no optimizer_contract{_other_options(member)}, so its parameters are stepped together"
    )
    ways = (
        "Or use an optimizer that steps each parameter by itself, such as AdamW"
        if declared
        else 'Or pass to shard() what step() does: optimizer_contract="by itself" if it handles each parameter '
        'separately, "elementwise" if each element separately. Or use a known optimizer, such as AdamW'
    )
    return f"{why}; then each rank must have all parameters whole. Use one rank or stage=0, without store=. {ways}"


def _listed(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns the listed contract of exactly this class, in the installed version and with these options."""
    entry = _entry(type(optimizer))  # type: ignore[arg-type]  # a class is hashable
    return None if entry is None or _unlike(optimizer, entry) else str(entry[0])


def _unlike(optimizer: torch.optim.Optimizer, entry: list[Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the options that differ from the compared ones: by name, the value here and the compared one."""
    groups = [{**vars(optimizer), **group} for group in optimizer.param_groups]
    both = [(name, value, group) for options in entry[1:] for name, value in options.items() for group in groups]
    return {name: (group[name], value) for name, value, group in both if name in group and group[name] != value}


def _other_options(optimizer: torch.optim.Optimizer) -> str:
    """Returns part of a sentence: the options with which a listed class was not compared."""
    unlike = _unlike(optimizer, _entry(type(optimizer)) or [])  # type: ignore[arg-type]
    told = [f"{name}={here!r} (compared: {then!r})" for name, (here, then) in unlike.items()]
    return f" with {', '.join(told)}" if told else ""


@cache
def _entry(kind: type[torch.optim.Optimizer]) -> list[Any] | None:
    """Returns the contract of a class, and the switches with which it was compared; torch's own have none."""
    package = json.loads(_LIST.read_text(encoding="utf-8")).get(kind.__module__.partition(".")[0])
    if package is None or kind.__name__ not in package["optimizers"]:
        return None
    try:
        version = metadata.version(package["distribution"])
    except metadata.PackageNotFoundError:
        return None
    known = any(version == each or version.startswith(f"{each}.") for each in package["versions"])
    return list(package["optimizers"][kind.__name__]) if known else None


# -- the optimizer over parts of parameters ---------------------------------------------------------------------------


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def frozen(param_groups: Iterable[Mapping[str, Any]]) -> list[GroupStep]:
    """The groups' current options. Tensors among them, as in betas too, are copies."""
    return [GroupStep(tree_map_only(Tensor, torch.clone, options_of(group))) for group in param_groups]


def described(param_groups: Iterable[Mapping[str, Any]], max_grad_norm: float | None) -> str:
    """The groups' current numbers and texts, which ranks compare. To look into a tensor may wait for the device."""
    found = [f"max_grad_norm={max_grad_norm}"]
    for group in param_groups:
        numbers = (
            (key, value.tolist() if isinstance(value, Tensor) and value.device.type == "cpu" else value)
            for key, value in options_of(group).items()
        )
        found.append(", ".join(f"{k}={v}" for k, v in numbers if isinstance(v, (int, float, str, Sequence))))
    return "; ".join(found)


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
    except Exception:
        again = None
    own = own_attributes(optimizer)
    alike = again is not None and own.keys() == own_attributes(again).keys()
    if not alike or not all(same(value, getattr(again, key)) for key, value in own.items()):
        # A class of the user's, built from other arguments: the same object, over other parameters.
        again = object.__new__(type(optimizer))  # copy.copy would only take the names in Optimizer.__getstate__
        again.__dict__.update(vars(optimizer), **tree_map(lambda leaf: leaf, own))  # with containers of its own
        again.state = defaultdict(dict)
        again.param_groups = made
        again._optimizer_step_pre_hooks, again._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        for name in [name for name, value in vars(again).items() if name in TAKEN or is_refusal(value)]:
            del again.__dict__[name]
    again.__dict__["add_param_group"] = _add_none
    return again


def _add_none(group: Mapping[str, Any]) -> None:
    raise UnsupportedOptimizerError(
        "step() of the optimizer adds a param group, but its parameters have no shards: add the group to the "
        "optimizer before zero_core.shard"
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
