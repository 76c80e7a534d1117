"""Writes checkpoints in DeepSpeed's layouts, byte for byte what torch.save makes of them, without DeepSpeed."""

import enum
import math
import sys
import types
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

GROUPS = (("a.weight", "b.weight"), ("a.bias", "b.bias"))
STATES = ("fp32", "exp_avg", "exp_avg_sq")
OPTIONS = ({"weight_decay": 0.1}, {"weight_decay": 0.0})


class LossScaler:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class ZeroStageEnum(int, enum.Enum):
    optimizer_states, gradients, weights = 1, 2, 3


@dataclass
class fragment_address:
    numel: int
    start: int


_HOMES = {
    LossScaler: "deepspeed.runtime.fp16.loss_scaler",
    ZeroStageEnum: "deepspeed.runtime.zero.config",
    fragment_address: "deepspeed.utils.tensor_fragment",
}


@contextmanager
def classes():
    """Inside, the classes above are pickled as DeepSpeed's."""
    parts = [home.split(".") for home in _HOMES.values()]
    names = {".".join(each[:length]) for each in parts for length in range(1, len(each) + 1)}
    modules = {name: types.ModuleType(name) for name in names}
    with mock.patch.dict(sys.modules, modules):
        for kind, home in _HOMES.items():
            setattr(modules[home], kind.__name__, kind)
            kind.__module__ = home
        yield


class Settings:
    """What a client keeps in its client_state."""

    def __init__(self) -> None:
        self.depth, self.order = 3, torch.arange(3)


def rewrite(path: Path, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """Writes torch's archive anew. change: what becomes of the bytes of a record."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(name, change(name, data))


class Net(nn.Module):
    """Sizes that two and three do not divide; a tied head, a frozen layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 5)
        self.frozen = nn.Linear(5, 3, bias=False).requires_grad_(False)
        self.head = nn.Linear(7, 5, bias=False)
        self.head.weight = self.b.weight
        self.register_buffer("seen", torch.tensor(4))

    def groups(self) -> list[dict]:
        named = dict(self.named_parameters())
        groups = zip(GROUPS, OPTIONS, strict=True)
        return [{"params": [named[name] for name in names], **options} for names, options in groups]


@dataclass
class Truth:
    """masters and states by name: {"a.weight": {"fp32": ..., "exp_avg": ..., "exp_avg_sq": ...}}."""

    values: dict[str, dict[str, Tensor]]
    frozen: Tensor


def write(
    root: Path,
    stage: int,
    size: int,
    *,
    one_flat_group: bool = True,
    exclude: bool = False,
    prefix: str = "",
    client: dict | None = None,
    step: int | Tensor = 9,
    scale: dict | None = None,
    options: dict | None = None,
) -> Truth:
    """one_flat_group: without it, a group of stage 3 is one flat group for each parameter (sub_group_size)."""
    generator = torch.Generator().manual_seed(stage * 10 + size)
    shapes = {name: tuple(p.shape) for name, p in Net().named_parameters()}
    truth = Truth(
        {n: {s: torch.randn(shapes[n], generator=generator).abs() for s in STATES} for g in GROUPS for n in g},
        torch.randn(shapes["frozen.weight"], generator=generator),
    )
    flats = [(g, names) for g, names in enumerate(GROUPS)]
    if stage == 3 and not one_flat_group:
        flats = [(g, (name,)) for g, names in enumerate(GROUPS) for name in names]
    scaler = LossScaler(**(scale or {"cur_scale": 1.0, "dynamic": False}))
    folder = root / "global_step10"
    folder.mkdir(parents=True)
    cut = [_cut(truth, names, stage, size) for _, names in flats]
    with classes():
        for rank in range(size if stage == 3 else 1):
            model = _model_states(truth, flats, stage, size, rank, exclude, prefix) | (client or {})
            name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
            torch.save(model, folder / f"{name}_model_states.pt")
        groups = [
            {"lr": 0.5, "betas": (0.9, 0.999), "eps": 1e-8, "bias_correction": True, **each, **(options or {})}
            | {"params": [i for i, (group, _) in enumerate(flats) if group == g]}
            for g, each in enumerate(OPTIONS)
        ]
        for rank in range(size):
            state = {i: {s: each[rank][s] for s in STATES[1:]} | {"step": step} for i, each in enumerate(cut)}
            nested = {"state": state, "param_groups": groups}
            masters = [each[rank]["fp32"] for each in cut]
            saved = {"loss_scaler": scaler, "zero_stage": ZeroStageEnum(stage), "partition_count": size}
            if stage == 3:
                saved |= {"optimizer_state_dict": nested, "fp32_flat_groups": masters}
            else:
                lean = [
                    m[: max(0, _lean(truth, names, m.numel(), rank))]
                    for (_, names), m in zip(flats, masters, strict=True)
                ]
                saved |= {"base_optimizer_state": nested, "single_partition_of_fp32_groups": lean}
                saved |= {"partition_count": [size] * len(flats), "param_slice_mappings": [fragment_address(1, 0)]}
            torch.save(
                {"optimizer_state_dict": saved, "ds_config": {}, "ds_version": "0.19.8"},
                folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            )
    (root / "latest").write_text("global_step10")
    return truth


