"""Prepares and checks the step of one parameter by itself: its stand-in, its states, and values that steps share.

Owns these three. Not here: which optimizers may be stepped so (in contracts.py).

[Note: values that every step shares]
Many optimizers count their steps in `group["step"]`. A parameter that is stepped by itself would count once each. So
the step of every parameter begins with the same values, those of the step before, and must end with the same. A
*double* finds them: the optimizer's class over one small parameter of each group, stepped once in each step(), in the
caller's thread. A parameter whose step leaves other values looks at more than itself: an error, before a commit.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..errors import UnsupportedOptimizerError
from ..tensors.inner_tensors import wraps
from ..tensors.sharded_parameter import Sharded
from .contracts import BY_ITSELF, WHOLE, contract_of, options_of, over_segments, own_attributes
from .joint import kind_of, member_of, placed

AFTER = "zero_after"  # the key of `Written` among the options of a step
_DRY = "_zero_dry"
Look = tuple[type[Any], dict[str, Any]]  # a parameter's class, and the attributes that the user gave it


# -- a parameter's looks -----------------------------------------------------------------------------------------------


def look_of(parameter: Tensor) -> Look:
    """Returns the user's class of a parameter, sharded or not, and the attributes that the user gave it."""
    kind: type[Any] = next(kind for kind in type(parameter).__mro__ if not issubclass(kind, Sharded))
    if kind is Tensor or wraps(kind):  # a wrapper's memory is in other tensors
        return nn.Parameter, {}
    return kind, {key: value for key, value in vars(parameter).items() if not key.startswith("_zero")}


def dress(parameter: nn.Parameter, look: Look | None) -> nn.Parameter:
    """Gives the parameter the class and the attributes of another one, and returns it."""
    if look is not None:
        parameter.__class__ = look[0]
        parameter.__dict__.update(look[1])
    return parameter


def undress(parameter: nn.Parameter, master: Tensor) -> None:
    """Copies the parameter's values into `master`, where a step gave it other memory by `p.data = ...`."""
    if parameter.data_ptr() != master.data_ptr():
        master.copy_(parameter.detach())
        parameter.data = master


# -- states ------------------------------------------------------------------------------------------------------------


def state_of(optimizer: torch.optim.Optimizer, group: int, shape: tuple[int, ...]) -> dict[str, Any]:
    """Returns the state of a parameter of `shape` in this group after two steps: meta tensors, numbers, None.

    A parameter on meta takes the steps, or a real one where they read values.

    Raises UnsupportedOptimizerError for a state that is neither fp32, contiguous and of fixed shape, nor a number.
    """
    member, number = member_of(optimizer, group)
    cached: dict[Any, dict[str, Any]] = vars(member).setdefault(_DRY, {})
    key = number, shape, "" if contract_of(member) in WHOLE else _deciding(member.param_groups[number])
    if key not in cached:
        like = (p for p in member.param_groups[number]["params"] if tuple(p.shape) == shape)
        look = next((look_of(p) for p in like), None)
        try:
            cached[key] = _dry(member, number, shape, torch.device("meta"), look)
        except UnsupportedOptimizerError:  # as where it reads values, which meta tensors lack
            cached[key] = _dry(member, number, shape, torch.device("cpu"), look)
    return cached[key]


def _deciding(options: Mapping[str, Any]) -> str:
    """Returns the options of a group that may decide which states exist: of a float, only whether it is zero."""
    return repr([(k, bool(v) if isinstance(v, float) else v) for k, v in options.items() if k != "params"])


def _dry(
    member: torch.optim.Optimizer, group: int, shape: tuple[int, ...], device: torch.device, look: Look | None
) -> dict[str, Any]:
    parameter = dress(nn.Parameter(torch.full(shape, 0.5, device=device).float()), look)
    trial = over_segments(member, [parameter], [group])
    step_twice(trial, parameter, torch.full_like(parameter, 0.25))
    state = dict(trial.state[parameter])
    strange = [f"{key!r} (of no parameter)" for key in trial.state if not isinstance(key, Tensor)]
    odd = [f"{name!r} ({_told(value)})" for name, value in state.items() if not _can_be_kept(value)]
    if odd or strange:
        raise UnsupportedOptimizerError(
            f"optimizer {kind_of(member)} keeps the state {', '.join(odd or strange)}. Shards keep only contiguous "
            "float32 tensors and numbers, in self.state[p]: set options without such states, or use another optimizer"
        )
    return {n: v.to("meta") if isinstance(v, Tensor) and v.dim() else v for n, v in state.items()}


