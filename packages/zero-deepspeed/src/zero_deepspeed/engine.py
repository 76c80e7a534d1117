"""Runs a loop that was written for DeepSpeed's engine on a sharded model (`Engine`).

Owns the engine's counters, the boundaries of accumulation, and the folders of its checkpoints. Not here: the step (in
zero-core), the JSON (in translation.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import zero_core
from zero_core.errors import CheckpointError, ConfigError

from .checkpoint import load_checkpoint
from .files import tagged
from .sharding import Run
from .translation import Translation

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")  # which a checkpoint keeps
_GONE = {
    "set_train_batch_size": "gradient_accumulation_steps in the JSON",
    "zero_optimization": "zero_optimization_stage()",
    "fp16_enabled": "translation.loss_scale",
    "bfloat16_enabled": "translation.zero.param_dtype",
    "gradient_clipping": "translation.max_grad_norm",
    "get_mom": "optimizer.param_groups",
    "module_state_dict": "module.state_dict()",
    "load_module_state_dict": "module.load_state_dict()",
    "save_fp16_model": "save_16bit_model()",
}
_LATEST = "latest"  # the file that names the last checkpoint of a folder, as DeepSpeed's does


def device_here() -> torch.device:
    """Returns this process's device: the CPU, or the accelerator that LOCAL_RANK numbers, which becomes current."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    device = torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))
    torch.accelerator.set_device_index(device.index)
    return device