def _lean(truth: Truth, names: tuple[str, ...], part: int, rank: int) -> int:
    return min(part, sum(truth.values[name]["fp32"].numel() for name in names) - rank * part)


def _cut(truth: Truth, names: tuple[str, ...], stage: int, size: int) -> list[dict[str, Tensor]]:
    """Of each rank, its part of each state."""
    cut: list[dict[str, Tensor]] = [{} for _ in range(size)]
    for state in STATES:
        flat = [truth.values[name][state].reshape(-1) for name in names]
        if stage == 3:
            parts = [torch.cat([_padded(v, size).chunk(size)[rank] for v in flat]) for rank in range(size)]
        else:
            parts = list(_padded(torch.cat(flat), 2 * size).chunk(size))
        for rank, part in enumerate(parts):
            cut[rank][state] = part.clone()
    return cut


def _padded(flat: Tensor, multiple: int) -> Tensor:
    return torch.cat([flat, torch.full((-flat.numel() % multiple,), math.nan)])


def _model_states(truth, flats, stage, size, rank, exclude, prefix):
    module = OrderedDict((f"{prefix}{n}", p.detach().clone()) for n, p in Net().state_dict().items())
    module |= {f"{prefix}{name}": states["fp32"] for name, states in truth.values.items()}
    module[f"{prefix}frozen.weight"] = truth.frozen.t().contiguous().t()  # strides are saved too
    if stage == 3:
        module = OrderedDict((n, v if n.endswith("seen") else torch.empty(0)) for n, v in module.items())
    part = _padded(truth.frozen.reshape(-1), size).chunk(size)[rank].clone()
    if exclude:
        del module[f"{prefix}frozen.weight"]
    kept = stage > 1 and not exclude
    return {
        "module": module,
        "buffer_names": [f"{prefix}seen"],
        "optimizer": None,
        "param_shapes": [
            OrderedDict((f"{prefix}{n}", truth.values[n]["fp32"].shape) for n in names) for _, names in flats
        ],
        "frozen_param_shapes": {f"{prefix}frozen.weight": truth.frozen.shape} if kept else None,
        "frozen_param_fragments": {f"{prefix}frozen.weight": part if stage == 3 else truth.frozen} if kept else None,
        "shared_params": {f"{prefix}head.weight": f"{prefix}b.weight"} if rank == 0 else {},
        "lr_scheduler": {"last_batch_iteration": 9},
        "skipped_steps": 1,
        "global_steps": 10,
        "global_samples": 80,
        "dp_world_size": size,
        "mp_world_size": 1,
        "ds_config": {"optimizer": {"type": "AdamW"}},
        "ds_version": "0.19.8",
    }