def step_twice(trial: Any, parameter: nn.Parameter, gradient: Tensor) -> None:
    """Steps an optimizer twice over a throw-away parameter. Restores the random state.

    Raises UnsupportedOptimizerError where a step raises.
    """
    with torch.random.fork_rng(devices=[]):
        for _ in range(2):
            parameter.grad = gradient.clone()
            try:
                trial.step()
            except Exception as error:
                raise UnsupportedOptimizerError(
                    f"a trial step of optimizer {kind_of(trial)} over a parameter of shape {tuple(parameter.shape)} "
                    f"raised {type(error).__name__}: {error}. Its copies step the shards. If the class is yours, let "
                    "step() need only self.param_groups and self.state, without a closure. Or use another optimizer"
                ) from error


def _can_be_kept(value: Any) -> bool:
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, nn.Parameter):  # such as quantised ones
            return False
        return value.dim() == 0 or (value.dtype == torch.float32 and value.is_contiguous())
    return value is None or isinstance(value, (int, float))


def _told(value: Any) -> str:
    if type(value) in (Tensor, nn.Parameter):
        return f"{value.dtype}, strides {value.stride()}"
    return type(value).__name__


def is_number(value: Any) -> bool:
    """Whether it is kept as a number: a Python number, or a tensor of one number that is not fp32."""
    return isinstance(value, (int, float)) or (
        isinstance(value, Tensor) and value.dim() == 0 and value.dtype != torch.float32
    )


def packed_shape(value: Any) -> tuple[int, ...]:
    """Returns the shape in which a state is kept as fp32; a number, with all bits of a double, takes two elements."""
    return (2,) if is_number(value) else tuple(value.shape)


def packed(value: Any) -> Tensor:
    """Returns a state as fp32 in its `packed_shape`."""
    if isinstance(value, Tensor) and not is_number(value):
        return value
    return torch.tensor([float(value)], dtype=torch.float64, device="cpu").view(torch.float32)


def number_of(value: Tensor, like: Any) -> Any:
    """Returns a `packed` number in the optimizer's type, that of `like`."""
    return number_like(float(value.detach().cpu().contiguous().view(torch.float64)), like)


def number_like(number: float, like: Any) -> Any:
    """Returns a number in the type of `like`."""
    if isinstance(like, Tensor):
        return torch.tensor(number, dtype=like.dtype, device="cpu" if like.is_meta else like.device)
    return type(like)(number)


# -- values that every step shares -------------------------------------------------------------------------------------


def _plain(value: Any) -> bool:
    """Whether a value is a number, also alone in a tensor, a string, None, or a container of only such values."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    if isinstance(value, Mapping):
        return all(map(_plain, value.values()))
    return value is None or isinstance(value, (bool, int, float, complex, str))


def plain_in(values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Returns copies of the plain values."""
    return {name: copy.deepcopy(value) for name, value in values if _plain(value)}


def _bits(value: Any) -> str:
    """Returns a plain value as text without loss; NaN equals NaN."""
    return repr(tree_map_only(Tensor, Tensor.tolist, value))


def _copied(options: Mapping[str, Any]) -> dict[str, Any]:
    return {k: copy.deepcopy(v) if _plain(v) else v for k, v in options_of(options).items() if k != AFTER}


class Written:
    """The optimizer's plain attributes before a step and after it (`own`), and a group's `options` after it."""

    def __init__(self, before: dict[str, Any], options: dict[str, Any], own: dict[str, Any]) -> None:
        self.before, self.options, self.own = before, options, own


