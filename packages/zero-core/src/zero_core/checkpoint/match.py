"""Matches a checkpoint's names and shapes with a model's, and lists the slices that this rank reads.

Owns the comparison and its errors. Reads no tensor and changes nothing.
"""

from __future__ import annotations

import io
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from ..errors import CheckpointError, listed
from ..model.parameter_names import Named
from ..util.tensor_json import without_functions
from .plan import Sliced, StreamingLoadPlanner, Wanted, shapes_of
from .shards import MASTER, ShardSlice, ShardView, clean_name, extra_states

STATE = "zero.state"
_BESIDE = ("train_state.", "lr_scheduler.", "dataloader.")  # torchtitan's, beside the names of the model
FORMAT = 1


class Finder:
    """Finds a model's tensors among a checkpoint's. Every rank checks the whole model, so all raise or none does."""

    def __init__(
        self, folder: Path, view: ShardView, states: Sequence[str] | None, strict: bool, prefixes: Sequence[str]
    ) -> None:
        """prefixes: of the names of the model's tensors and of the optimizer's values."""
        self._folder, self._view, self._names, self._states, self._strict = folder, view, view.names, states, strict
        self._model, self._optimizer = prefixes
        self.found: dict[str, str] = {}  # name in the model -> name in the checkpoint
        self._absent: list[Named] = []  # parameters that are not trained, which the checkpoint may leave out
        self._state_name: dict[str, str] = {}  # name in the model -> the prefix of its states' names

    def small(self, metadata: Metadata) -> Wanted:
        """Checks the checkpoint against the model, and returns the small tensors and objects to read."""
        shapes, everything = shapes_of(metadata), metadata.state_dict_metadata
        missing, mismatched, used = self._match(shapes)
        if STATE not in everything:
            missing += self._names_of(self._absent)
        tensors = [self.found[n.name] for n in self._names if self._view.is_whole(n) and n.name in self.found]
        extra = [self._model + clean_name(name) for name, _ in extra_states(self._view.handle.model)]
        missing += [name for name in extra if name not in everything]
        used.update(extra)
        tensors += [name for name in extra if name in shapes]
        states: list[str] = []
        if self._states is not None:
            states = self._match_states(shapes)
            numbers = ("step", *self._view.store.scalar_names())
            tensors += [f"{p}.{s}" for p in self._state_name.values() for s in numbers if f"{p}.{s}" in shapes]
        foreign = () if self._model else (self._optimizer or "optim.", "zero.", *_BESIDE)
        mine = [n for n in shapes if n.startswith(self._model) and not n.startswith(foreign)]
        unexpected = [n for n in mine if n not in used]
        complaints = _told(("shapes differ", mismatched))
        if self._strict:
            complaints += _told(("missing from the checkpoint", missing), ("not in the model", unexpected))
        of = "model" if complaints else "optimizer"
        complaints += states
        if complaints:
            told = " | ".join(complaints) + self._way_out(shapes, of)
            raise CheckpointError(f"{self._folder} is of another {of}: {told}")
        if self._states is not None and STATE not in everything:
            self._check_options(everything, shapes)
        rng = f"zero.rng.{self._view.ranks.rank}"
        groups = [n for n in everything if n.startswith(f"{self._optimizer}param_groups.") and n not in shapes]
        objects = [name for name in (STATE, rng, *extra) if name in everything and name not in shapes]
        return Wanted((), tensors, objects + groups)

    def _way_out(self, shapes: Mapping[str, Any], of: str) -> str:
        if self.found or not shapes:
            return f"; build the {of} as it was saved" + (", or leave it out of load()" if of == "optimizer" else "")
        keys = sorted({name.split(".")[0] for name in shapes})
        return f"; its names begin with {', '.join(keys[:5])}: pass the model's prefix as model_key=, or '' for none"

    def _match(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[list[str], list[str], set[str]]:
        missing, mismatched, used = [], [], set()
        frozen = {id(p) for unit in self._view.handle.units if not unit.trainable for p in unit.wholes}
        for named in self._names:
            candidates = [self._model + clean_name(n) for n in named.names]
            present = [c for c in candidates if c in shapes]
            used.update(present)
            if not present and id(named.tensor) in frozen:
                self._absent.append(named)
            elif not present:
                missing.append(candidates[0])
            elif shapes[present[0]] != tuple(named.tensor.shape):
                mismatched.append(f"{present[0]}: saved {shapes[present[0]]}, model {tuple(named.tensor.shape)}")
            else:
                self.found[named.name] = present[0]
        return missing, mismatched, used

    def _match_states(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Finds each parameter's states. Returns texts on missing, unknown and mismatched ones, for an error."""
        missing, unknown, mismatched = list[str](), list[str](), list[str]()
        keeps = bool(self._states)
        scalars = self._view.store.scalar_names()
        saved: dict[str, list[str]] = {}
        for fqn in shapes:
            prefix, _, state = fqn.rpartition(".")
            saved.setdefault(prefix, []).append(state)
        handle, view = self._view.handle, self._view
        trained = {clean_name(n): (u, k) for u, k, n in view.parameters() if u.groups[k] is not None}
        for named in self._names:
            if named.is_buffer or clean_name(named.name) not in trained:
                continue
            unit, k = trained[clean_name(named.name)]
            group, shaped = unit.groups[k], unit.shaped(k)
            assert group is not None
            keeps |= bool(shaped)
            shape = unit.layout.slots[k].whole.shape
            wanted = (*handle.optimizer.state_names_of(group, shape), *shaped, *scalars)
            named_by_it = handle.optimizer.names_states(group, shape)  # all of its states or none
            for name in named.names:
                prefix = f"{self._optimizer}state.{clean_name(name)}"
                held = [s for s in saved.get(prefix, []) if s != "step"]
                if all_or_none := named_by_it and bool(held):
                    kept = {**dict.fromkeys(wanted, shape), **shaped}
                    mismatched += _unlike({s: shapes[f"{prefix}.{s}"] for s in held}, kept, prefix)
                else:
                    unknown += [f"{prefix}.{s}" for s in held if s not in wanted]
                if "step" in saved.get(prefix, []) or any(s in held for s in wanted):
                    if not all_or_none:
                        missing += [f"{prefix}.{s}" for s in wanted if s not in held and named.tensor.numel()]
                    self._state_name[named.name] = prefix
                    break
        if trained and keeps and not self._state_name:
            missing.append(f"{self._optimizer}state.* (it was saved without its optimizer; load it without one)")
        complaints = _told(("states have other names or shapes", mismatched))
        if self._strict:
            complaints += _told(("states missing from the checkpoint", missing))
            complaints += _told(("states that this optimizer does not keep", unknown))
        return complaints

    def decode(self, small: StreamingLoadPlanner) -> tuple[dict[str, Any], dict[str, int]]:
        """Returns zero-core's record of the run ({} if there is none), and the steps that each parameter had taken."""
        run = unpickle(small.objects[STATE]) if STATE in small.objects else {}
        if run and run["format"] > FORMAT:
            raise CheckpointError(
                f"{self._folder} has format {run['format']}, and this zero-core reads up to {FORMAT}: load it with the "
                "release that wrote it, or a later one"
            )
        left_out = run.get("left_out", {})  # None: unknown, so any frozen parameter may be absent
        if self._strict and left_out is not None:
            self._check_left_out(left_out)
        steps = {}
        for name, prefix in self._state_name.items():
            step = small.tensors.get(f"{prefix}.step")
            steps[name] = 1 if step is None else int(step)  # SGD has states and counts no steps
        return run, steps

    def _check_left_out(self, left_out: Mapping[str, tuple[int, ...]]) -> None:
        """Raises unless the model has all left-out parameters, and the checkpoint has all others."""
        mine = {clean_name(name): tuple(n.tensor.shape) for n in self._view.names for name in n.names}
        absent = [n for n in self._absent if not any(clean_name(name) in left_out for name in n.names)]
        others = [f"{n} (saved {s}, here {mine.get(n, 'none')})" for n, s in left_out.items() if mine.get(n) != s]
        complaints = _told(("missing from the checkpoint", self._names_of(absent)))
        complaints += _told(("parameters that were frozen at save() have another shape here", others))
        if complaints:
            raise CheckpointError(
                f"{self._folder} is of another model: {' | '.join(complaints)}; build the model as it was at "
                "save(): with the same shapes, and the same parameters frozen"
            )

    def _check_options(self, everything: Iterable[str], shapes: Container[str]) -> None:
        """Raises if another library saved options of groups, such as lr, that `foreign_groups` would leave out."""
        start = f"{self._optimizer}param_groups."
        saved = {n: n.removeprefix(start).rpartition(".")[0] for n in everything if n.startswith(start)}
        known = {clean_name(name) for named in self._names for name in named.names}
        if names := [n for n, where in saved.items() if n in shapes or not (where.isdigit() or where in known)]:
            raise CheckpointError(
                f"{self._folder} has optimizer options that cannot be read here, because they are tensors or belong to "
                f"no group and no parameter: {listed(names)}; read it with torch.distributed.checkpoint into a plain "
                "model and its optimizer, make them numbers in its groups and save both with get_state_dict. Or load "
                "the model alone, without the optimizer"
            )

    def _names_of(self, tensors: Sequence[Named]) -> list[str]:
        return [self._model + clean_name(named.name) for named in tensors]

    def scalars(self, small: StreamingLoadPlanner, steps: Mapping[str, int]) -> Iterator[tuple[ShardSlice, str, float]]:
        """Yields this rank's slices of parameters that have stepped, with their saved numbers besides the step."""
        for part in self._view.slices():
            if steps.get(part.name):
                for name in self._view.store.scalar_names():
                    if (value := small.tensors.get(f"{self._state_name[part.name]}.{name}")) is not None:
                        yield part, name, float(value)

    def slices(self, metadata: Metadata, steps: Mapping[str, int]) -> list[Sliced]:
        """Returns the slices that this rank reads, without states of parameters that never stepped: the optimizer makes
        those."""
        wanted = []
        for part in self._view.slices():
            if (fqn := self.found.get(part.name)) is not None:
                wanted.append(Sliced(fqn, part, MASTER))
            unit = self._view.handle.units[part.unit]
            if part.name in self._state_name and (steps[part.name] or unit.steps[part.index]):
                prefix = self._state_name[part.name]
                fqns = {s: f"{prefix}.{s}" for s in self._states or ()}
                wanted += [Sliced(f, part, s) for s, f in fqns.items() if f in metadata.state_dict_metadata]
                shaped = {f"{prefix}.{s}": (part.of(shape), s) for s, shape in self._view.shaped(part).items()}
                wanted += [Sliced(f, *each) for f, each in shaped.items() if f in metadata.state_dict_metadata]
        return wanted

    def foreign_groups(self, small: StreamingLoadPlanner) -> list[dict[str, Any]]:
        """Returns the groups that another library saved as PREFIX.param_groups.I.KEY, or flattened, for each parameter,
        as PREFIX.param_groups.NAME.KEY. Flattened options are returned in the optimizer's own groups.

        Raises CheckpointError where parameters of one group were saved with different options.
        """
        saved: dict[str, dict[str, Any]] = {}
        start = f"{self._optimizer}param_groups."
        first = {clean_name(name): clean_name(named.name) for named in self._names for name in named.names}
        for fqn, data in small.objects.items():
            if fqn.startswith(start):
                where, _, key = fqn.removeprefix(start).rpartition(".")
                saved.setdefault(first.get(where, where), {})[key] = unpickle(data)
        groups = [saved[i] for i in sorted((name for name in saved if name.isdigit()), key=int)]
        for group in groups_of(self._view):
            names = [name for name in group["params"] if name in saved]
            for name in names:
                a, b = saved[names[0]], saved[name]
                if unlike := [f"{k}={a.get(k)} and {b.get(k)}" for k in {**a, **b} if a.get(k) != b.get(k)]:
                    raise CheckpointError(
                        f"{self._folder} was saved with {listed(unlike)} for the parameters {names[0]!r} and {name!r}, "
                        "which are in one group here: build the optimizer with the groups it was saved with"
                    )
            groups += [{**saved[names[0]], "params": names}] if names else []
        return groups


def steps_of(view: ShardView) -> dict[str, int]:
    """Returns the steps that each optimized parameter has taken."""
    return {clean_name(name): unit.steps[k] for unit, k, name in view.parameters() if unit.groups[k] is not None}


def named_groups(handle: Any) -> list[dict[str, Any]]:
    """Returns the optimizer's groups, with parameters by name. handle: the model's `shard.Handle`."""
    names = {id(p): s.whole.name for u in handle.units for p, s in zip(u.wholes, u.layout.slots, strict=True)}
    groups = handle.optimizer.param_groups
    return [without_functions(group) | {"params": [names[id(p)] for p in group["params"]]} for group in groups]


def cleaned(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns named groups with the names of `clean_name`."""
    return [group | {"params": [clean_name(name) for name in group["params"]]} for group in groups]


def groups_of(view: ShardView) -> list[dict[str, Any]]:
    """Returns the optimizer's groups, with parameters by clean name."""
    return cleaned(named_groups(view.handle))


def _told(*lists: tuple[str, Sequence[str]]) -> list[str]:
    return [f"{what}: {listed(names)}" for what, names in lists if names]


def _unlike(saved: Mapping[str, Any], kept: Mapping[str, Any], prefix: str) -> list[str]:
    """Returns the states of one parameter that differ between a checkpoint and an optimizer that names its states."""
    names = [name for name in {**saved, **kept} if saved.get(name) != kept.get(name)]
    return [f"{prefix}.{n}: saved {saved.get(n, 'none')}, here {kept.get(n, 'none')}" for n in names]


def options_of(view: ShardView, saved: list[dict[str, Any]] | None, *, strict: bool) -> list[dict[str, Any]]:
    """Returns, for each live group, the checkpoint's options of the same parameters; {} leaves the group unchanged."""
    by_members = {frozenset(group.get("params", ())): group for group in saved or ()}
    trained = set(steps_of(view))  # another library may have left the others out of the groups
    by_trained = {members & trained: group for members, group in by_members.items() if members & trained}
    found = []
    for group in groups_of(view):
        members = frozenset(group["params"])
        options = by_members.get(members) or by_trained.get(members & trained, {})
        if strict and saved is not None and not options:
            raise CheckpointError(
                f"an optimizer group here has the {len(group['params'])} parameters {listed(group['params'])}, and no "
                "group of the checkpoint has exactly these: build the optimizer with the groups it was saved with"
            )
        found.append({k: v for k, v in options.items() if k != "params"})
    return found


def unpickle(stream: io.BytesIO) -> Any:
    stream.seek(0)
    return torch.load(stream, map_location="cpu", weights_only=False)
