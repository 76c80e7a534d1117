"""Finds the files of a checkpoint of DeepSpeed's: one of every rank, all of one save.

Not here: the layout of their values (in files.py), the format of one file (in pickles.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .pickles import FilesError, read_plain

__all__ = ["RankFiles", "tagged"]

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?P<kind>bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
_REFUSED = (  # files of features that are not here
    (re.compile(r"layer_\d+_expert_|expert_\d+_|expp_rank_"), "experts of a mixture in files of their own (MoE)"),
    (re.compile(r"layer_\d+"), "layers of pipeline parallelism"),
    (re.compile(r"(?:.*_)?mp_rank_\d+_\d+"), "stages of pipeline parallelism"),
    (re.compile(r"(?:.*_)?mp_rank_(?!00)\d+"), "slices of tensor parallelism"),
)


def tagged(folder: Path, tag: str | None) -> Path:
    """Returns the folder of the checkpoint `tag`, or of the one that `latest` names. Raises FilesError."""
    if not folder.is_dir():
        raise FilesError(f"{folder} is no folder: name the one that save_checkpoint was given")
    tags = sorted(path.name for path in folder.iterdir() if path.is_dir() and any(path.glob("*_model_states.pt")))
    known = f"its tags are {', '.join(tags)}" if tags else "no folder in it has *_model_states.pt"
    if tag is not None:
        if not (folder / tag).is_dir():
            raise FilesError(f"{folder} has no tag {tag!r}: {known}")
        return folder / tag
    for name in ("latest", "latest_universal"):
        latest = folder / name
        if latest.is_file():
            named = latest.read_text(encoding="utf-8", errors="replace").strip()
            if not named or not (folder / named).is_dir():
                raise FilesError(f"{latest} names {named!r}, which is not there: {known}. Name one with tag=")
            return folder / named
    if any(folder.glob("*_model_states.pt")):
        return folder
    raise FilesError(f"{folder} has no file `latest`: {known}. Name one with tag=")


class RankFiles:
    """The files of one save, read. partitioned: of stage 3.

    first: rank 0's model states; models, states: of each rank in turn.

    Raises:
        FilesError: a file is absent, damaged, of another save, or of a kind that is not read here.
    """

    def __init__(self, folder: Path, inert: tuple[str, ...]) -> None:
        self.folder = folder
        names = sorted(path.name for path in folder.iterdir() if path.is_file())
        for pattern, what in _REFUSED:
            if refused := [name for name in names if pattern.match(name)]:
                raise FilesError(
                    f"{folder} holds {what} ({refused[0]}{' ...' if len(refused) > 1 else ''}), which are not read "
                    "here: gather the weights with DeepSpeed or Megatron, and load them with zero_hf.from_pretrained"
                )
        if (folder / "zero").is_dir():
            raise FilesError(
                f"{folder} was made by ds_to_universal. Read the checkpoint that it was made of instead, at any number "
                "of ranks"
            )
        model = {m[0]: m for m in map(_MODEL.fullmatch, names) if m}
        optimizer = {m[0]: m for m in map(_OPTIMIZER.fullmatch, names) if m}
        if not model:
            raise FilesError(f"{folder} holds no *_model_states.pt ({', '.join(names[:4]) or 'it is empty'})")
        if len({m["rank"] is None for m in model.values()}) > 1 or len({m["kind"] for m in optimizer.values()}) > 1:
            raise FilesError(
                f"{folder} holds files of two checkpoints: {', '.join([*model, *optimizer][:6])} ... Remove those of "
                "the run that is not wanted"
            )
        self.partitioned = next(iter(model.values()))["rank"] is not None
        by_rank = {int(m["rank"] or 0): read_plain(folder / name, inert) for name, m in sorted(model.items())}
        self.first = first = by_rank.get(0, next(iter(by_rank.values())))
        self._refuse(first, next(iter(model)))
        self.world_size = int(first["dp_world_size"])
        self.models = self._all_ranks(by_rank, "model_states", self.world_size if self.partitioned else 1)
        if len({each["global_steps"] for each in self.models}) > 1:
            steps = [each["global_steps"] for each in self.models]
            raise FilesError(f"{folder}: ranks saved after different steps ({steps}): files of two checkpoints")
        if not optimizer:
            raise FilesError(
                f"{folder} holds no *_optim_states.pt: copy them from where the ranks wrote them (each node's own disk "
                "with use_node_local_storage)"
            )
        states = {int(m["rank"]): read_plain(folder / name, inert) for name, m in sorted(optimizer.items())}
        self.states = self._all_ranks(states, "optim_states", self.world_size)

    def _all_ranks(self, found: Mapping[int, Any], kind: str, count: int) -> list[Any]:
        absent = [str(rank) for rank in range(count) if rank not in found]
        if absent:
            raise FilesError(
                f"{self.folder} lacks *_{kind}.pt of rank {', '.join(absent)}: {count} ranks saved it, and each has a "
                "part of every parameter. Copy all files to one folder"
            )
        if len(found) > count:
            raise FilesError(
                f"{self.folder} holds *_{kind}.pt of {len(found)} ranks, and {count} saved it: files of two "
                "checkpoints. Remove those of the larger run"
            )
        return [found[rank] for rank in range(count)]

    def _refuse(self, first: Any, name: str) -> None:
        path = self.folder / name
        if not isinstance(first, dict) or "module" not in first or "dp_world_size" not in first:
            raise FilesError(f"{path} is not what DeepSpeed's save_checkpoint writes: it has no module")
        if first.get("num_experts") or first.get("ds_autoep_layers") or first.get("autoep_layers"):
            raise FilesError(f"{path} is of a model with DeepSpeed's own experts (MoE), which are not read here")
        degrees = first.get("checkpoint_parallel_dimensions") or {}
        if first.get("mp_world_size", 1) > 1 or any(degree > 1 for degree in degrees.values()):
            raise FilesError(f"{path} is of a run with tensor or pipeline parallelism, which is not read here")
        if not first.get("param_shapes"):
            generation = first.get("ds_version", "before 0.3.16")
            raise FilesError(
                f"{path} has no param_shapes: it was saved at stage 0, without an optimizer, or by another generation "
                f"of DeepSpeed (this one: {generation}; read are ZeRO-1, -2 and -3 as 0.19 writes them). Its weights "
                'are torch.load(path, weights_only=True)["module"]'
            )
