"""Opens a DeepSpeed checkpoint: finds each parameter and each state in the files of the ranks.

Owns the layouts of ZeRO-1 and -2, and of ZeRO-3. Reads no tensor: every parameter and state is `Pieces`, which read
the elements that they are asked for. Not here: the format of one file (in pickles.py).

[Note: layouts]
DeepSpeed updates a flat group as one tensor: a group of the optimizer at stages 1 and 2, a part of one (sub_group_size)
at stage 3. `param_shapes` has its parameters in order.

    stages 1, 2    rank 0 | rank 1 | ...      one flat tensor, cut into equal parts; the last ones end in padding
    stage 3        a0 b0 | a1 b1 | ...        each parameter cut into equal parts; the last one of each ends in padding
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from zero_core.checkpoint.match import FORMAT
from zero_core.checkpoint.shards import clean_name

from .pickles import FilesError, read_plain

_OURS = {  # DeepSpeed's own keys in a file of model states; all others are client state
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps"),
    *("global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version"),
    *("universal_checkpoint_info", "ds_autoep_layers", "autoep_layers", "num_experts"),
}
_HOW = {"params", "step", "foreach", "fused", "capturable", "differentiable"}  # they change no value


@dataclass(frozen=True)
class Pieces:
    """Parts of a tensor's values in order, each mapped from a file. Together they are the row-major tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Sequence[Tensor]

    def read(self, start: int, stop: int) -> Tensor:
        """Returns the elements [start, stop)."""
        return torch.cat(_within(self.parts, start, stop)).to(self.dtype)


