"""SmolLM2-135M-Instruct fine-tuned with TRL's SFTTrainer: losses and peak memory, stock and with states on NVMe.

    python -m tests.benchmarks.sft DIRECTORY --adapters --steps 24

Each variant is a process of its own: `stock` (the same script without zero_hf), `nvme` (parameters, gradients and
optimizer states on NVMe, weights read slice by slice), and `killed`, which saves a checkpoint every `--save` steps,
ends by kill -9 at half of the steps, and is started again. Rows are about 60 tokens: a question, and the first words of
a docstring. What is printed is one JSON line a variant, and the largest relative distance of its losses from the stock
run's. DIRECTORY is on the drive that holds the states.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

VARIANTS = ("stock", "nvme", "killed")


def report(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def train(given: argparse.Namespace) -> None:
    """One run in this process. Prints a line for each step, and one with the peak of resident memory."""
    import torch
    import trl
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed

    import zero_core
    import zero_hf
    from examples.sft import pairs
    from tests.benchmarks.step_worker import peak_rss_bytes

    class Printed(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
            if "loss" in logs:
                report(step=state.global_step, loss=logs["loss"], at=time.monotonic())

    where, source, stock = Path(given.directory), Path(given.directory, "model"), given.variant == "stock"
    set_seed(0)
    model = zero_hf.from_pretrained(AutoModelForCausalLM, source, dtype=torch.float32)
    if given.adapters:
        linears = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        with zero_core.deferred_init():
            model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=linears))
    if stock:
        zero_core.materialise(model)  # a plain model: the same weights, and the same adapters
    zero = {"offload": "nvme", "nvme_paths": str(where / "states"), **json.loads(given.zero)}
    args = trl.SFTConfig(
        output_dir=str(where / given.variant), max_steps=given.steps, per_device_train_batch_size=given.batch,
        learning_rate=1e-4, max_length=64, bf16=False, use_cpu=True, logging_steps=1, report_to="none",
        save_strategy="steps" if given.variant == "killed" else "no", save_steps=given.save,
    )  # fmt: skip
    tokens = {"train_dataset": pairs(), "processing_class": AutoTokenizer.from_pretrained(source)}
    kind = trl.SFTTrainer if stock else zero_hf.sharded(trl.SFTTrainer, zero)
    kind(model, args, callbacks=[Printed()], **tokens).train(resume_from_checkpoint=given.resume)
    report(peak_rss_mb=peak_rss_bytes(os.getpid()) >> 20)


def child(given: argparse.Namespace, variant: str, *more: str, until: int | None = None) -> dict[str, Any]:
    """Runs a variant; until: kill -9 once it has logged this step. Returns losses by step, seconds and the peak."""
    command = [sys.executable, "-m", "tests.benchmarks.sft", *sys.argv[1:], "--variant", variant, *more]
    quiet = {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(given.threads)}
    rows: list[dict[str, Any]] = []
    with (
        open(Path(given.directory, f"{variant}.log"), "ab") as errors,
        subprocess.Popen(
            command, env={**os.environ, **quiet}, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"'):  # and not the plan, or what the Trainer prints
                rows.append(json.loads(line))
                if until is not None and rows[-1].get("step") == until:
                    process.send_signal(signal.SIGKILL)
                    break
    if until is None and process.returncode:
        raise SystemExit(f"{variant} failed: see {errors.name}")
    steps = [row for row in rows if "loss" in row]
    seconds = [after["at"] - before["at"] for before, after in pairwise(steps[1:])]
    return {
        "losses": {row["step"]: row["loss"] for row in steps},
        "seconds_a_step": round(statistics.median(seconds), 2) if seconds else None,
        "peak_rss_mb": rows[-1].get("peak_rss_mb"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--adapters", action="store_true", help="LoRA, r = 16 on all linear layers; else all trains")
    parser.add_argument("--zero", default="{}", help="more settings of ZeroConfig, as JSON")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--save", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.variant:
        train(given)
        return
    folder = Path(given.directory)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").is_dir():
        from tests.integration.zero_hf.real_model import made

        made(folder / "model")
    stock: dict[int, float] = {}
    for variant in VARIANTS:
        shutil.rmtree(folder / variant, ignore_errors=True)
        if variant == "killed":
            before = child(given, variant, until=given.steps // 2)
            found = child(given, variant, "--resume")
            resumed = min(found["losses"])
            found["losses"] = {**{s: x for s, x in before["losses"].items() if s < resumed}, **found["losses"]}
            found |= {"killed_at": given.steps // 2, "resumed_at": resumed}
        else:
            found = child(given, variant)
        losses = found.pop("losses")
        stock = stock or losses
        found["farthest"] = max(abs(loss - stock[step]) / stock[step] for step, loss in losses.items())
        found |= {"steps": len(losses), "first_loss": losses[1], "last_loss": losses[max(losses)]}
        report(variant=variant, method="LoRA" if given.adapters else "full", **found)


if __name__ == "__main__":
    main()