class Double:
    """Copies of the members that step parameters by themselves, over one small parameter of each group."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        capturable = any(group.get("capturable") for group in optimizer.param_groups)  # which CPU parameters cannot be
        where = device if capturable else torch.device("cpu")
        self._members: list[tuple[torch.optim.Optimizer, int, Any]] = []
        for member, first in placed(optimizer):
            if contract_of(member) != BY_ITSELF:
                continue
            probes, groups = [], []
            for number, group in enumerate(member.param_groups):
                if group["params"]:
                    p = min(group["params"], key=lambda p: p.numel())
                    small = tuple(min(size, 8) for size in p.shape)
                    probes.append(dress(nn.Parameter(torch.full(small, 0.5, device=where).float()), look_of(p)))
                    groups.append(number)
            self._members.append((member, first, over_segments(member, probes, groups)))

    def step(self, steps: Sequence[Any], stepped: Container[int | None]) -> dict[int, dict[str, Any]]:
        """Steps once, with the options in `steps`, one for each group. Adds the values before and after it (`Written`).

        stepped: the groups with a parameter that has a gradient. Returns the values that the step writes into groups,
        by the numbers of groups. Raises UnsupportedOptimizerError where a step draws random numbers.
        """
        written: dict[int, dict[str, Any]] = {}
        for member, first, trial in self._members:
            before = plain_in(own_attributes(trial).items())
            for group in trial.param_groups:
                group.update(_copied(steps[first + group["zero_group"]].options))
                for probe in group["params"]:
                    has = first + group["zero_group"] in stepped
                    probe.grad = torch.full_like(probe, 0.25) if has else None
            with torch.random.fork_rng(devices=[]):
                random = torch.get_rng_state()
                trial.step()
                if not torch.equal(random, torch.get_rng_state()):
                    raise UnsupportedOptimizerError(
                        f"optimizer {kind_of(member)} draws random numbers in step(), and each rank and thread would "
                        "draw other numbers. No parameter was updated: set options with which step() draws none, or "
                        "use another optimizer"
                    )
            own = plain_in(own_attributes(trial).items())
            for group in trial.param_groups:
                number = first + group["zero_group"]
                options, after = steps[number].options, plain_in(options_of(group).items())
                del after["zero_group"]
                written[number] = {k: v for k, v in after.items() if k not in options or _bits(v) != _bits(options[k])}
                options[AFTER] = Written(before, after, own)
        return written

    def written(self) -> list[dict[str, Any]]:
        """Returns the plain attributes of each member after the last step, for a resumed run."""
        return [plain_in(own_attributes(trial).items()) for _, _, trial in self._members]

    def restore(self, written: Sequence[Mapping[str, Any]]) -> None:
        """Restores the attributes that `written` returned."""
        for (_, _, trial), own in zip(self._members, written, strict=True):
            vars(trial).update(own)

    def __bool__(self) -> bool:
        return bool(self._members)


def begin_step(running: Any, group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Gives the group the options, and the optimizer the attributes, with which each parameter's step begins."""
    if (written := options.get(AFTER)) is None:
        group.update(options_of(options))
    else:  # the values that are here are those after another parameter's step
        kept = {name: group[name] for name in ("params", "zero_group")}
        group.clear()
        group.update(_copied(options), **kept)
        vars(running).update(copy.deepcopy(written.before))


def check_step(running: Any, group: Mapping[str, Any], options: Mapping[str, Any], name: str) -> None:
    """Raises where the step of the parameter `name` has written other values than the double's step."""
    if (written := options.get(AFTER)) is None:
        return
    for what, wanted, found in (("param_groups[...]", written.options, group), ("self", written.own, vars(running))):
        for key, value in wanted.items():
            if key in found and _bits(found[key]) != _bits(value):
                raise UnsupportedOptimizerError(
                    f"the step of {name} has set {key!r} in {what} of optimizer {type(running).__name__} to "
                    f"{found[key]!r}, but a trial step of another parameter to {value!r}. So step() does not handle "
                    'each parameter alone, as optimizer_contract="by itself" says. Use another optimizer, such as AdamW'
                )
