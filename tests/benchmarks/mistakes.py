"""How long a user of zero-train waits for the message about a mistake: `python -m tests.benchmarks.mistakes DIRECTORY`.

Each command has one mistake, and is a process of its own, from its start to its end. Prints the medians of `--rounds`,
of the time and of the processor's time, which other programs do not lengthen much, and the message. --model names a
chat model's folder; without it, examples/sft.py's tiny one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
MANY = 20_000  # rows of the larger file


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def written(folder: Path) -> None:
    """Writes files with one mistake each, and one without."""
    chats = [{"messages": [turn("user", f"What is {at}?"), turn("assistant", f"It is {at}.")]} for at in range(40)]
    lines = [json.dumps(row) for row in chats]
    files = {
        "good.jsonl": lines,
        "broken.jsonl": [*lines[:30], lines[30][:-3], *lines[31:]],
        "role.jsonl": [*lines[:30], lines[30].replace('"user"', '"usr"'), *lines[31:]],
        "thanks.jsonl": [*lines[:30], lines[30].replace("]}", ', {"role": "user", "content": "thanks"}]}')],
        "pairs.jsonl": [json.dumps({"prompt": "a", "completion": "b"})] * 3,
        "many.jsonl": [json.dumps({"messages": chats[at % 40]["messages"], "n": at}) for at in range(MANY)],
    }
    files["many.jsonl"][-1] = files["many.jsonl"][-1].replace('"user"', '"usr"')
    for name, found in files.items():
        (folder / name).write_text("\n".join(found) + "\n")
    one = "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    more = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    strict = "{% if messages|length > 2 %}{{ raise_exception('one question and one answer') }}{% endif %}"
    templates = {"broken": one.replace("{% endfor %}", ""), "last": "{{ messages[-1]['role'] }}" + one + more}
    templates |= {"strict": strict + one + more}
    for name, text in templates.items():
        (folder / f"{name}.jinja").write_text(text)


MISTAKES = {
    "a key that does not exist": ["data.path={0}/good.jsonl", "run.epoch=3"],
    "a value that is none": ["data.path={0}/good.jsonl", "run.micro_batch=0"],
    "a file that is not there": ["data.path={0}/god.jsonl"],
    "a line that is no JSON": ["data.path={0}/broken.jsonl"],
    "a role that does not exist": ["data.path={0}/role.jsonl"],
    "the same in the last of 20,000 rows": ["data.path={0}/many.jsonl"],
    "rows for another task": ["task=dpo", "data.path={0}/good.jsonl"],
    "a weight that is no number": ["data.sources=[{{path: {0}/good.jsonl, weight: two}}]"],
    "a mixture of different columns": ["data.sources=[{{path: {0}/good.jsonl}}, {{path: {0}/pairs.jsonl}}]"],
    "a template that is not Jinja": ["data.path={0}/good.jsonl", "data.chat_template={0}/broken.jinja"],
    "a template that cannot mark answers": ["data.path={0}/thanks.jsonl", "data.chat_template={0}/last.jinja"],
    "a row that the template refuses": ["data.path={0}/thanks.jsonl", "data.chat_template={0}/strict.jinja"],
    "model.path is an adapter": ["data.path={0}/good.jsonl", "model.path={0}/adapter"],
    "a length that cuts every answer off": ["data.path={0}/good.jsonl", "data.sequence_length=3"],
}


def waited(words: list[str], folder: Path) -> tuple[float, float, str]:
    """Seconds until the command has ended, those that processors worked for it, and its message."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    begun, before = time.monotonic(), os.times()
    command = [sys.executable, "-m", "zero_train", *words]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    seconds, after = time.monotonic() - begun, os.times()
    worked = after.children_user + after.children_system - before.children_user - before.children_system
    if ended.returncode != 2:
        raise SystemExit(f"{words} ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")
    return seconds, worked, ended.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    folder = given.directory.resolve()
    (folder / "adapter").mkdir(parents=True, exist_ok=True)
    (folder / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    written(folder)
    model = given.model or folder / "model"
    if not model.is_dir():
        from examples.sft import tiny

        for part in tiny():
            part.save_pretrained(model)
    seconds: dict[str, list[list[float]]] = {name: [] for name in MISTAKES}
    said: dict[str, str] = {}
    for _ in range(given.rounds):
        for name, words in MISTAKES.items():
            own = [word.format(folder) for word in words]
            keys = [word.partition("=")[0] for word in own]
            usual = {"task": "sft", "model.path": str(model), "run.dir": str(folder / "run")}
            others = [f"{key}={value}" for key, value in usual.items() if key not in keys]
            *took, said[name] = waited([*own, *others], folder)
            seconds[name].append(took)
    for name, found in seconds.items():
        wall, worked = (round(statistics.median(each), 2) for each in zip(*found, strict=True))
        print(json.dumps({"mistake": name, "seconds": wall, "processor": worked, "said": said[name]}))


if __name__ == "__main__":
    main()