def _within(parts: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
    """Returns views of the elements [start, stop), one for each part. A part without any gets an empty view."""
    found, at = [], 0
    for part in parts:
        found.append(part.reshape(-1)[max(start - at, 0) : max(stop - at, 0)])
        at += part.numel()
    return found


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's values under the names of a zero-core checkpoint, and its run.

    folder: the tag's. version: of the DeepSpeed that wrote it, on world_size ranks at this stage. client_state: as
    given to save_checkpoint, plain data and tensors only. step: global_steps less those that an overflow skipped.
    tensors: "model.NAME", the fp32 master, frozen weights or rank 0's buffer, and "optim.state.NAME.STATE". aliases:
    further name of a tied parameter -> its name in `tensors`. run: the other data of zero_core.checkpoint.save.
    """

    folder: Path
    stage: int
    world_size: int
    version: str
    client_state: dict[str, Any]
    step: int
    global_steps: int
    skipped_steps: int
    global_samples: int
    tensors: Mapping[str, Pieces]
    aliases: Mapping[str, str]
    parameters: tuple[str, ...]
    run: Mapping[str, Any]


def open_checkpoint(
    folder: str | Path, tag: str | None = None, *, inert: Iterable[str] = (), live: Container[str] = ()
) -> Checkpoint:
    """Opens a folder that DeepSpeed's save_checkpoint wrote, and checks that all of it is there.

    tag: the checkpoint in it; the one that `latest` names by default. folder may also be a checkpoint itself. inert:
    see `pickles.read_plain`. live: names in the model. Those of the checkpoint lose their "module." if none of them is
    among these. Raises FilesError, which names the file, if one is absent, damaged, mixed or refused.
    """
    where = Path(folder)
    if tag is not None or not any(where.glob("*_model_states.pt")):
        where = tagged(where, tag)
    try:
        return _Opened(where, tuple(inert)).checkpoint(live)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise FilesError(
            f"{where} does not have the layout of DeepSpeed 0.19 ({type(error).__name__}: {error}). It is damaged, or "
            "of another version. Choose another one with tag=. Or load this one with DeepSpeed 0.19 and save it again"
        ) from error


def tagged(folder: Path, tag: str | None) -> Path:
    """Returns the folder of the checkpoint `tag`, or of the one that `latest` names. Raises FilesError."""
    latest = folder / "latest"
    if tag is None and latest.is_file():
        tag = latest.read_text(encoding="utf-8", errors="replace").strip()
    if tag and (folder / tag).is_dir():
        return folder / tag
    tags = ", ".join(sorted(path.name for path in folder.glob("*") if path.is_dir())) or "none"
    raise FilesError(
        f"{folder} has no {'file `latest`' if tag is None else f'tag {tag!r}'}. Tags found there: {tags}. Name the "
        "folder that save_checkpoint was given, and with tag= one of the tags found in that folder"
    )


class _Opened:
    """The files of one save, read. Finds the pieces of each parameter in them.

    partitioned: of stage 3. models, states: of each rank. first: models[0]. shapes: of each flat group's parameters.
    inner: each rank's state_dict of the inner optimizer, or a list of the states of each flat group.
    """

    def __init__(self, folder: Path, inert: tuple[str, ...]) -> None:
        self.folder = folder
        if (folder / "zero").is_dir():
            raise FilesError(
                f"{folder} is a universal checkpoint, not supported here. Name the checkpoint that was converted to it"
            )
        here = {path.name for path in folder.glob("*_states.pt")}
        self.partitioned = any(name.startswith("zero_pp_rank_0_") and "_model_" in name for name in here)
        model = "zero_pp_rank_{}_mp_rank_00_model_states.pt" if self.partitioned else "mp_rank_00_model_states.pt"
        optimizer = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
        prefix = next((p for p in ("bf16_", "fp16_") if p + optimizer.format(0) in here), "")
        self._need(model.format(0) in here, f"{model.format(0)} is absent")
        self.first = first = read_plain(folder / model.format(0), inert)
        self._refuse(folder / model.format(0))
        self.world_size = int(first["dp_world_size"])
        models = [model.format(rank) for rank in range(self.world_size if self.partitioned else 1)]
        states = [prefix + optimizer.format(rank) for rank in range(self.world_size)]
        absent, more = sorted({*models, *states} - here), sorted(here - {*models, *states})
        self._need(not absent, f"absent files of its {self.world_size} ranks: {', '.join(absent)}")
        self._need(not more, f"files of another run, or of pipeline, tensor or expert parallelism: {', '.join(more)}")
        self.models = [first, *(read_plain(folder / name, inert) for name in models[1:])]
        self.states = [read_plain(folder / name, inert)["optimizer_state_dict"] for name in states]
        inner = "optimizer_state_dict" if self.partitioned else "base_optimizer_state"
        self.inner = [each[inner] for each in self.states]
        self.shapes = [{n: tuple(shape) for n, shape in each.items()} for each in first["param_shapes"]]
        self.config = first.get("ds_config") or {}
        steps = sorted({int(each["global_steps"]) for each in self.models})
        self._need(len(steps) == 1, f"ranks saved after different steps ({steps})")

    def _need(self, fits: bool, fact: str) -> None:
        if not fits:
            raise FilesError(
                f"{self.folder} is not one complete ZeRO-1, -2 or -3 checkpoint of DeepSpeed 0.19: {fact}. Copy the "
                "files of all ranks to one folder, and remove files of other runs"
            )

    def _refuse(self, path: Path) -> None:
        first = self.first
        degrees = [first.get("mp_world_size", 1), *(first.get("checkpoint_parallel_dimensions") or {}).values()]
        if max(degrees) > 1 or any(first.get(key) for key in ("num_experts", "ds_autoep_layers", "autoep_layers")):
            raise FilesError(
                f"{path} is of a run with tensor or pipeline parallelism, or with DeepSpeed's own experts (MoE). This "
                "is not supported: continue that run with DeepSpeed"
            )
        if not first.get("param_shapes"):
            raise FilesError(
                f"{path} has no param_shapes: it was saved at stage 0, or without an optimizer. Read the "
                'weights of this file with torch.load(path, weights_only=True)["module"]'
            )

    def checkpoint(self, live: Container[str]) -> Checkpoint:
        first, optimizer = self.first, self.states[0]
        trained = [name for each in self.shapes for name in each]
        tied, buffers = dict(first.get("shared_params") or {}), list(first["buffer_names"])
        frozen = dict(self._frozen({*trained, *tied, *buffers}))
        called = _called([*trained, *frozen, *tied, *buffers], live)
        whole = {name: first["module"][name].clone() for name in buffers if name in first["module"]}
        tensors = {f"model.{called[name]}": _whole(value) for name, value in whole.items()}
        tensors |= {f"model.{called[name]}": values for name, values in frozen.items()}
        groups, of_group = self._groups()
        steps, skipped, taken = int(first["global_steps"]), int(first["skipped_steps"]), 0
        for index in range(len(self.shapes)):
            pieces, step = self._cut(index, of_group[index])
            for name, states in pieces.items():
                tensors[f"model.{called[name]}"] = states.pop("fp32")
                states |= {} if step is None else {"step": _whole(torch.tensor(step, dtype=torch.float32))}
                tensors |= {f"optim.state.{called[name]}.{state}": values for state, values in states.items()}
            taken = max(taken, step or 0)
        for g, group in enumerate(groups):
            group["params"] = [called[n] for i, each in enumerate(self.shapes) if of_group[i] == g for n in each]
        complete = bool(frozen) or first.get("frozen_param_shapes") is not None  # stage 1 writes none either way
        client = {key: _read(value) for key, value in first.items() if key not in _OURS}
        run = {
            "format": FORMAT,
            "world_size": self.world_size,
            "step_count": taken or steps - skipped,
            "groups": groups,
            "scheduler": _read(first["lr_scheduler"]),
            "loss_scale": _loss_scale(optimizer.get("loss_scaler")),
            "extra": client,
            "left_out": {} if complete else None,  # DeepSpeed does not record which parameters it left out
        }
        return Checkpoint(
            folder=self.folder,
            stage=3 if self.partitioned else int(optimizer.get("zero_stage", 1)),
            world_size=self.world_size,
            version=str(first.get("ds_version")),
            client_state=client,
            step=taken or steps - skipped,
            global_steps=steps,
            skipped_steps=skipped,
            global_samples=int(first.get("global_samples", 0)),
            tensors=tensors,
            aliases={f"model.{called[a]}": f"model.{called[n]}" for a, n in tied.items() if n in {*trained, *frozen}},
            parameters=tuple(called[name] for name in (*trained, *frozen)),
            run=run,
        )

    def _groups(self) -> tuple[list[dict[str, Any]], dict[int, int]]:
        """Returns the options of each optimizer group, and for each flat group the index of its optimizer group."""
        nested, flats = self.inner[0], range(len(self.shapes))
        saved = nested["param_groups"] if isinstance(nested, dict) else [{"params": [i]} for i in flats]
        of_group = {flat: g for g, group in enumerate(saved) for flat in group["params"]}
        fact = f"the optimizer has {len(of_group)} parameter groups, and the model's param_shapes has {len(flats)}"
        self._need(sorted(of_group) == list(flats), fact)
        groups = [{key: _read(value) for key, value in group.items() if key not in _HOW} for group in saved]
        section = self.config.get("optimizer") or {}
        adam_w = {"adamw": True, "adam": bool((section.get("params") or {}).get("adam_w_mode", True))}
        decoupled = adam_w.get(str(section.get("type")).lower())
        for group in groups:
            if decoupled is not None and group.get("weight_decay"):
                group.setdefault("decoupled_weight_decay", decoupled)
        return groups, of_group

    def _cut(self, index: int, group: int) -> tuple[dict[str, dict[str, Pieces]], int | None]:
        """Returns the master ("fp32") and states of a flat group's parameters, in the ranks' pieces, and the step."""
        tensors, step = self._flat(index, group)
        found, at = dict[str, dict[str, Pieces]](), 0
        for (name, shape), gap in zip(self.shapes[index].items(), self._checked(tensors, index), strict=True):
            numel = math.prod(shape)
            found[name] = {}
            for state in tensors[0]:
                parts = self._parts([each[state] for each in tensors], at, numel)
                found[name][state] = Pieces(shape, torch.float32, parts)
            at += -(-numel // self.world_size) if self.partitioned else numel + gap
        return found, step

    def _parts(self, held: Sequence[Tensor], at: int, numel: int) -> list[Tensor]:
        """Returns each rank's elements of a parameter. `at`: its start in each part (stage 3), or in all parts."""
        if not self.partitioned:
            return _within(held, at, at + numel)
        part = -(-numel // self.world_size)
        return [each.reshape(-1)[at:][: max(0, min(part, numel - r * part))] for r, each in enumerate(held)]

    def _flat(self, index: int, group: int) -> tuple[list[dict[str, Tensor]], int | None]:
        """Returns each rank's tensors of a flat group by torch's names ("fp32", "exp_avg" ...), and the step."""
        masters = "fp32_flat_groups" if self.partitioned else "single_partition_of_fp32_groups"
        lion = str((self.config.get("optimizer") or {}).get("type")).lower() == "lion"
        tensors, steps = [], set()
        for saved, nested in zip(self.states, self.inner, strict=True):
            count = saved["partition_count"]
            count = count[index] if isinstance(count, list) else count
            self._need(count == self.world_size, f"{count} ranks share a parameter (MiCS, hpZ or experts)")
            state = nested[index] if isinstance(nested, list) else nested["state"].get(index, {})
            options = nested["param_groups"][group] if isinstance(nested, dict) else {}
            own = {"fp32": saved[masters][index]}
            own |= {name: value for name, value in state.items() if isinstance(value, Tensor) and value.dim()}
            if self.partitioned and own["fp32"].numel() == 0 and (self.folder / "offloaded_tensors").is_dir():
                raise FilesError(
                    f"{self.folder} has masters and states in swap files on NVMe, which are not read here. Load the "
                    "checkpoint with DeepSpeed, and save it again without nvme in offload_optimizer. Or save the "
                    "weights with engine.save_16bit_model"
                )
            if lion:
                own.pop("exp_avg_sq", None)  # DeepSpeed's on the CPU keeps one that it never uses
            elif "exp_avg_sq" in own and "exp_avg" not in own:  # DeepSpeed's Adagrad
                own["sum"] = own.pop("exp_avg_sq")
            tensors.append(own)
            step = state.get("step", saved.get("base_optimizer_state_step", options.get("step")))
            steps.add(None if step is None else int(step))
        self._need(len(steps) == 1, f"ranks have taken different steps ({steps})")
        return tensors, steps.pop()

    def _checked(self, tensors: list[dict[str, Tensor]], index: int) -> Sequence[int]:
        """Compares the elements of each rank with those of its parameters. Returns the gap behind each parameter."""
        sizes = [math.prod(shape) for shape in self.shapes[index].values()]
        lengths = [each["fp32"].numel() for each in tensors]
        total, ranks, gaps = sum(lengths), self.world_size, [0] * len(sizes)
        if self.partitioned:
            whole = sum(-(-size // ranks) for size in sizes)
            least = most = whole * ranks
        else:  # one tensor over all ranks, whose end may be padded; the last part of masters is saved unpadded
            gaps = (self.states[0].get("param_alignment_paddings") or {index: gaps})[index]
            least = sum(sizes) + sum(gaps)
            most = -(-least // (2 * ranks)) * 2 * ranks
            whole = lengths[0] if any(lengths[1:]) else most // ranks
        wanted = [max(0, min(whole, total - rank * whole)) for rank in range(ranks)]
        fact = f"flat group {index} has {total} elements, and its parameters {sum(sizes)}"
        self._need(least <= total <= most and lengths == wanted, fact)
        for rank, held in enumerate(tensors):
            fits = held.keys() == tensors[0].keys() and all(wanted[rank] <= v.numel() <= whole for v in held.values())
            self._need(fits, f"states of flat group {index} of rank {rank} are not element by element")
        return gaps

    def _frozen(self, others: set[str]) -> Iterator[tuple[str, Pieces]]:
        """Finds the frozen parameters: unsharded in the module at stages 1 and 2, cut like the others at stage 3."""
        if not self.partitioned:
            for name, stored in self.first["module"].items():
                if name not in others and isinstance(stored, Tensor):
                    yield name, _whole(stored)
            return
        for name, size in (self.first.get("frozen_param_shapes") or {}).items():
            parts = self._parts([model["frozen_param_fragments"][name] for model in self.models], 0, math.prod(size))
            self._need(sum(each.numel() for each in parts) == math.prod(size), f"a rank lacks elements of {name}")
            yield name, Pieces(tuple(size), parts[0].dtype, parts)


def _called(names: list[str], live: Container[str]) -> dict[str, str]:
    """Maps names to the model's names. Strips "module." from all of them if the model has none with it."""
    called = {name: clean_name(name) for name in names}
    if live and not any(key in live for key in called.values()):
        return {name: key.removeprefix("module.") for name, key in called.items()}
    return called


def _whole(tensor: Tensor) -> Pieces:
    return Pieces(tuple(tensor.shape), tensor.dtype, [tensor])


def _loss_scale(saved: Any) -> dict[str, Any] | None:
    """Returns DeepSpeed's dynamic scale as the state of a `zero_core.LossScale`, which doubles at the same step.

    DeepSpeed doubles when the steps since the last overflow, this one not counted, are a multiple of the window.
    """
    if not isinstance(saved, dict) or not saved.get("dynamic"):
        return None
    finite = int(saved["cur_iter"]) - int(saved["last_overflow_iter"]) - 1
    since = (finite - 1) % int(saved["scale_window"]) if finite else -1
    return {"value": float(saved["cur_scale"]), "finite_steps": since, "hysteresis_left": int(saved["cur_hysteresis"])}


def _read(value: Any) -> Any:
    """Returns plain data with its tensors in memory."""
    return tree_map_only(Tensor, Tensor.clone, value)
