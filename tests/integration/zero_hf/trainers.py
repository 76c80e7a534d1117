"""Tiny models, data and runs of a Trainer that the tests of this folder share."""

import contextlib
import io
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, logging

import zero_hf
from tests.integration.zero_hf.launching import launched as launched

VOCABULARY = 64
Sharded = zero_hf.sharded(Trainer)


def llama(seed: int = 0, **more: Any) -> LlamaForCausalLM:
    """Two layers, 26 thousand parameters."""
    torch.manual_seed(seed)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=VOCABULARY)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    return LlamaForCausalLM(LlamaConfig(**sizes | heads | more))


def rows(count: int, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Counting sequences, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, VOCABULARY, (count,), generator=generator)
    tokens = [(start + torch.arange(12)) % VOCABULARY for start in starts]
    return [{"input_ids": row, "labels": row} for row in tokens]


class Logs(TrainerCallback):
    """What the Trainer logged: losses and norms of steps, and evaluation losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.evaluations: list[float] = []

    def on_log(self, args, state, control, logs=None, **given):
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.norms.append(logs.get("grad_norm"))
        if "eval_loss" in logs:
            self.evaluations.append(logs["eval_loss"])


def trainer(cls, folder, model=None, *, data=26, **given: Any) -> tuple[Any, Logs]:
    """A Trainer of `cls` that logs each step; what TrainingArguments does not know goes to `cls`."""
    logging.set_verbosity_error()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    fields = TrainingArguments.__dataclass_fields__
    usual = dict(per_device_train_batch_size=2, max_steps=6, logging_steps=1, learning_rate=1e-2, save_strategy="no")
    quiet = dict(use_cpu=True, report_to=[], disable_tqdm=True, lr_scheduler_type="cosine")
    arguments = usual | quiet | {name: value for name, value in given.items() if name in fields}
    rest = {name: value for name, value in given.items() if name not in fields}
    logs = Logs()
    callbacks = [logs, *rest.pop("callbacks", [])]
    if "model_init" not in rest:
        rest["model"] = llama() if model is None else model
    made = cls(
        args=rest.pop("arguments_class", TrainingArguments)(str(folder), **arguments),
        **{"train_dataset": rows(data), "eval_dataset": rows(7, seed=2)} | rest,
        callbacks=callbacks,
    )
    return made, logs


def train(cls, folder, model=None, *, resume=None, **given: Any) -> tuple[Any, Logs]:
    made, logs = trainer(cls, folder, model, **given)
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):
        made.train(resume_from_checkpoint=resume)
    return made, logs


def weights(model) -> dict[str, torch.Tensor]:
    """The model's values, whole, on every rank."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def tiers(folder) -> dict[str, dict[str, Any]]:
    return {
        "none": {"offload": "none"},
        "host": {"offload": "host"},
        "nvme": {"offload": "nvme", "nvme_paths": [f"{folder}/nvme-{{local_rank}}"]},
    }
