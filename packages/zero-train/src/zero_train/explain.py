"""What `zero-train --help` prints: one screen of groups, and with a name every key of a group with its meaning.

The words are those of schema.py and of the comments that head the files of conf/. Owns no key and no value.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from zero_train import config as configuration
from zero_train import schema
from zero_train.errors import choices

_WIDTH = 100
_SECTIONS = {section.name: cast(type, section.default_factory) for section in dataclasses.fields(schema.Config)}
_OTHERS = {"recipe": "Combines choices for a purpose and a machine.", "tier": "Adds a tier between host and nvme."}
_OVERVIEW = """\
zero-train trains and fine-tunes language models, with states in host memory or on NVMe.

  zero-train                                               the default, 25 M parameters
  zero-train task=sft model.path=FOLDER data.path=chats.jsonl run.dir=mine
  zero-train generate run.dir=mine                         asks the result
  zero-train run.dry=true recipe=sft_8b_1x24gib_nvme model.path=FOLDER  prints the plan
  zero-train -m zero.stage=1,2,3 offload=none,nvme         a sweep
  torchrun --nproc-per-node 2 -m zero_train                several ranks
"""


def text(names: Sequence[str], words: Sequence[str]) -> str:
    """Returns the overview, or all about the groups in `names`, with the values that `words` lead to.

    Raises:
        ConfigError: there is no such group, or `words` cannot be composed.
    """
    known = [*_SECTIONS, *_OTHERS]
    for name in names:
        if name not in (*known, "all"):
            raise choices("--help", name, [*known, "all"])
    if not names:
        return _overview()
    values = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.structured(configuration.compose(words))))
    wanted = known if "all" in names else names
    return "\n\n".join("\n".join(_described(name, values.get(name, {}))) for name in wanted)


def _overview() -> str:
    lines = [_OVERVIEW, "Groups: choose with GROUP=OPTION."]
    for name in (*_SECTIONS, *_OTHERS):
        if options := _options(name):
            shown = ", ".join(options) if name != "recipe" else f"{', '.join(options[:4])}, … (--help recipe)"
            lines.append(f"  {name:<10} {shown}")
    lines += [
        "",
        "Keys: change with GROUP.KEY=VALUE; run.steps, run.dir and others are in the section run.",
        "  zero-train --help data         explains the keys of a group; several may be named, or all",
        "  zero-train --cfg job           prints every key with its value, as YAML",
    ]
    return "\n".join(lines)


def _described(name: str, values: dict[str, Any]) -> Iterator[str]:
    if name in _OTHERS:
        yield f"{name}: {_OTHERS[name]} Choose with {name}=OPTION."
        for option in _options(name):
            yield f"  {option}"
            yield from _wrapped(_heading(configuration.folder() / name / f"{option}.yaml"))
        return
    yield f"{name}: {inspect.getdoc(_SECTIONS[name])}"
    if options := _options(name):
        yield f"  choose with {name}=OPTION: {', '.join(options)}"
    for key, meaning in _meanings(_SECTIONS[name]).items():
        value = values[key] if isinstance(values[key], str) else json.dumps(values[key])
        yield f"  {name}.{key}={value}"
        yield from _wrapped(meaning)


def _wrapped(meaning: str) -> list[str]:
    return textwrap.wrap(meaning, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _options(group: str) -> list[str]:
    return sorted(path.stem for path in (configuration.folder() / group).glob("*.yaml"))


def _heading(file: Path) -> str:
    """Returns the comment that a file of conf/ begins with."""
    said: list[str] = []
    for line in file.read_text().splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @"):
            said.append(line.lstrip("# "))
    return " ".join(said)


def _meanings(section: type) -> dict[str, str]:
    """Returns the text below each field of a dataclass of schema.py."""
    body = cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]).body
    found = {}
    for declared, below in zip(body, body[1:], strict=False):
        if isinstance(declared, ast.AnnAssign) and isinstance(below, ast.Expr):
            name, said = cast(ast.Name, declared.target).id, cast(ast.Constant, below.value).value
            found[name] = " ".join(str(said).split())
    return found
