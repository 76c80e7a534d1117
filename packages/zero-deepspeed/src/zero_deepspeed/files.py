"""A checkpoint of DeepSpeed's: where in its files each parameter and each state lies.

Owns the layouts: ZeRO-1 and -2, ZeRO-3, and what ds_to_universal made of either. Reads no tensor: every parameter and
state is a `Source`, which reads the elements that it is asked for. Which files there are is `folders`'s.

[Note: what lies where]
A flat group is what DeepSpeed updates as one tensor: a group of the optimizer at stages 1 and 2, a part of one
(sub_group_size) at stage 3. `param_shapes` has its parameters in order.

    stages 1, 2    rank 0 | rank 1 | ...      one flat tensor, cut into equal parts; the last ones end in padding
    stage 3        a0 b0 | a1 b1 | ...        each parameter cut into equal parts; the last one of each ends in padding
    universal      zero/NAME/STATE.pt         each parameter whole
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_core.building.keys import Part
from zero_core.building.replay import Source
from zero_core.checkpoint.pretrained import FileValues
from zero_core.checkpoint.safetensors import Entry, Reader

from .folders import RankFiles, tagged
from .pickles import FilesError, Stored

__all__ = ["Checkpoint", "Parameter", "Saved", "open_checkpoint"]

_OURS = {  # what DeepSpeed itself has in a file of model states; all else is the client's
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps"),
    *("global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version"),
    *("universal_checkpoint_info", "ds_autoep_layers", "autoep_layers", "num_experts"),
}
_HOW = {"params", "step", "foreach", "fused", "capturable", "differentiable"}  # not what is computed


@dataclass(frozen=True)
class Parameter:
    """What a checkpoint has of one parameter. values: the fp32 master, or the weights of one that is not trained.

    states: the optimizer's, of the parameter's shape. step: steps it has taken, None if the optimizer counts none.
    group: its group in the optimizer, None if it is not trained.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Source
    states: Mapping[str, Source] = field(default_factory=dict)
    step: int | None = None
    group: int | None = None


@dataclass(frozen=True)
class Saved:
    """What a checkpoint says of its run. client_state: what save_checkpoint was given, plain data and tensors only.

    folder: the tag's. version: of the DeepSpeed that wrote it, on world_size ranks at this stage.
    """

    folder: Path
    stage: int
    world_size: int
    version: str
    client_state: dict[str, Any]
    global_steps: int
    skipped_steps: int
    global_samples: int


@dataclass(frozen=True)
class Checkpoint(Saved):
    """What a folder holds, by name. groups: options of the optimizer's groups, and the names of their parameters.

    aliases: further name of a tied parameter -> its name in `parameters`. loss_scale: DeepSpeed's attributes of it.
    buffers are rank 0's. complete: parameters that are not trained were not left out.
    """

    parameters: Mapping[str, Parameter]
    aliases: Mapping[str, str]
    buffers: Mapping[str, Tensor]
    groups: Sequence[Mapping[str, Any]]
    scheduler: dict[str, Any] | None
    loss_scale: Mapping[str, Any] | None
    config: Mapping[str, Any]
    complete: bool


@dataclass
class _Flat:
    """One flat group: its parameters in order, and of each rank its tensors ("fp32", "exp_avg" ...) and its step."""

    shapes: Mapping[str, tuple[int, ...]]
    group: int
    tensors: list[dict[str, Stored]]
    step: int | None


def open_checkpoint(folder: str | Path, tag: str | None = None, *, inert: Iterable[str] = ()) -> Checkpoint:
    """Opens a folder that DeepSpeed's save_checkpoint or ds_to_universal wrote, and checks that all of it is there.

    tag: the checkpoint in it; the one that `latest` names by default. folder may also be a checkpoint itself. inert:
    see `pickles.read_plain`. Raises FilesError, which names the file, for what is absent, damaged, mixed or refused.
    """
    where = tagged(Path(folder), tag)
    try:
        return _Opened(RankFiles(where, tuple(inert))).checkpoint()
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise FilesError(
            f"{where} is not laid out as DeepSpeed 0.19 does it ({type(error).__name__}: {error}): load it with the "
            "DeepSpeed that wrote it, and save it anew with a current one"
        ) from error