class Engine(nn.Module):
    """The engine that deepspeed.initialize returns, over a sharded model.

    module: the model, the object that was given. optimizer: zero-core's, None if nothing is trained. run: the Run with
    plan and store. global_steps, micro_steps, global_samples, skipped_steps: counters, as DeepSpeed counts. Other
    attributes are looked up in the model.
    """

    module: nn.Module

    def __init__(
        self, run: Run, translation: Translation, lr_scheduler: Any, collate_fn: Callable[..., Any] | None
    ) -> None:
        super().__init__()
        self.module = run.model
        self.run, self.translation = run, translation
        self.optimizer, self.lr_scheduler, self.collate_fn = run.optimizer, lr_scheduler, collate_fn
        self.training_dataloader: DataLoader[Any] | None = None
        self.global_rank, self.world_size, self.device = dist.get_rank(), dist.get_world_size(), device_here()
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.global_steps = self.micro_steps = self.global_samples = self.skipped_steps = 0
        self._accumulate = translation.accumulate or 1
        self._boundary: bool | None = None  # set by set_gradient_accumulation_boundary
        self._applied = self._in_backward = False

    def __getattr__(self, name: str) -> Any:
        with contextlib.suppress(AttributeError):
            return super().__getattr__(name)
        if name in _GONE:
            raise AttributeError(f"the engine has no {name!r} any more: use {_GONE[name]}")
        if name == "module" or not hasattr(self.module, name):
            raise AttributeError(f"neither engine nor module has {name!r}; zero-deepspeed's README has the list")
        return getattr(self.module, name)

    # -- a step --------------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Runs the model; under autocast where the JSON has torch_autocast."""
        dtype = self.translation.autocast
        with contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype):
            found = self.module(*inputs, **options)
        if (self._accumulate > 1 or self.translation.loss_scale_options) and torch.is_grad_enabled():
            for value in tree_leaves(found):
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    value.register_hook(self._refuse_foreign)
        return found

    def _refuse_foreign(self, gradient: Tensor) -> None:
        """Refuses loss.backward(), which neither divides by the micro-batches of a step nor scales for fp16."""
        if not self._in_backward:
            raise ConfigError(
                f"loss.backward() neither divides the loss by gradient_accumulation_steps={self._accumulate} nor "
                "scales it for fp16: call engine.backward(loss)"
            )

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Runs backward of `loss`, a scalar, divided by the micro-batches of a step. Returns the divided loss.

        scale_wrt_gas=False does not divide. fp16's loss scale is applied inside.
        """
        self._needs_optimizer()
        loss = loss / self._accumulate if scale_wrt_gas else loss
        only_adds = self.zero_optimization_stage() < 2 and not self.is_gradient_accumulation_boundary()
        self._in_backward = True
        try:
            with zero_core.no_sync(self.module) if only_adds else contextlib.nullcontext():
                self.optimizer.scale_loss(loss).backward(retain_graph=retain_graph)
        finally:
            self._in_backward = False
        return loss

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Counts a micro-batch; with the last one of a step it updates the parameters, and the learning rate after.

        Where fp16's gradients are not finite, the update and the schedule leave the step out, and the scale falls. In
        bf16 and fp32 such gradients raise GradientError, and nothing is updated.
        """
        self._needs_optimizer()
        self._applied = False
        if self.is_gradient_accumulation_boundary():
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._applied = math.isfinite(self.optimizer.grad_norm)
            if not self._applied:
                self.skipped_steps += 1
            elif self.lr_scheduler is not None:
                self.lr_scheduler.step(**(lr_kwargs or {}))
            self.global_steps += 1
            self.global_samples += self.train_batch_size() if self.translation.train_batch_size else 0
        self.micro_steps += 1

    def _needs_optimizer(self) -> None:
        if self.optimizer is None:
            raise ConfigError('no optimizer: pass optimizer= to initialize(), or write "optimizer" into the JSON')

    def was_step_applied(self) -> bool:
        """Says whether the last step() updated: it was the last micro-batch's, and fp16's gradients were finite."""
        return self._applied

    def is_gradient_accumulation_boundary(self) -> bool:
        """Says whether step() now updates: at the last micro-batch, or as set_gradient_accumulation_boundary said."""
        return (self.micro_steps + 1) % self._accumulate == 0 if self._boundary is None else self._boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Says from now on whether backward and step() belong to the last micro-batch of a step."""
        self._boundary = is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward only adds to this rank's gradients. Stages 0 and 1; as in DeepSpeed, not stages 2 and 3."""
        if self.zero_optimization_stage() >= 2:
            raise ConfigError("no_sync() needs whole gradients, and stages 2 and 3 shard them: leave no_sync() out")
        with zero_core.no_sync(self.module):
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops accumulated gradients at stages 0 and 1. At 2 and 3 it does nothing, as in DeepSpeed.

        step() drops it after an update. engine.optimizer.zero_grad() drops it at every stage.
        """
        if self.optimizer is not None and self.zero_optimization_stage() < 2:
            self.optimizer.zero_grad(set_to_none)

    # -- the JSON's settings -------------------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Rows of a step, over all ranks and micro-batches."""
        return self.train_micro_batch_size_per_gpu() * self._accumulate * self.world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Rows of a micro-batch on one rank. Raises ConfigError if the JSON has no batch size."""
        if self.translation.micro_batch_size is None:
            raise ConfigError("the JSON has no batch size: write train_micro_batch_size_per_gpu")
        return self.translation.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches in a step."""
        return self._accumulate

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return self.translation.zero.stage

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradients before clipping; None before the first step."""
        return None if self.optimizer is None or math.isnan(self.optimizer.grad_norm) else self.optimizer.grad_norm

    def get_lr(self) -> list[float]:
        """The learning rate of each group."""
        return [] if self.optimizer is None else [group["lr"] for group in self.optimizer.param_groups]

    # -- data ----------------------------------------------------------------------------------------------------------

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int = 0,
    ) -> DataLoader[Any]:
        """Returns a loader of this rank's part of `dataset`, shuffled as DeepSpeed does: alike in each epoch.

        route: "train"; any other is not shuffled.
        """
        if data_sampler is None and not isinstance(dataset, IterableDataset):
            data_sampler = DistributedSampler(dataset, self.world_size, self.global_rank, shuffle=route == "train")
        return DataLoader(
            dataset,
            batch_size=batch_size or self.train_micro_batch_size_per_gpu(),
            sampler=data_sampler,
            collate_fn=collate_fn or self.collate_fn,
            num_workers=num_local_io_workers,
            pin_memory=pin_memory and self.device.type != "cpu",
            drop_last=self.translation.drop_last,
        )

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes `save_dir`/`tag` in zero-core's format, and the file `latest`, which names it. Collective.

        tag: None is global_stepN. client_state: load_checkpoint returns it; rank 0's is kept. Unlike DeepSpeed's,
        a checkpoint also holds the random state of each rank. Killed at any moment, the last one stays complete.
        Returns True. Raises CheckpointError where a rank cannot write.
        """
        name = str(tag) if tag is not None else f"global_step{self.global_steps}"
        counters = {key: getattr(self, key) for key in _COUNTERS}
        zero_core.checkpoint.save(
            Path(save_dir) / name,
            self.module,
            self.optimizer,
            scheduler=self.lr_scheduler,
            extra={"counters": counters, "client_state": dict(client_state or {})},
            trained_only=exclude_frozen_parameters,
        )
        failed: list[str | None] = [None]
        if save_latest and self.global_rank == 0:
            written = Path(save_dir) / f".{_LATEST}"
            try:
                written.write_text(name)
                written.replace(Path(save_dir) / _LATEST)
            except OSError as error:
                failed = [f"{name} is saved, but `{_LATEST}` could not be written ({error}): load it with tag={name!r}"]
        dist.broadcast_object_list(failed)
        if failed[0] is not None:
            raise CheckpointError(failed[0])
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Reads a checkpoint that save_checkpoint wrote, here or in DeepSpeed, at any number of ranks. Collective.

        Returns the folder and the client state; (None, None) with a warning if `load_dir` has no file `latest` and no
        tag is given. Raises CheckpointError or ConfigError where the checkpoint is damaged or of another model.
        """
        if custom_load_fn is not None:
            raise ConfigError("custom_load_fn= is not supported: load your weights into the model before initialize()")
        latest = Path(load_dir) / _LATEST
        if tag is None and not latest.is_file():
            warnings.warn(f"{latest} is not there, nothing was loaded: give a tag, or another folder", stacklevel=2)
            return None, None
        folder = tagged(Path(load_dir), None if tag is None else str(tag))
        whole = load_optimizer_states and not load_module_only
        scheduler = self.lr_scheduler if load_lr_scheduler_states and not load_module_only else None
        given = (folder, self.module, self.optimizer if whole else None)
        of_deepspeed = any(folder.glob("*_model_states.pt"))
        if of_deepspeed and (folder / ".metadata").is_file():
            raise CheckpointError(
                f"{folder} has two checkpoints, DeepSpeed's (*_states.pt) and this library's (.metadata, *.distcp): "
                "move the files of one of them into another folder"
            )
        if of_deepspeed:
            theirs = load_checkpoint(*given, scheduler=scheduler, strict=load_module_strict)
            counters, state = {name: getattr(theirs, name) for name in _COUNTERS}, theirs.client_state
        else:
            loaded = zero_core.checkpoint.load(
                *given, scheduler=scheduler, strict=load_module_strict, random_state=whole
            )
            extra = loaded.extra if isinstance(loaded.extra, dict) else {}
            # a checkpoint that was converted, or that a loop or a Trainer saved, has no counters
            counters = {"global_steps": loaded.step} | (extra.get("counters") or {})
            state = extra.get("client_state", extra)
        if not load_module_only:
            self.__dict__.update(counters)
            self.micro_steps = self.global_steps * self._accumulate  # pending micro-batches are not in a checkpoint
            if self.optimizer is not None:
                self.optimizer.zero_grad()
        return str(folder), state

    def save_16bit_model(
        self, save_dir: str | os.PathLike[str], save_filename: str = "", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Writes the weights in the dtype of the parameters as safetensors that transformers loads. Collective.

        The name of the file is model.safetensors, whatever `save_filename` says. Returns True.
        """
        if exclude_frozen_parameters:
            raise ConfigError(
                "save_16bit_model cannot exclude frozen parameters: save zero_core.trained_state_dict(engine.module)"
            )
        zero_core.save_pretrained(self.module, save_dir)
        return True

    def destroy(self) -> None:
        """Releases memory and files. The model cannot be used afterwards."""
        self.run.close()
