"""SFT with LoRA, then DPO, as commands of zero-train, and by TRL on plain torch with the same adapters."""

import json
from pathlib import Path
from typing import Any

RATE = 1e-3


def losses(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def rows(directory: Path) -> tuple[Path, Path]:
    """Writes the rows of both stages, which the example makes, as JSONL."""
    from examples.two_stages import chats, preferences

    files = directory / "chats.jsonl", directory / "preferences.jsonl"
    for file, found in zip(files, (chats(), preferences()), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in found))
    return files


def words(task: str, model: Path, data: Path, folder: Path, steps: int, *more: str) -> list[str]:
    """The command of a stage."""
    return [
        *(f"task={task}", "adapter=lora", "adapter.rank=8", "adapter.alpha=16", "adapter.merge=true", *more),
        *(f"model.path={model}", f"data.path={data}", f"run.dir={folder}", f"run.steps={steps}", "precision=fp32"),
        *("run.micro_batch=2", "run.accumulate=1", "data.sequence_length=128", f"optim.lr={RATE}"),
        *("data.validation_fraction=0", "run.evaluate_every=0", "run.checkpoint_every=0", "run.plots=false"),
    ]


def alone(directory: Path, folder: Path, steps: int) -> tuple[dict[str, list[float]], str]:
    """TRL on plain torch with the adapters' first values, AdamW and schedule of the commands.

    folder: the model's. Returns the losses of each stage, and the answer of what both have trained.
    """
    import peft
    import torch
    import trl
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

    import zero_core
    from examples.two_stages import answer, lora, usual
    from zero_train.model import pretrained
    from zero_train.run.loop import learning_rate
    from zero_train.settings import compose

    def adapted(network: Any, line: list[str]) -> Any:
        """`network` with adapters, whose values are those with which the run of this command begins."""
        composed = compose.compose(line)
        drawn: Any = pretrained.build(folder, composed)
        zero_core.materialise(drawn)
        values = {name: value for name, value in drawn.state_dict().items() if "lora_" in name}
        network = peft.get_peft_model(network, lora())
        left = network.load_state_dict(values, strict=False)
        assert values and not left.unexpected_keys
        return network

    files = dict(zip(("sft", "dpo"), rows(directory), strict=True))
    kinds = {"sft": (trl.SFTTrainer, trl.SFTConfig, {}), "dpo": (trl.DPOTrainer, trl.DPOConfig, {"beta": 0.1})}
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    losses: dict[str, list[float]] = {}
    for task, (trainer_class, options, more) in kinds.items():
        line = words(task, folder, files[task], directory / "alone", steps)
        optim = compose.compose(line).optim
        network = adapted(model, line)
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        adamw = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), weight_decay=optim.weight_decay)
        share = torch.optim.lr_scheduler.LambdaLR(
            adamw, lambda done, optim=optim: learning_rate(optim, done + 1, steps) / RATE
        )
        set_seed(0)
        clipped = {"max_grad_norm": optim.max_grad_norm, "learning_rate": RATE, "seed": 0}
        args = options(**usual(str(directory / "alone"), steps), **clipped, **more)
        found = load_dataset("json", data_files=str(files[task]), split="train")
        trainer = trainer_class(
            network, args=args, train_dataset=found, processing_class=tokenizer, optimizers=(adamw, share)
        )
        trainer.train()
        losses[task] = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        model = trainer.model.merge_and_unload()
    return losses, answer(model, tokenizer)