class _Opened:
    """A checkpoint being read: what its files hold, and the pieces that parameters are made of."""

    def __init__(self, files: RankFiles) -> None:
        self.folder, self._read_plain = files.folder, files.read
        self.universal, self.partitioned, self.world_size = files.universal, files.partitioned, files.world_size
        self.first, self.models, self.states = files.first, files.models, files.states
        self._reader, self._entries = Reader(), dict[str, Entry]()
        self._swap_files: dict[Path, set[str]] = {}

    def checkpoint(self) -> Checkpoint:
        first = self.first
        optimizer = self._common()
        trained, groups = self._trained(optimizer)
        aliases = dict(first.get("shared_params") or {})
        frozen = dict(self._frozen({*trained, *aliases, *first["buffer_names"]}))
        reader, module, scale = self._reader, first["module"], optimizer.get("loss_scaler")
        return Checkpoint(
            folder=self.folder,
            stage=3 if self.partitioned else int(optimizer.get("zero_stage", 1)),
            world_size=self.world_size,
            version=str(first.get("ds_version")),
            parameters=trained | frozen,
            aliases={alias: name for alias, name in aliases.items() if name in trained or name in frozen},
            buffers={name: module[name].read(reader) for name in first["buffer_names"] if name in module},
            groups=groups,
            scheduler=self._values(first["lr_scheduler"]),
            loss_scale=scale if isinstance(scale, dict) else None,
            client_state={key: self._values(value) for key, value in first.items() if key not in _OURS},
            global_steps=int(first["global_steps"]),
            skipped_steps=int(first["skipped_steps"]),
            global_samples=int(first.get("global_samples", 0)),
            config=first.get("ds_config") or {},
            complete=bool(frozen) or first.get("frozen_param_shapes") is not None,  # stage 1 writes none either way
        )

    def _common(self) -> Mapping[str, Any]:
        """The optimizer's part of the checkpoint: rank 0's, which the universal one has alone."""
        if not self.universal:
            return dict(self.states[0]["optimizer_state_dict"])
        section = (self.first.get("ds_config") or {}).get("zero_optimization") or {}
        if not self.partitioned and self.world_size > 1 and section.get("round_robin_gradients"):
            raise FilesError(
                f"{self.folder}: the run had round_robin_gradients on {self.world_size} ranks, for which "
                "ds_to_universal gives parameters each other's values. Read the checkpoint that it was made of instead"
            )
        path = self.folder / "zero" / "optimizer_state.pt"
        if not path.is_file():
            raise FilesError(f"{path} is not there: ds_to_universal did not end. Run it again")
        return dict(self._read_plain(path))

    def _trained(self, optimizer: Mapping[str, Any]) -> tuple[dict[str, Parameter], list[dict[str, Any]]]:
        shapes = [{n: tuple(shape) for n, shape in each.items()} for each in self.first["param_shapes"]]
        nested = optimizer.get("optimizer_state_dict" if self.partitioned else "base_optimizer_state", optimizer)
        options = nested["param_groups"] if isinstance(nested, dict) else [{"params": [i]} for i in range(len(shapes))]
        of_group = {flat: g for g, group in enumerate(options) for flat in group["params"]}
        if sorted(of_group) != list(range(len(shapes))):
            raise FilesError(
                f"{self.folder}: the optimizer has {len(of_group)} flat groups, and param_shapes {len(shapes)}: files "
                "of two checkpoints, or of another generation of DeepSpeed"
            )
        found: dict[str, Parameter] = {}
        for index, of_flat in enumerate(shapes):
            if self.universal:
                found |= self._universal(of_flat, of_group[index], nested, index)
            else:
                found |= self._cut(self._flat(of_flat, of_group[index], index), index)
        for swapped, used in self._swap_files.items():
            masters = {path.name for path in swapped.glob("*.tensor.swp") if "-" not in path.name}
            if masters != used:
                self._refuse_swapped(f"{swapped} has {len(masters)} flat groups ({min(masters ^ used)} ...)")
        members: list[list[str]] = [[] for _ in options]
        for name, parameter in found.items():
            members[parameter.group or 0].append(name)
        groups = [
            {key: self._values(value) for key, value in group.items() if key not in _HOW} | {"params": names}
            for group, names in zip(options, members, strict=True)
        ]
        return found, groups

    def _flat(self, shapes: dict[str, tuple[int, ...]], group: int, index: int) -> _Flat:
        tensors, steps = [], set()
        for rank, file in enumerate(self.states):
            saved = file["optimizer_state_dict"]
            count = saved["partition_count"]
            if (count[index] if isinstance(count, list) else count) != self.world_size:
                raise FilesError(
                    f"{self.folder}: {count} ranks share a parameter and {self.world_size} saved the checkpoint (MiCS, "
                    "hpZ or experts), which is not read here: save it with one group of all ranks"
                )
            key = "fp32_flat_groups" if self.partitioned else "single_partition_of_fp32_groups"
            if key not in saved:
                raise FilesError(
                    f"{self.folder}: the optimizer's file of rank {rank} has no {key}: written by another generation "
                    f"of DeepSpeed ({file.get('ds_version', 'unknown')})"
                )
            nested = saved["optimizer_state_dict" if self.partitioned else "base_optimizer_state"]
            state = nested[index] if isinstance(nested, list) else nested["state"].get(index, {})
            own = {"fp32": saved[key][index]} | {n: v for n, v in state.items() if isinstance(v, Stored) and v.shape}
            if self.partitioned and own["fp32"].numel == 0 and (self.folder / "offloaded_tensors").is_dir():
                own = self._swapped(rank, shapes, own)
            tensors.append(own)
            steps.add(self._step(state, saved, nested, group))
        if len(steps) > 1:
            raise FilesError(f"{self.folder}: ranks have taken different steps ({steps}): files of two checkpoints")
        return _Flat(shapes, group, [self._named(each) for each in tensors], steps.pop())

    def _swapped(self, rank: int, shapes: dict[str, tuple[int, ...]], empty: Mapping[str, Stored]) -> dict[str, Stored]:
        """A flat group whose masters and states were on NVMe: copies of DeepSpeed's swap files.

        They are called by the numbers of the first and last parameter, which follow the order of the model.
        """
        others = {*self.first["buffer_names"], *(self.first.get("shared_params") or ())}
        known = [name for name in self.first["module"] if name not in others]
        numel = sum(-(-math.prod(shape) // self.world_size) for shape in shapes.values())
        called = "_".join(
            str(known.index(name)) if name in known else "?" for name in (*shapes,)[:: len(shapes) - 1 or 1]
        )
        called = called if "_" in called else f"{called}_{called}"
        folder = self.folder / "offloaded_tensors" / f"rank{rank:02d}"
        self._swap_files.setdefault(folder, set()).add(f"{called}.tensor.swp")
        found = {}
        for state, stored in empty.items():
            path = folder / f"{'' if state == 'fp32' else f'{state}-'}{called}.tensor.swp"
            entry = Entry(path, stored.entry.dtype, (numel,), 0)
            if not path.is_file() or path.stat().st_size < entry.nbytes:
                self._refuse_swapped(f"{path}, with {entry.nbytes:,} bytes, is not there")
            found[state] = Stored(entry, (1,))
        return found

    def _refuse_swapped(self, fact: str) -> None:
        raise FilesError(
            f"{fact}: masters and states were on NVMe, and DeepSpeed numbers its swap files by an order of parameters "
            "that is not the model's here, or a file is absent. Copy the folders of all ranks to one place. If they "
            "are, load the checkpoint with DeepSpeed and save its weights with engine.save_16bit_model"
        )

    def _step(self, state: Mapping[str, Any], saved: Mapping[str, Any], nested: Any, group: int) -> int | None:
        step = state.get("step")
        if step is None:
            options = nested["param_groups"][group] if isinstance(nested, dict) else {}
            step = saved.get("base_optimizer_state_step", options.get("step"))
        return None if step is None else int(self._values(step))

    def _named(self, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
        """States as torch's optimizers call them: DeepSpeed's Adagrad has another name, its Lion one that is unused."""
        kind = str((self.first.get("ds_config") or {}).get("optimizer", {}).get("type", "")).lower()
        found = dict(tensors)
        if kind == "lion":
            found.pop("exp_avg_sq", None)
        if "exp_avg_sq" in found and "exp_avg" not in found:
            found["sum"] = found.pop("exp_avg_sq")
        return found

    def _cut(self, flat: _Flat, index: int) -> dict[str, Parameter]:
        places = self._places_3(flat, index) if self.partitioned else self._places_1(flat, index)
        for rank, tensors in enumerate(flat.tensors):
            for state, stored in tensors.items():
                self._entries[f"{state} {index} {rank}"] = stored.entry
        states = [state for state in flat.tensors[0] if state != "fp32"]
        found = {}
        for (name, shape), pieces in zip(flat.shapes.items(), places, strict=True):
            sources = {s: self._pieced(f"{s} {index}", pieces) for s in ("fp32", *states)}
            dtype = flat.tensors[0]["fp32"].entry.dtype
            found[name] = Parameter(shape, dtype, sources.pop("fp32"), sources, flat.step, flat.group)
        return found

    def _pieced(self, key: str, pieces: Sequence[tuple[int, int, int]]) -> Source:
        return FileValues([Part(f"{key} {rank}", at, numel) for rank, at, numel in pieces], self._reader, self._entries)

    def _places_1(self, flat: _Flat, index: int) -> Iterator[list[tuple[int, int, int]]]:
        """For each parameter its (rank, start, elements): one tensor over all ranks, cut where a rank's part ends."""
        paddings = self.states[0]["optimizer_state_dict"].get("param_alignment_paddings")
        gaps = paddings[index] if paddings else [0] * len(flat.shapes)
        lengths = [tensors["fp32"].numel for tensors in flat.tensors]
        wanted, align = sum(map(math.prod, flat.shapes.values())) + sum(gaps), 2 * self.world_size
        aligned = -(-wanted // align) * align
        self._check_length(index, wanted, sum(lengths), up_to=aligned)
        whole = lengths[0] if any(lengths[1:]) else aligned // self.world_size  # the last part is saved unpadded
        self._check_states(flat, index, lengths, whole)
        at = 0
        for shape, gap in zip(flat.shapes.values(), gaps, strict=True):
            end, pieces = at + math.prod(shape), []
            for rank in range(at // whole, -(-end // whole)) if end > at else ():
                low, high = max(at, rank * whole), min(end, (rank + 1) * whole)
                pieces.append((rank, low - rank * whole, high - low))
            yield pieces
            at = end + gap

    def _places_3(self, flat: _Flat, index: int) -> Iterator[list[tuple[int, int, int]]]:
        """The same where each parameter is cut: rank r has its elements from r * ceil(numel / ranks) on."""
        parts = [-(-math.prod(shape) // self.world_size) for shape in flat.shapes.values()]
        for rank, tensors in enumerate(flat.tensors):
            self._check_length(index, sum(parts), tensors["fp32"].numel, rank=rank)
        self._check_states(flat, index, [sum(parts)] * self.world_size, sum(parts))
        for shape, part, at in zip(flat.shapes.values(), parts, itertools.accumulate([0, *parts]), strict=False):
            numel = math.prod(shape)
            held = [(rank, at, min(part, numel - rank * part)) for rank in range(self.world_size)]
            yield [each for each in held if each[2] > 0]

    def _check_length(self, index: int, wanted: int, found: int, *, up_to: int = 0, rank: int | None = None) -> None:
        if not wanted <= found <= max(wanted, up_to):
            of = "" if rank is None else f" of rank {rank}"
            raise FilesError(
                f"{self.folder}: flat group {index}{of} has {found} elements, and its parameters {wanted}: files of "
                "two checkpoints, or of another generation of DeepSpeed"
            )

    def _check_states(self, flat: _Flat, index: int, lengths: Sequence[int], whole: int) -> None:
        kept = set(flat.tensors[0])
        for rank, (tensors, length) in enumerate(zip(flat.tensors, lengths, strict=True)):
            wrong = [n for n, v in tensors.items() if not length <= v.numel <= whole] or sorted(kept ^ set(tensors))
            if wrong:
                raise FilesError(
                    f"{self.folder}: state {wrong[0]} of flat group {index} of rank {rank} has not the {length} "
                    "elements of its parameters: an optimizer whose states are not element by element, or files of "
                    "two checkpoints"
                )

    def _universal(
        self, shapes: Mapping[str, tuple[int, ...]], group: int, nested: Mapping[str, Any], index: int
    ) -> dict[str, Parameter]:
        found = {}
        for name, shape in shapes.items():
            folder = self.folder / "zero" / name
            stored = {path.stem: self._read_plain(path) for path in sorted(folder.glob("*.pt"))}
            step = stored.pop("step", None)
            if step is None:
                step = nested.get("state", {}).get(index, {}).get("step")
            tensors = {key: self._universal_tensor(folder / f"{key}.pt", v, shape) for key, v in stored.items()}
            if "fp32" not in tensors:
                raise FilesError(f"{folder / 'fp32.pt'} is not there: ds_to_universal did not end. Run it again")
            sources = {key: each.source(self._reader) for key, each in self._named(tensors).items()}
            dtype = tensors["fp32"].entry.dtype
            count = None if step is None else int(self._values(step))
            found[name] = Parameter(shape, dtype, sources.pop("fp32"), sources, count, group)
        return found

    def _universal_tensor(self, path: Path, saved: Any, shape: tuple[int, ...]) -> Stored:
        more = sorted(set(saved) - {"param", "cat_dim"}) if isinstance(saved, dict) else []
        stored = saved.get("param") if isinstance(saved, dict) else saved
        if more or not isinstance(stored, Stored):
            raise FilesError(f"{path} has {more or type(stored).__name__}: slices of a layout that is not read here")
        if stored.numel != math.prod(shape):
            raise FilesError(
                f"{path} has {stored.numel} elements, and its parameter the shape {shape}: run ds_to_universal again"
            )
        return stored

    def _frozen(self, others: Container[str]) -> Iterator[tuple[str, Parameter]]:
        """Parameters that are not trained: whole in the module at stages 1 and 2, cut like the others at stage 3."""
        if not self.partitioned:
            for name, stored in self.first["module"].items():
                if name not in others and isinstance(stored, Stored):
                    yield name, Parameter(stored.shape, stored.entry.dtype, stored.source(self._reader))
            return
        for name, size in (self.first.get("frozen_param_shapes") or {}).items():
            shape = tuple(size)
            part = -(-math.prod(shape) // self.world_size)
            pieces = []
            for rank, model in enumerate(self.models):
                stored = model["frozen_param_fragments"][name]
                numel = min(part, math.prod(shape) - rank * part)
                if stored.numel < numel:
                    raise FilesError(f"{self.folder}: rank {rank} has {stored.numel} elements of {name}, not {numel}")
                self._entries[f"{name} {rank}"] = stored.entry
                pieces.append((rank, 0, max(0, numel)))
            yield name, Parameter(shape, stored.entry.dtype, self._pieced(name, [p for p in pieces if p[2]]))

    def _values(self, value: Any) -> Any:
        """Plain data with its tensors read."""
        if isinstance(value, Stored):
            return value.read(self._reader)
        if isinstance(value, dict):
            return {key: self._values(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            return type(value)(self._values(each) for each in value)
        return value
