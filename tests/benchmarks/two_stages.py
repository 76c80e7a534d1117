"""SFT with LoRA, then DPO, then the merged model's answer, three ways: in a notebook, by commands, and by TRL alone.

    python -m tests.benchmarks.two_stages DIRECTORY [--model FOLDER] [--steps 12] [--offload nvme]

The notebook is examples/two_stages.py in one process. The commands are those of zero-train: task=sft, task=dpo on what
the first merged, generate. Each is compared with TRL on plain torch, in a process of its own, which begins with the
same adapters and takes the same optimizer: without the two lines of zero_hf for the notebook, and with zero-train's
AdamW and schedule for the commands. All is fp32. Prints a JSON line for each stage, with resident memory at its end
(`rss_mb`), its peak since the stage before (`peak_mb`) and what the plan keeps on each tier, then the largest relative
differences of a loss. Without --model, a Llama of 21 M parameters with SmolLM2's tokenizer. DIRECTORY is on the drive
that holds the states.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "two_stages.py"
RATE = 1e-3


def report(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def example(zero: bool) -> dict[str, Any]:
    """The names of the example, from the script as it stands or without the lines that name zero_hf."""
    lines = [line for line in EXAMPLE.read_text().splitlines(keepends=True) if zero or "zero_hf" not in line]
    names: dict[str, Any] = {"__name__": "two_stages"}
    exec(compile("".join(lines), str(EXAMPLE), "exec"), names)
    return names


def small(folder: Path) -> Path:
    """A Llama of 21 M parameters with random weights, and SmolLM2's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from examples.finetune import package

    source, gguf = package()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf)
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8}
    others = {"tie_word_embeddings": True, "eos_token_id": tokenizer.eos_token_id}
    config = LlamaConfig(vocab_size=len(tokenizer), **sizes, **others)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def memory() -> dict[str, int]:
    """Resident memory and its peak since the last call, in MB."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(("VmRSS", "VmHWM")):
            found[line[:5]] = int(line.split()[1]) * 1024 // 10**6
    Path("/proc/self/clear_refs").write_text("5")
    return {"rss_mb": found["VmRSS"], "peak_mb": found["VmHWM"]}


def kept(trainer: Any) -> dict[str, int]:
    """What the plan of a sharded trainer keeps on each tier, in MB."""
    run = getattr(trainer, "zero_run", None)
    return {} if run is None else {f"{tier}_mb": round(run.plan.total(tier) / 1e6) for tier in ("host", "nvme")}


def losses(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def notebook(given: argparse.Namespace, zero: bool) -> None:
    """The example, stage by stage, in this process."""
    names = example(zero)
    names["set_seed"](0)
    model = names["AutoModelForCausalLM"].from_pretrained(given.model)
    tokenizer = names["AutoTokenizer"].from_pretrained(given.model)
    report(stage="loaded", **memory())
    first = names["sft"](model, tokenizer, str(given.directory / "sft"), given.steps)
    report(stage="sft", losses=losses(first), **memory(), **kept(first))
    model = first.model.merge_and_unload()
    second = names["dpo"](model, tokenizer, str(given.directory / "dpo"), given.steps)
    report(stage="dpo", losses=losses(second), **memory(), **kept(second))
    model = second.model.merge_and_unload()
    if zero:
        second.end()
    report(stage="merged", **memory())
    report(stage="answer", text=names["answer"](model, tokenizer), **memory())


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


def commands(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Three commands of zero-train, each a process of its own."""
    from examples.two_stages import QUESTION

    chats, preferences = rows(given.directory)
    stages = {"sft": (given.model, chats), "dpo": (given.directory / "sft" / "merged", preferences)}
    for task, (model, data) in stages.items():
        folder = given.directory / task
        line = words(task, model, data, folder, given.steps, f"offload={given.offload}", *given.words)
        process(["-m", "zero_train", *line])
        steps = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
        last = {f"{name}_mb": steps[-1][f"{name}_bytes"] // 10**6 for name in ("host", "nvme")}
        peak = {"peak_mb": steps[-1]["peak_rss_bytes"] // 10**6}
        yield {"stage": task, "losses": [step["loss"] for step in steps], **peak, **last}
    for folder in (given.directory / "dpo", given.directory / "dpo" / "merged"):  # with its adapter, and merged
        asked = ["generate", f"run.dir={folder}", f"generate.prompt={QUESTION}", "generate.tokens=24"]
        yield {"stage": "answer", "text": process(["-m", "zero_train", *asked]).strip()}


def alone(given: argparse.Namespace) -> None:
    """TRL on plain torch in this process, with the adapters' first values, AdamW and schedule of the commands."""
    import peft
    import torch
    import trl
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

    import zero_core
    from examples.two_stages import answer, lora, usual
    from zero_train import config, pretrained
    from zero_train.loop import learning_rate

    def adapted(network: Any, line: list[str]) -> Any:
        """`network` with adapters, whose values are those with which the run of this command begins."""
        composed = config.compose(line)
        drawn: Any = pretrained.build(Path(given.model), composed)
        zero_core.materialise(drawn)
        values = {name: value for name, value in drawn.state_dict().items() if "lora_" in name}
        network = peft.get_peft_model(network, lora())
        left = network.load_state_dict(values, strict=False)
        assert values and not left.unexpected_keys
        return network

    files = dict(zip(("sft", "dpo"), rows(given.directory), strict=True))
    kinds = {"sft": (trl.SFTTrainer, trl.SFTConfig, {}), "dpo": (trl.DPOTrainer, trl.DPOConfig, {"beta": 0.1})}
    model, tokenizer = AutoModelForCausalLM.from_pretrained(given.model), AutoTokenizer.from_pretrained(given.model)
    for task, (trainer_class, options, more) in kinds.items():
        line = words(task, given.model, files[task], given.directory / "alone", given.steps)
        optim = config.compose(line).optim
        network = adapted(model, line)
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        adamw = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), weight_decay=optim.weight_decay)
        share = torch.optim.lr_scheduler.LambdaLR(
            adamw, lambda done, optim=optim: learning_rate(optim, done + 1, given.steps) / RATE
        )
        set_seed(0)
        clipped = {"max_grad_norm": optim.max_grad_norm, "learning_rate": RATE, "seed": 0}
        args = options(**usual(str(given.directory / "alone"), given.steps), **clipped, **more)
        found = load_dataset("json", data_files=str(files[task]), split="train")
        trainer = trainer_class(
            network, args=args, train_dataset=found, processing_class=tokenizer, optimizers=(adamw, share)
        )
        trainer.train()
        report(stage=task, losses=losses(trainer), **memory())
        model = trainer.model.merge_and_unload()
    report(stage="answer", text=answer(model, tokenizer), **memory())


