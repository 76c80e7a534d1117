"""Decides by an optimizer's declared contract which elements and parameters may be stepped separately.

Owns the declarations and the list of them. Not here: the step of one parameter by itself (in single_parameter.py).

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
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..errors import UnsupportedOptimizerError
from .joint import kind_of, member_of, members_of

ELEMENTWISE, BY_ITSELF, TOGETHER = CONTRACTS = ("elementwise", "by itself", "together")
WHOLE = (BY_ITSELF, TOGETHER)  # a step is given each parameter in its shape
_MUON: Any = getattr(torch.optim, "Muon", None)  # from torch 2.9 on
_LIST = Path(__file__).with_name("contracts.json")
_WORD, _DECLARED, _SETTLED = "optimizer_contract", "_zero_contract", "_zero_contract_of_run"


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
                f"optimizer_contract={found!r} of {kind_of(member)}: it is one of {', '.join(map(repr, CONTRACTS))}"
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
    said: str | None = getattr(optimizer, _WORD) if _says(optimizer, _WORD) else None
    return said


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
    kind = kind_of(member)
    why = (
        f"{kind} steps its parameters together, as its contract says"
        if declared
        else f"{kind} has no contract{_other_options(member)}, so its parameters are stepped together"
    )
    ways = (
        "Use an optimizer that steps each parameter by itself, or one that is elementwise, such as AdamW"
        if declared
        else 'If its step looks at one parameter at a time, say shard(optimizer_contract="by itself"), and '
        '"elementwise" if parts of a parameter may be stepped apart; or use an optimizer that has a contract, such as '
        "AdamW"
    )
    return f"{why}; that needs all of them on one device, with one rank or stage=0 and without store=. {ways}"


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
