"""Counts what a training step asks of a device, through zero-core, zero-train and transformers' Trainer.

Each way in trains a Llama of two layers on zero-sim's simulated device, in bf16 with fp32 masters, with two
micro-batches a step and clipping. The third step is counted, from its first batch on until all that it queued is done.
Updates of the second step have ended by then, as those of the third have at the end.
"""

import contextlib
import io
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

COUNTED = 3  # the step; the ones before make states and find memory
ACCUMULATE = 2
KINDS = ("copy to the device", "copy to the host", "copy on the device")


@dataclass(frozen=True)
class Census:
    """What one step asked for.

    waits: of the training thread and autograd's, by place: "gradients/reducer.py:205 in _read".
    copies: how many, by kind.
    """

    waits: Counter[str]
    launches: int
    copies: dict[str, int]
    unlike_cuda: int


class Counting:
    """Counts from `begin` to `end`, whose own waits are left out. store: what updates in the background, if anything"""

    def begin(self, store: Any) -> None:
        import zero_sim

        _settled(store)
        self._before = zero_sim.counts()

    def end(self, store: Any) -> Census:
        import zero_sim

        _settled(store)
        found = zero_sim.counts() - self._before
        waits = Counter[str]()
        for wait, times in found.waits.items():
            if wait.thread in ("", "MainThread") and " in _settled" not in wait.place:
                waits[wait.place.split(" < ")[0]] += times
        assert set(found.copies) <= {*KINDS, *(f"{kind}, pageable" for kind in KINDS)}, found.copies
        copies = {kind: found.copies[kind] + found.copies[f"{kind}, pageable"] for kind in KINDS}
        return Census(waits, found.launches, copies, found.unlike_cuda)


def _settled(store: Any) -> None:
    if store is not None:
        store.wait()
    torch.get_device_module("sim").synchronize()


def through_zero_core(place: str, folder: Path) -> Census:
    """`zero_core.shard`, and a loop that sends its batches without waiting and reads no loss."""
    import zero_core
    from tests.integration.zero_hf.trainers import llama, rows
    from zero_offload import TieredStore, TorchStep

    device = torch.device("sim:0")
    model, kinds = llama().train(), ("parameters", "gradients", "optimizer")
    store = None if place == "none" else TieredStore(**dict.fromkeys(kinds, place), step=TorchStep("fp32"))
    options: dict[str, Any] = {"param_dtype": torch.bfloat16, "max_grad_norm": 1.0, "stage": 3 if store else 0}
    optimizer = zero_core.shard(model, torch.optim.AdamW(model.parameters()), store=store, device=device, **options)
    batch, counting = torch.stack([row["input_ids"] for row in rows(2)]), Counting()
    for step in range(1, COUNTED + 1):
        if step == COUNTED:
            counting.begin(store)
        for _ in range(ACCUMULATE):
            tokens = batch.pin_memory().to(device, non_blocking=True)
            loss: Any = model(input_ids=tokens, labels=tokens).loss / ACCUMULATE
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = counting.end(store)
    optimizer.close()
    return found


def through_zero_train(place: str, folder: Path) -> Census:
    """A run of zero-train over synthetic data."""
    from tests.integration.zero_train.helpers import trained
    from zero_train.report.metrics import Meter
    from zero_train.run.loop import Loop

    counting, step, line, found = Counting(), Loop._step, Meter.line, []

    def counted(self: Any, number: int) -> Any:
        if number == COUNTED:
            counting.begin(self._engine.store)
        return step(self, number)

    def told(self: Any, *given: Any, **figures: Any) -> Any:
        """The losses of the step have been read by now."""
        if self._measured["step"] == COUNTED:
            found.append(counting.end(self._engine.store))
        return line(self, *given, **figures)

    sizes = ("model.hidden_size=32", "model.intermediate_size=64", "model.layers=2", "model.heads=4")
    stage = f"zero.stage={0 if place == 'none' else 3}"
    steps = (f"run.accumulate={ACCUMULATE}", f"run.steps={COUNTED}", "run.micro_batch=2", "data.sequence_length=16")
    with mock.patch.object(Loop, "_step", counted), mock.patch.object(Meter, "line", told), _quiet():
        trained(folder, *sizes, *steps, stage, f"offload={place}", "hardware.device=sim")
    return found[0]


def through_trainer(place: str, folder: Path, **arguments: Any) -> Census:
    """A Trainer of transformers, made by `zero_hf.sharded`. arguments: of TrainingArguments, or a model."""
    from transformers import TrainerCallback

    from tests.integration.zero_hf.trainers import Sharded, train

    class Steps(TrainerCallback):
        """A period from one step's beginning to the next's: the batches of a step are sent before it begins."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            store = made["trainer"].zero_run.store
            if state.global_step == COUNTED - 1:
                counting.begin(store)
            elif state.global_step == COUNTED:
                found.append(counting.end(store))

    class Known(Sharded):  # type: ignore[misc]
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            made["trainer"] = self

    made: dict[str, Any] = {}
    counting, found = Counting(), []
    zero = {"stage": 0 if place == "none" else 3, "offload": place, "param_dtype": "bf16"}
    usual = {"max_steps": COUNTED + 1, "gradient_accumulation_steps": ACCUMULATE, "logging_steps": 10}
    with on_sim():
        trainer, _ = train(Known, folder, zero=zero, callbacks=[Steps()], **usual | {"use_cpu": False} | arguments)
        trainer.end()
    return found[0]


def without_masks() -> Any:
    """A Llama whose rows are never padded on the left nor packed, so that attention needs no mask but the causal one.

    transformers makes no mask for an attention that it has no kind of mask for, and looks at no positions.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from tests.integration.zero_hf.trainers import llama

    AttentionInterface.register("sdpa_without_masks", sdpa_attention_forward)
    model = llama()
    model.set_attn_implementation("sdpa_without_masks")
    return model


@contextlib.contextmanager
def on_sim() -> Iterator[None]:
    """accelerate takes the simulated device, and forgets it at the end."""
    from accelerate.state import AcceleratorState, GradientState

    with mock.patch.dict(os.environ, {"ACCELERATE_TORCH_DEVICE": "sim:0"}):
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def as_advised(place: str, folder: Path) -> Census:
    """A Trainer without transformers' own waits."""
    return through_trainer(place, folder, model=without_masks(), logging_nan_inf_filter=False)


def _quiet() -> contextlib.AbstractContextManager[Any]:
    return contextlib.redirect_stdout(io.StringIO())
