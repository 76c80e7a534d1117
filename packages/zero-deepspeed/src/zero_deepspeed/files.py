"""A checkpoint of DeepSpeed's: where in its files each parameter and each state lies.

Owns the layouts of ZeRO-1 and -2, and of ZeRO-3. Reads no tensor: every parameter and state is `Pieces`, which read
the elements that they are asked for. Not here: which files belong to a checkpoint (in folders.py).

[Note: layouts]
A flat group is what DeepSpeed updates as one tensor: a group of the optimizer at stages 1 and 2, a part of one
(sub_group_size) at stage 3. `param_shapes` has its parameters in order.

    stages 1, 2    rank 0 | rank 1 | ...      one flat tensor, cut into equal parts; the last ones end in padding
    stage 3        a0 b0 | a1 b1 | ...        each parameter cut into equal parts; the last one of each ends in padding
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .folders import RankFiles, tagged
from .pickles import FilesError

__all__ = ["Checkpoint", "Parameter", "Pieces", "Saved", "open_checkpoint"]

_OURS = {  # what DeepSpeed itself has in a file of model states; all else is the client's
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps"),
    *("global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version"),
    *("universal_checkpoint_info", "ds_autoep_layers", "autoep_layers", "num_experts"),
}
_HOW = {"params", "step", "foreach", "fused", "capturable", "differentiable"}  # they change no value


@dataclass(frozen=True)
class Pieces:
    """Parts of a parameter's values in order, each mapped from a file. Together they are the row-major parameter."""

    parts: Sequence[Tensor]

    def read(self, start: int, stop: int) -> Tensor:
        """Returns the elements [start, stop)."""
        return torch.cat(self.within(start, stop))

    def within(self, start: int, stop: int) -> list[Tensor]:
        """Returns views of the elements [start, stop), one for each part: an empty one where it has none of them."""
        found, at = [], 0
        for part in self.parts:
            found.append(part.reshape(-1)[max(start - at, 0) : max(stop - at, 0)])
            at += part.numel()
        return found


