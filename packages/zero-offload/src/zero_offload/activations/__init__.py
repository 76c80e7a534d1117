"""`offload_activations`: per unit, whether forward keeps its activations, recomputes them, or sets their input aside.

Owns the policies and the units' forward. Where what is set aside lies is `spill`'s; recomputation is torch's own
non-reentrant checkpointing, so random numbers and autocast are replayed by it. Called after `zero_core.shard`.

[Note: what a policy keeps of a unit between forward and backward]
    keep        everything that autograd saves, on the device
    recompute   the unit's input, on the device; backward runs the unit's forward again
    host, nvme  the unit's input, there; the same otherwise
Gradients are the same bits under all four: backward computes on the same values, wherever they were meanwhile.

[Note: hooks do not nest]
Of several saved_tensors_hooks only the innermost is called, so nothing here installs one: the inputs that are set aside
never reach autograd, and the recomputation asks for them. A unit called under somebody else's hooks (an enclosing
checkpoint, save_on_cpu) leaves its activations to those, and `stats()["delegated"]` counts it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from zero_core import handle

from ..errors import OffloadError
from ..planning.budgets import POLICIES
from ..planning.planner import Plan
from ..store import TieredStore
from ..streams import streams_of
from ..tiles.footprint import SPILL_PIECE_BYTES, SPILL_SLOTS
from .host_spill import HostSpill
from .nvme_spill import NvmeSpill
from .queued_spill import QueuedSpill
from .spill import DeviceSpill, Spill, Spilled

__all__ = ["ActivationError", "Activations", "offload_activations"]

_STAYS = DeviceSpill()
SMALL_BYTES = 64 << 10  # a tensor below this is not worth a request
_CACHES = ("past_key_value", "past_key_values", "layer_past", "cache_params")

Policy = str | Mapping[str, str] | Sequence[str] | Plan


class ActivationError(OffloadError, ValueError):
    """A policy that does not exist or that a unit cannot follow."""


class Activations:
    """What `offload_activations` put in place. `policies`: by unit. `close()` undoes it."""

    def __init__(self, policies: Mapping[str, str], spills: Mapping[str, Spill]) -> None:
        self.policies, self._spills = dict(policies), spills
        self._undo: list[Callable[[], None]] = []
        self._counts = {"recomputed": 0, "delegated": 0, "spilled_bytes": 0}

    def stats(self) -> dict[str, int]:
        """recomputed: forwards run again; delegated: forwards left to enclosing hooks; spilled_bytes: set aside in all;
        host_bytes: of the slots and buffers; nvme_bytes: of the extents."""
        host = sum(getattr(spill, "host_bytes", 0) for spill in self._spills.values())
        return self._counts | {"host_bytes": host, "nvme_bytes": getattr(self._spills.get("nvme"), "extent_bytes", 0)}

    def close(self) -> None:
        """Give the units their own forward back, and the memory and extents. A graph that is alive cannot run backward
        after this. Idempotent."""
        while self._undo:
            self._undo.pop()()
        for spill in self._spills.values():
            spill.close()

    def __enter__(self) -> Activations:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _wrap(self, name: str, module: nn.Module, policy: str) -> None:
        original = module.forward
        had_own = "forward" in module.__dict__
        spill = self._spills.get(policy)

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(*args, **kwargs)
            if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
                self._counts["delegated"] += 1
                return original(*args, **kwargs)
            for cache in _CACHES:
                if kwargs.get(cache) is not None:
                    raise ActivationError(
                        f"unit {name} was given {cache}, which recomputation would write to a second time; "
                        "train with use_cache=False (model.config.use_cache = False), or keep this unit's activations"
                    )
            call = _Call(self._counts, name, original, spill, (args, kwargs))
            return checkpoint(call.run, call.anchor, use_reentrant=False)

        forward._torchdynamo_disable = True  # type: ignore[attr-defined]
        module.forward = forward

        def undo() -> None:
            if had_own:
                module.forward = original
            else:
                del module.__dict__["forward"]

        self._undo.append(undo)


class _Call:
    """One forward of one unit, to be run again. Holds its inputs, or where they were set aside."""

    def __init__(
        self, counts: dict[str, int], name: str, original: Callable[..., Any], spill: Spill | None, given: object
    ) -> None:
        self._counts, self._original = counts, original
        self._live: list[Any] | None
        self._live, self._structure = pytree.tree_flatten(given)
        self._kept: list[Any] = list(self._live)
        self._aside: dict[int, tuple[Spilled, bool]] = {}  # by position: where it is, and whether it needs a gradient
        tensors = [(k, value) for k, value in enumerate(self._live) if isinstance(value, Tensor)]
        # Tells the checkpoint which device's random numbers to replay.
        self.anchor = tensors[0][1].detach().new_empty(0) if tensors else torch.empty(0)
        first = next((k for k, value in tensors if _worthwhile(value)), None)
        for k, value in tensors:
            # Masks and position tables are one tensor for all units; the unit's input is its own.
            if spill is not None and _worthwhile(value) and (value.requires_grad or k == first):
                self._aside[k] = (spill.pack(value, name), value.requires_grad)
                counts["spilled_bytes"] += value.nbytes
            else:
                self._aside[k] = (_STAYS.pack(value, name), value.requires_grad)
            self._kept[k] = None

    def run(self, anchor: Tensor) -> Any:
        live, self._live = self._live, None
        if live is None:
            self._counts["recomputed"] += 1
            live = list(self._kept)
            for k, (spilled, wanted) in self._aside.items():
                live[k] = spilled.load().requires_grad_(wanted)
        args, kwargs = pytree.tree_unflatten(live, self._structure)
        return self._original(*args, **kwargs)


def _worthwhile(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.nbytes >= SMALL_BYTES


def offload_activations(
    model: nn.Module,
    store: TieredStore | None = None,
    policy: Policy = "recompute",
    *,
    slots: int = SPILL_SLOTS,
    piece_bytes: int = SPILL_PIECE_BYTES,
) -> Activations:
    """Put a policy on each unit of a model that `zero_core.shard` has sharded.

    policy: "keep", "recompute", "host" or "nvme" for every block (units with children: embeddings and heads keep);
    or a mapping of unit names or patterns ("model.layers.*") to policies, others keep, the first match counts;
    or one policy a unit in the order of `zero_core.units(model)`; or a `Plan`, whose choice is taken.
    store: the TieredStore, whose nvme is shared; only "nvme" needs one. slots, piece_bytes: host memory that "nvme"
    travels through, `slots * piece_bytes` in all however deep the model.

    Raises ActivationError for a policy that does not exist, a unit that cannot follow, or "nvme" without a store that
    has one.
    """
    behind = handle(model)
    names = [unit.name for unit in behind.units]
    nodes = [node for node in behind.engine.nodes if node.module is not model]
    blocks = {names[u] for node in nodes if next(node.module.children(), None) is not None for u in node.units}
    wanted = _resolve(policy, names, blocks)
    if not isinstance(policy, (str, Plan)):
        opened = {names[u] for node in nodes for u in node.units}
        for name in (name for name, chosen in wanted.items() if chosen != "keep" and name not in opened):
            raise ActivationError(f"unit {name} is what is left of the model and contains the others; it can only keep")
    chosen: dict[str, tuple[nn.Module, str]] = {}
    for node in nodes:
        found = {wanted[names[u]] for u in node.units}
        if isinstance(policy, Plan) and len(found) > 1:
            found -= {"keep"}  # a plan counts the activations of a block, frozen and trained, with one of its units
        if len(found) > 1:
            raise ActivationError(f"{node.name} opens units with different policies: {', '.join(sorted(found))}")
        each = found.pop() if found else "keep"
        if each != "keep" and getattr(node.module, "gradient_checkpointing", False):
            raise ActivationError(
                f"{node.name} checkpoints itself, which would hide it from {each!r}; "
                "call model.gradient_checkpointing_disable() and let the policy recompute"
            )
        chosen[node.name] = (node.module, each)
    policies = {name: each for name, (_, each) in chosen.items()}
    sizes = {"slots": slots, "piece_bytes": piece_bytes}
    made = Activations(policies, _spills(set(policies.values()), store, behind.engine.ranks.device, sizes))
    for name, (module, each) in chosen.items():
        if each != "keep":
            made._wrap(name, module, each)
    return made


def _resolve(policy: Policy, names: Sequence[str], blocks: set[str]) -> dict[str, str]:
    """The policy of each unit, by name."""
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
        if chosen not in POLICIES:
            raise ActivationError(f"{chosen!r} is no activation policy; policies are {', '.join(POLICIES)}")
    return found


def _spills(
    chosen: set[str], store: TieredStore | None, device: torch.device, sizes: Mapping[str, int]
) -> dict[str, Spill]:
    spills: dict[str, Spill] = {}
    if "host" in chosen:
        make = streams_of(device)
        if store is not None and store.streams is not None:
            spills["host"] = HostSpill(store.streams)
        elif make is not None:
            spills["host"] = HostSpill(make(torch.empty(0, dtype=torch.uint8)), owned=True)
        else:  # nothing is apart
            spills["host"] = _STAYS
    if "nvme" in chosen:
        if store is None or store.transfers is None:
            raise ActivationError(
                'policy "nvme" needs the TieredStore that the model was sharded with, and one that has nvme='
            )
        if store.streams is None:
            spills["nvme"] = NvmeSpill(store.transfers, **sizes)
        else:
            spills["nvme"] = QueuedSpill(store.transfers, store.streams, **sizes)
    return spills