def process(arguments: list[str], **environment: str) -> str:
    """Runs a program in a process of its own and returns what it prints."""
    more = {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **environment}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **more}
    ).stdout


def child(given: argparse.Namespace, way: str) -> list[dict[str, Any]]:
    zero = {"offload": given.offload, "nvme_paths": str(given.directory / "states")}
    file = given.directory / "zero.json"
    file.write_text(json.dumps(zero))
    told = [str(given.directory), "--model", str(given.model), "--steps", str(given.steps), "--way", way]
    threads = {"OMP_NUM_THREADS": str(given.threads)}
    printed = process(["-m", "tests.benchmarks.two_stages", *told], ZERO_HF_CONFIG=str(file), **threads)
    return [json.loads(line) for line in printed.splitlines() if line.startswith('{"stage"')]


def farthest(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], stage: str) -> float:
    """The largest relative difference of a loss of a stage."""
    one, other = ([row["losses"] for row in rows if row["stage"] == stage][0] for rows in (ours, theirs))
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", type=Path, help="a folder of transformers with a chat template")
    parser.add_argument("--steps", type=int, default=12, help="of each stage")
    parser.add_argument("--offload", choices=("none", "host", "nvme"), default="nvme")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--words", nargs="*", default=[], help="more words of zero-train's")
    parser.add_argument("--way", choices=("notebook", "stock", "alone"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.directory = given.directory.resolve()
    if given.way == "alone":
        alone(given)
        return
    if given.way:
        notebook(given, given.way == "notebook")
        return
    for name in ("sft", "dpo", "alone"):
        shutil.rmtree(given.directory / name, ignore_errors=True)
    given.directory.mkdir(parents=True, exist_ok=True)
    given.words = [f"run.threads={given.threads}", *given.words]
    given.model = given.model.resolve() if given.model else small(given.directory / "model")
    for mine, its in (("notebook", "stock"), ("commands", "alone")):
        theirs = child(given, its)
        ours = child(given, mine) if mine == "notebook" else list(commands(given))
        for way, stages in ((its, theirs), (mine, ours)):
            for row in stages:
                report(way=way, **row)
        texts = {row["text"] for row in (*ours, *theirs) if "text" in row}
        far = {stage: farthest(ours, theirs, stage) for stage in ("sft", "dpo")}
        report(way=mine, beside=its, farthest=far, same_text=len(texts) == 1)


if __name__ == "__main__":
    main()