@dataclass(frozen=True)
class Parameter:
    """One parameter's data. values: the fp32 master, or the weights of a frozen one.

    states: the optimizer's, of the parameter's shape. step: steps it has taken, None if the optimizer counts none.
    group: its group in the optimizer, None if it is not trained.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Pieces
    states: Mapping[str, Pieces] = field(default_factory=dict)
    step: int | None = None
    group: int | None = None


@dataclass(frozen=True)
class Saved:
    """The run of a checkpoint. client_state: as given to save_checkpoint, plain data and tensors only.

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
    """A checkpoint's values by name. groups: options of the optimizer's groups, and the names of their parameters.

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


def open_checkpoint(folder: str | Path, tag: str | None = None, *, inert: Iterable[str] = ()) -> Checkpoint:
    """Opens a folder that DeepSpeed's save_checkpoint wrote, and checks that all of it is there.

    tag: the checkpoint in it; the one that `latest` names by default. folder may also be a checkpoint itself. inert:
    see `pickles.read_plain`. Raises FilesError, which names the file, if one is absent, damaged, mixed or refused.
    """
    where = tagged(Path(folder), tag)
    try:
        return _Opened(where, tuple(inert)).checkpoint()
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise FilesError(
            f"{where} is not laid out as DeepSpeed 0.19 does it ({type(error).__name__}: {error}): load it with the "
            "DeepSpeed that wrote it, and save it anew with a current one"
        ) from error


class _Opened(RankFiles):
    """Finds the pieces of each parameter in the files of a checkpoint."""

    def __init__(self, folder: Path, inert: tuple[str, ...]) -> None:
        super().__init__(folder, inert)
        self._swap_files: dict[Path, set[str]] = {}

    def checkpoint(self) -> Checkpoint:
        first = self.first
        optimizer = self.states[0]["optimizer_state_dict"]
        trained, groups = self._trained(optimizer)
        aliases = dict(first.get("shared_params") or {})
        frozen = dict(self._frozen({*trained, *aliases, *first["buffer_names"]}))
        module, scale = first["module"], optimizer.get("loss_scaler")
        return Checkpoint(
            folder=self.folder,
            stage=3 if self.partitioned else int(optimizer.get("zero_stage", 1)),
            world_size=self.world_size,
            version=str(first.get("ds_version")),
            parameters=trained | frozen,
            aliases={alias: name for alias, name in aliases.items() if name in trained or name in frozen},
            buffers={name: module[name].clone() for name in first["buffer_names"] if name in module},
            groups=groups,
            scheduler=_read(first["lr_scheduler"]),
            loss_scale=scale if isinstance(scale, dict) else None,
            client_state={key: _read(value) for key, value in first.items() if key not in _OURS},
            global_steps=int(first["global_steps"]),
            skipped_steps=int(first["skipped_steps"]),
            global_samples=int(first.get("global_samples", 0)),
            config=first.get("ds_config") or {},
            complete=bool(frozen) or first.get("frozen_param_shapes") is not None,  # stage 1 writes none either way
        )

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
            found |= self._cut(of_flat, of_group[index], index)
        for swapped, used in self._swap_files.items():
            masters = {path.name for path in swapped.glob("*.tensor.swp") if "-" not in path.name}
            if masters != used:
                self._refuse_swapped(f"{swapped} has {len(masters)} flat groups ({min(masters ^ used)} ...)")
        members: list[list[str]] = [[] for _ in options]
        for name, parameter in found.items():
            members[parameter.group or 0].append(name)
        groups = [
            {key: _read(value) for key, value in group.items() if key not in _HOW} | {"params": names}
            for group, names in zip(options, members, strict=True)
        ]
        return found, groups

    def _cut(self, shapes: dict[str, tuple[int, ...]], group: int, index: int) -> dict[str, Parameter]:
        """The parameters of one flat group, each of the pieces that the ranks hold of it."""
        tensors, step = self._flat(shapes, group, index)
        found, at = {}, 0
        for (name, shape), gap in zip(shapes.items(), self._checked(shapes, tensors, index), strict=True):
            numel, sources = math.prod(shape), {}
            part = -(-numel // self.world_size)
            for state in tensors[0]:
                ranks = [each[state].reshape(-1) for each in tensors]
                if self.partitioned:
                    held = [max(0, min(part, numel - rank * part)) for rank in range(self.world_size)]
                    sources[state] = Pieces([each[at : at + count] for each, count in zip(ranks, held, strict=True)])
                else:
                    sources[state] = Pieces(Pieces(ranks).within(at, at + numel))
            dtype = tensors[0]["fp32"].dtype
            found[name] = Parameter(shape, dtype, sources.pop("fp32"), sources, step, group)
            at += part if self.partitioned else numel + gap
        return found

    def _flat(
        self, shapes: dict[str, tuple[int, ...]], group: int, index: int
    ) -> tuple[list[dict[str, Tensor]], int | None]:
        """Of each rank its tensors of a flat group ("fp32", "exp_avg" ...), and the step."""
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
            own = {"fp32": saved[key][index]} | {n: v for n, v in state.items() if isinstance(v, Tensor) and v.dim()}
            if self.partitioned and own["fp32"].numel() == 0 and (self.folder / "offloaded_tensors").is_dir():
                own = self._swapped(rank, shapes, own)
            tensors.append(own)
            steps.add(self._step(state, saved, nested, group))
        if len(steps) > 1:
            raise FilesError(f"{self.folder}: ranks have taken different steps ({steps}): files of two checkpoints")
        return [self._named(each) for each in tensors], steps.pop()

    def _swapped(self, rank: int, shapes: dict[str, tuple[int, ...]], empty: Mapping[str, Tensor]) -> dict[str, Tensor]:
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
            nbytes = numel * stored.itemsize
            if not path.is_file() or path.stat().st_size < nbytes:
                self._refuse_swapped(f"{path}, with {nbytes:,} bytes, is not there")
            found[state] = torch.from_file(str(path), shared=False, size=numel, dtype=stored.dtype)
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
        return None if step is None else int(step)

    def _named(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """States as torch's optimizers call them: DeepSpeed's Adagrad has another name, its Lion one that is unused."""
        kind = str((self.first.get("ds_config") or {}).get("optimizer", {}).get("type", "")).lower()
        found = dict(tensors)
        if kind == "lion":
            found.pop("exp_avg_sq", None)
        if "exp_avg_sq" in found and "exp_avg" not in found:
            found["sum"] = found.pop("exp_avg_sq")
        return found

    def _checked(
        self, shapes: dict[str, tuple[int, ...]], tensors: list[dict[str, Tensor]], index: int
    ) -> Sequence[int]:
        """Compares the elements of each rank with those of its parameters. Returns the gap behind each parameter."""
        sizes = [math.prod(shape) for shape in shapes.values()]
        lengths = [each["fp32"].numel() for each in tensors]
        paddings = self.states[0]["optimizer_state_dict"].get("param_alignment_paddings")
        gaps = paddings[index] if paddings and not self.partitioned else [0] * len(sizes)
        if self.partitioned:
            whole = sum(-(-size // self.world_size) for size in sizes)
            wanted, right = [whole] * self.world_size, lengths == [whole] * self.world_size
        else:  # one tensor over all ranks, whose end may be padded; the last part of masters is saved unpadded
            total, numel, align = sum(lengths), sum(sizes) + sum(gaps), 2 * self.world_size
            aligned = -(-numel // align) * align
            whole = lengths[0] if any(lengths[1:]) else aligned // self.world_size
            wanted = [max(0, min(whole, total - rank * whole)) for rank in range(self.world_size)]
            right = numel <= total <= aligned and lengths == wanted
        if not right:
            raise FilesError(
                f"{self.folder}: flat group {index} has {sum(lengths)} elements, in parts of {lengths}, and its "
                f"parameters {sum(sizes)}: files of two checkpoints, or of another generation of DeepSpeed"
            )
        kept = set(tensors[0])
        for rank, (held, length) in enumerate(zip(tensors, wanted, strict=True)):
            wrong = [n for n, v in held.items() if not length <= v.numel() <= whole] or sorted(kept ^ set(held))
            if wrong:
                raise FilesError(
                    f"{self.folder}: state {wrong[0]} of flat group {index} of rank {rank}: expected {length} "
                    "elements, those of its parameters. Its states are not element by element, or these are files of "
                    "two checkpoints"
                )
        return gaps

    def _frozen(self, others: Container[str]) -> Iterator[tuple[str, Parameter]]:
        """Parameters that are not trained: whole in the module at stages 1 and 2, cut like the others at stage 3."""
        if not self.partitioned:
            for name, stored in self.first["module"].items():
                if name not in others and isinstance(stored, Tensor):
                    yield name, Parameter(tuple(stored.shape), stored.dtype, Pieces([stored]))
            return
        for name, size in (self.first.get("frozen_param_shapes") or {}).items():
            shape = tuple(size)
            part = -(-math.prod(shape) // self.world_size)
            pieces = []
            for rank, model in enumerate(self.models):
                stored, numel = model["frozen_param_fragments"][name], min(part, math.prod(shape) - rank * part)
                if stored.numel() < numel:
                    raise FilesError(f"{self.folder}: rank {rank} has {stored.numel()} elements of {name}, not {numel}")
                pieces.append(stored.reshape(-1)[: max(0, numel)])
            yield name, Parameter(shape, stored.dtype, Pieces(pieces))


def _read(value: Any) -> Any:
    """Plain data with its tensors in memory."""
    return tree_map_only(Tensor, Tensor.clone, value)
