"""Chooses per unit whether its activations are kept, are recomputed, or have their input moved to another tier.

Owns `offload_activations`, the policies, and the choice of the tiers on which they set tensors aside. Not here: the
forward of units, and of modules inside of them that take parts of a row (in checkpointed_forward.py), how a batch is
cut (in split_batch.py), which modules take parts (in known_modules.py), how their values are compared (in
recompute.py), heads (in chunked_logits.py).

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
from torch import nn

from ..core import NullObserver, handle
from ..layout.footprint import SPILL_PIECE_BYTES, SPILL_SLOTS
from ..planning.budgets import POLICIES
from ..planning.model_sizes import outer_norms
from ..planning.planner import Plan
from ..store.tiered_store import TieredStore
from ..streams import streams_of
from .checkpointed_forward import Activations, ByRows, ByTokens, refuse_enclosing, refuse_recorded, sum_in_fp32
from .chunked_logits import Head
from .known_modules import named_modules, stranger
from .spill import STAYS, ActivationError, HostSpill, Spill
from .stored_spill import QueuedSpill, StoredSpill

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
            told = {names[u]: wanted[names[u]] for u in node.units}
            raise ActivationError(f"the units of module {node.name} need one policy, not {told}: give all the same")
        policies[node.name] = chosen = found.pop() if found else "keep"
        if chosen != "keep" and getattr(node.module, "gradient_checkpointing", False):
            raise ActivationError(
                f"module {node.name} checkpoints its activations itself, which conflicts with the policy {chosen!r}; "
                "call model.gradient_checkpointing_disable()"
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
                raise ActivationError(f"no unit matches {pattern!r} of policy=. Name one of: {', '.join(names)}")
        found = {name: next((p for k, p in policy.items() if fnmatchcase(name, k)), "keep") for name in names}
    else:
        if len(policy) != len(names):
            raise ActivationError(
                f"policy= lists {len(policy)} policies for {len(names)} units: give one per unit, or one for all"
            )
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
                spills[policy] = HostSpill(make(torch.empty(0, dtype=torch.uint8, device="cpu")), owned=True)
            else:  # units compute on the CPU
                spills[policy] = STAYS
        elif store is None or policy not in store.stores:
            raise ActivationError(
                f"the policy {policy!r} writes to the nvme= of a TieredStore, and store= of offload_activations "
                f"{'is None' if store is None else 'has no nvme='}: pass the model's TieredStore(nvme=...) as store="
            )
        elif store.streams is None:
            spills[policy] = StoredSpill(store.stores[policy], **sizes)
        else:
            spills[policy] = QueuedSpill(store.stores[policy], store.streams, **sizes)
    return spills


def offload_activations(
    model: nn.Module,
    store: TieredStore | None = None,
    policy: Policy = "recompute",
    *,
    rows: int | None = None,
    tokens: int | None = None,
    shared: Sequence[str] | None = None,
    row_modules: Sequence[str] = (),
    token_modules: Sequence[str] = (),
    slots: int = SPILL_SLOTS,
    piece_bytes: int = SPILL_PIECE_BYTES,
) -> Activations:
    """Sets an activation policy for each unit of a model that `zero_core.shard` has sharded.

    policy: "keep", "recompute", "host", "nvme" or the name of another stored tier of `store`, for every block (units
    with children: embeddings and heads keep);
    or a mapping of unit names or patterns ("model.layers.*") to policies, others keep, the first match counts;
    or one policy a unit in the order of `zero_core.units(model)`; or a `Plan`, whose choice is taken.
    store: the TieredStore, whose stored tiers are shared; only policies on a stored tier need it. slots, piece_bytes:
    host memory through which activations pass to each stored tier, `slots * piece_bytes` however deep the model.
    rows: how many rows of the batch a unit computes at once; None: all of them. The model is called with the whole
    batch, and each unit whose policy is not "keep" takes the batch in parts of `rows` rows: see [Note: a batch in
    parts] and [Note: which tensors are cut]. The memory for activations is then that of `rows` rows plus the units'
    inputs. Parameters are gathered, and read, once for all parts in forward and once in backward, and there is one
    gradient per backward, summed over the parts in fp32.
    tokens: how many tokens of a row the MLPs and norms inside of a unit compute at once; None: all of them. Attention
    takes whole rows: see [Note: a row in parts]. A unit whose rows have no more tokens is computed in one piece. With
    `rows` too, a part has `tokens` tokens of each of `rows` rows.
    shared: names of arguments that all rows share, needed only where rows= says that it cannot tell.
    row_modules, token_modules: names or patterns of modules that compute each row of a batch, or each token, as if it
    were alone, whatever the values and in training too. Blocks, MLPs and norms of many of transformers' families are
    known and need no name: see [Note: known modules]. At the first call, a part is compared with its halves.

    Losses and gradients with `rows` or `tokens` differ from the whole batch's only by the rounding of sums. Dropout
    draws other random numbers: new ones for each part, replayed in its recomputation. Embeddings, and other units with
    policy "keep", compute the whole batch, and norms outside of the units compute by rows. The logits of a language
    model are computed in parts with their cross entropy, and otherwise when they are used: see [Note: logits by rows].

    Raises ActivationError for an unknown policy, a unit that cannot follow its policy, "nvme" without a store that has
    nvme, or a name of no module; with `rows` or `tokens`, at a unit's call, if the unit is not known to take parts, or
    its parts do not have the values of the whole.
    """
    for option, given in (("rows", rows), ("tokens", tokens)):
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
            raise ActivationError(f"{option}={given!r} must be a whole number, 1 or more")
    behind = handle(model)
    nodes = [node for node in behind.engine.nodes if node.module is not model]
    policies = of_modules(policy, nodes, [unit.name for unit in behind.units], store)
    sizes = {"slots": slots, "piece_bytes": piece_bytes}
    spills = spills_of(set(policies.values()), store, behind.engine.ranks.device, sizes)
    observer = next((unit.observer for unit in behind.units), NullObserver())
    made = Activations(policies, spills, observer)
    served = [node for node in nodes if policies[node.name] != "keep"]
    by_rows = by_tokens = None
    if rows is not None or tokens is not None:
        option = "tokens" if rows is None else "rows"
        for_tokens = named_modules(model, token_modules, "token_modules=")
        for_rows = named_modules(model, row_modules, "row_modules=") | for_tokens
        by_rows = None if rows is None else ByRows(rows, shared, for_rows)
        by_tokens = None if tokens is None else ByTokens(tokens, for_tokens, made)
        refuse_enclosing(served, nodes, option)
        norms = outer_norms(model, [node.module for node in nodes]) if served else {}
        modules = [*(node.module for node in served), *norms.values()]
        head = Head.of(behind.engine, model, rows, tokens) if served else None
        if head is not None:
            for undo in head.undo:
                made.callback(undo)
            modules.append(head.module)
        made.callback(sum_in_fp32(behind.units, modules, option))
        made.callback(refuse_recorded(model, option))
        for name, norm in norms.items():
            if not stranger(norm, option, for_tokens if rows is None else for_rows):
                in_tokens = by_tokens if by_tokens is not None and by_tokens.knows(norm) else None
                made._wrap(name, norm, "recompute", by_rows, in_tokens)
    for node in served:
        made._wrap(node.name, node.module, policies[node.name], by_rows, by_tokens)
    behind.engine.leaving.append(made.close)
    return made
