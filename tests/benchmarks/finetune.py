"""The run of `nox -s finetune` beside TRL alone on the same rows: losses of each step, and peak memory.

    python -m tests.benchmarks.finetune DIRECTORY --precision fp32 bf16 --steps 50

Each run is a process of its own. `stock` is TRL's SFTTrainer on a plain model, with the optimizer and the schedule of
the recipe. For bf16 its weights are bf16, and its AdamW keeps the fp32 weights of the files as master, from
which they are rounded with ties away from zero, as zero-core does. With --autocast its weights are fp32 instead, and it
computes under autocast (`bf16=True`). `ours` is zero-train with recipe=smollm2_laptop, whose states are on NVMe. Prints
one JSON line a run, and the largest relative distance of the losses. DIRECTORY is on the drive that holds the states.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from examples.finetune import HELD_OUT, made, pairs, written
from tests.benchmarks.sft import peak_kib, report


def stock(given: argparse.Namespace, folder: Path) -> None:
    """TRL alone, in this process. Prints the losses and the peak of resident memory."""
    import datasets
    import torch
    import trl
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

    from zero_core.precision import round_to
    from zero_train.config import compose
    from zero_train.loop import learning_rate

    config = compose(["recipe=smollm2_laptop", "model.path=x", f"run.steps={given.steps}"])
    optim, run = config.optim, config.run

    class WithMaster(torch.optim.AdamW):
        """AdamW on the fp32 weights, of which the parameters are rounded after each step."""

        def __init__(self, parameters: Iterable[torch.nn.Parameter], **options: Any) -> None:
            self.narrow = list(parameters)
            wide = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
            super().__init__(wide.parameters(), **options)
            self.round()

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            wide = self.param_groups[0]["params"]
            for master, parameter in zip(wide, self.narrow, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
            super().step()
            self.round()

        @torch.no_grad()
        def round(self) -> None:
            for master, parameter in zip(self.param_groups[0]["params"], self.narrow, strict=True):
                round_to(master.view(-1), parameter.view(-1))

    set_seed(run.seed)
    narrow = given.precision[0] == "bf16" and not given.autocast
    dtype = torch.bfloat16 if narrow else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype)
    kind = WithMaster if narrow else torch.optim.AdamW
    adamw = kind(model.parameters(), lr=optim.lr, betas=(0.9, 0.95), weight_decay=optim.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(adamw, lambda n: learning_rate(optim, n + 1, run.steps) / optim.lr)
    args = trl.SFTConfig(
        output_dir=str(folder / "stock"),
        max_steps=run.steps,
        per_device_train_batch_size=run.micro_batch,
        max_length=config.data.sequence_length,
        learning_rate=optim.lr,
        max_grad_norm=optim.max_grad_norm,
        seed=run.seed,
        use_cpu=True,
        bf16=given.precision[0] == "bf16" and given.autocast,
        activation_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    rows = datasets.load_dataset("json", data_files=str(folder / "training.jsonl"), split="train")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    trainer = trl.SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer, optimizers=(adamw, schedule))
    begun = time.monotonic()
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    report(losses=losses, seconds=round(time.monotonic() - begun, 1), peak_rss_mb=peak_kib() // 1024)


def ours(given: argparse.Namespace, folder: Path, precision: str) -> dict[str, Any]:
    run = folder / f"ours_{precision}"
    shutil.rmtree(run, ignore_errors=True)
    words = ["task=sft", "recipe=smollm2_laptop", f"model.path={folder / 'model'}", f"precision={precision}"]
    words += [f"data.path={folder / 'training.jsonl'}", f"run.dir={run}", f"run.steps={given.steps}", *given.words]
    words += ["data.validation_fraction=0", "run.evaluate_every=0", "run.export=false", "run.plots=false"]
    begun = time.monotonic()
    subprocess.run([sys.executable, "-m", "zero_train", *words], check=True, stdout=sys.stderr, env=_quiet(given))
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "losses": [step["loss"] for step in steps],
        "seconds": round(time.monotonic() - begun, 1),
        "peak_rss_mb": steps[-1]["peak_rss_bytes"] >> 20,
    }


def _quiet(given: argparse.Namespace) -> dict[str, str]:
    more = {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(given.threads)}
    return {**os.environ, **more}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--autocast", action="store_true", help="TRL alone computes bf16 beside fp32 weights")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--words", nargs="*", default=[], help="more words of zero-train's, such as run.threads=1")
    parser.add_argument("--stock", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    folder = Path(given.directory)
    if given.stock:
        stock(given, folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model" / "tokenizer_config.json").is_file():
        made(folder / "model")
    rows = {name: said for at, (name, said) in enumerate(sorted(pairs().items())) if at % 12 != 5}
    written(folder / "training.jsonl", {name: said for name, said in rows.items() if name not in HELD_OUT})
    for precision in given.precision:
        command = [sys.executable, "-m", "tests.benchmarks.finetune", str(folder), "--stock"]
        command += ["--precision", precision, "--steps", str(given.steps), *(["--autocast"] if given.autocast else [])]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=_quiet(given)).stdout
        theirs = json.loads(next(line for line in printed.splitlines() if '"peak_rss_mb"' in line))
        found = ours(given, folder, precision)
        pairs_ = list(zip(found["losses"], theirs["losses"], strict=True))
        for name, each in (("stock", theirs), ("ours", found)):
            losses = each.pop("losses")
            report(variant=name, precision=precision, steps=len(losses), first=losses[0], last=losses[-1], **each)
        farthest = [abs(one - other) / other for one, other in pairs_]
        report(precision=precision, farthest=max(farthest), at_step=farthest.index(max(farthest)) + 1)


if __name__ == "__main__":
    main()
