"""Resolves activation policies per unit, and the tiers on which they set tensors aside. Owns no forward and no bytes.

[Note: the tensors that each policy keeps between forward and backward]
    keep        everything that autograd saves, on the device
    recompute   the unit's input, on the device; backward runs the unit's forward again
    host, nvme  the unit's input, on that tier; backward runs the forward again. Other stored tiers of the TieredStore
                are used in the same way, by their names
All of them give the same gradients, bit for bit, because backward computes with the same values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from ..planning.budgets import POLICIES
from ..planning.planner import Plan
from ..store.tiered_store import TieredStore
from ..streams import streams_of
from .queued_spill import QueuedSpill
from .spill import STAYS, ActivationError, HostSpill, Spill
from .stored_spill import StoredSpill

Policy = str | Mapping[str, str] | Sequence[str] | Plan


def of_modules(policy: Policy, nodes: Sequence[Any], names: Sequence[str], store: TieredStore | None) -> dict[str, str]:
    """The policy of each module that opens units, by its name.

    nodes: these modules, without the model itself. names: of all units.
    """
    inside = {id(each) for node in nodes for each in node.module.modules() if each is not node.module}
    opens = [node for node in nodes if id(node.module) not in inside and next(node.module.children(), None) is not None]
    wanted = _of_units(policy, names, {names[u] for node in opens for u in node.units}, store)
    if not isinstance(policy, (str, Plan)):
        opened = {names[u] for node in nodes for u in node.units}
        for name in (name for name, chosen in wanted.items() if chosen != "keep" and name not in opened):
            raise ActivationError(f"unit {name} is the rest of the model, around all others: it can only have 'keep'")
    policies: dict[str, str] = {}
    for node in nodes:
        found = {wanted[names[u]] for u in node.units}
        if isinstance(policy, Plan) and len(found) > 1:
            found -= {"keep"}  # a plan counts the activations of a block, frozen and trained, with one of its units
        if len(found) > 1:
            raise ActivationError(f"{node.name} opens units with different policies: {', '.join(sorted(found))}")
        policies[node.name] = chosen = found.pop() if found else "keep"
        if chosen != "keep" and getattr(node.module, "gradient_checkpointing", False):
            raise ActivationError(
                f"{node.name} uses activation checkpointing of its own, which conflicts with the policy {chosen!r}; "
                "call model.gradient_checkpointing_disable() and let the policy recompute"
            )
    return policies


def _of_units(policy: Policy, names: Sequence[str], blocks: set[str], store: TieredStore | None) -> dict[str, str]:
    """The policy of each unit, by its name. blocks: the units to which a single policy applies."""
    known = tuple(dict.fromkeys((*POLICIES, *(store.stores if store is not None else ()))))
    if isinstance(policy, Plan):
        policy = policy.activations
    if isinstance(policy, str):
        found = {name: policy if name in blocks else "keep" for name in names}
    elif isinstance(policy, Mapping):
        for pattern in policy:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ActivationError(f"no unit is called {pattern!r}; units: {', '.join(names)}")
        found = {name: next((p for k, p in policy.items() if fnmatchcase(name, k)), "keep") for name in names}
    else:
        if len(policy) != len(names):
            raise ActivationError(f"{len(policy)} policies for {len(names)} units; give one, or one a unit")
        found = dict(zip(names, policy, strict=True))
    for chosen in {policy} if isinstance(policy, str) else set(found.values()):
        if chosen not in known:
            raise ActivationError(f"{chosen!r} is not an activation policy; policies are {', '.join(known)}")
    return found


def spills_of(
    chosen: set[str], store: TieredStore | None, device: torch.device, sizes: Mapping[str, int]
) -> dict[str, Spill]:
    """The `Spill` of each policy that sets tensors aside."""
    spills: dict[str, Spill] = {}
    for policy in sorted(chosen - {"keep", "recompute"}):
        if policy == "host":
            make = streams_of(device)
            if store is not None and store.streams is not None:
                spills[policy] = HostSpill(store.streams)
            elif make is not None:
                spills[policy] = HostSpill(make(torch.empty(0, dtype=torch.uint8)), owned=True)
            else:  # units compute on the CPU
                spills[policy] = STAYS
        elif store is None or policy not in store.stores:
            raise ActivationError(
                f"the activation policy {policy!r} needs the TieredStore(nvme=...) that the model was sharded with, "
                f"and {'none was given' if store is None else 'the one that was given has no nvme='}"
            )
        elif store.streams is None:
            spills[policy] = StoredSpill(store.stores[policy], **sizes)
        else:
            spills[policy] = QueuedSpill(store.stores[policy], store.streams, **sizes)
    return spills
