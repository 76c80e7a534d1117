"""Turns conf/ and a command line into a `Config`, and Hydra's exceptions into one readable line.

Owns where conf/ is found and how a mistyped key is explained. Values are checked in checks.py.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from textwrap import dedent
from typing import Any, cast

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zero_train.errors import ConfigError, chain, choices
from zero_train.run_folder import replace
from zero_train.schema import ROW_KINDS, Config, rate, tenth

NAME = "train"  # of the root file, conf/train.yaml
_HEAD = dedent("""\
    # GROUP=OPTION on the command line wins over the values below, and KEY=VALUE over both.
    hydra:
      searchpath: [pkg://zero_train.conf]
    defaults:
    - settings
    - schema
    - _self_""")
_OTHER_NAMES = {  # what other trainers call our keys
    "optim.lr": "learning_rate",
    "optim.max_grad_norm": "grad_clip max_norm",
    "run.micro_batch": "batch_size per_device_train_batch_size",
    "run.accumulate": "gradient_accumulation_steps",
    "run.steps": "max_steps",
    "run.epochs": "num_epochs num_train_epochs",
    "run.dir": "output_dir",
    "run.checkpoint_every": "save_steps",
    "run.keep_checkpoints": "save_total_limit",
    "run.evaluate_every": "eval_steps",
    "run.report_every": "logging_steps",
    "run.resume": "resume_from_checkpoint",
    "model.checkpointing": "gradient_checkpointing",
    "data.sequence_length": "seq_len max_length",
    "precision.parameters": "dtype",
}
_SCHEMA = OmegaConf.structured(Config)
OmegaConf.set_struct(_SCHEMA.trl, False)  # its keys are TRL's
OmegaConf.set_struct(_SCHEMA.optim.options, False)  # its keys are the class's
ConfigStore.instance().store(name="schema", node=_SCHEMA, provider="zero_train")

# Names the default run folder. Has milliseconds, because jobs of an array start in the same second; a sweep shares it.
_STARTED = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}.{time.time_ns() // 1_000_000 % 1000:03d}"


def _data_kind(path: Any, tokenizer: Any, sources: Any, task: str) -> str:
    """Returns what reads `path` for a task where data=auto."""
    ending = Path(str(path)).suffix[1:]
    if sources or path is None:
        return "mixture" if sources else "stdlib"
    if task == "pretrain" and not (tokenizer and ending in ROW_KINDS):
        return "text"
    return "datasets" if not ending else ending if ending in ("parquet", "csv") else "jsonl"


_RESOLVERS: dict[str, Callable[..., Any]] = {
    "tenth": lambda steps, epochs: tenth(steps) if epochs is None else None,
    "rate": rate,
    "recipe": lambda task: "laptop_25m_nvme" if task == "pretrain" else "finetune",
    "model_kind": lambda path: "llama" if path is None else "hf",
    "data_kind": _data_kind,
    "data_pattern": lambda kind: f"*.{kind}" if kind in ("jsonl", "parquet", "csv") else "*",
}
for _name, _follows in _RESOLVERS.items():
    OmegaConf.register_new_resolver(_name, _follows, replace=True)
OmegaConf.register_new_resolver("started", lambda: _STARTED, replace=True, use_cache=True)  # Hydra hands its value on


def folder() -> Path:
    """Returns the folder conf/, which is that at the root of this repository, or its copy in a wheel."""
    return Path(__file__).resolve().parent / "conf"


def compose(overrides: Sequence[str] = ()) -> Config:
    """Returns the configuration of one run, given overrides as on the command line, like `["run.steps=5"]`.

    Raises:
        ConfigError: a key or an option does not exist, or a value has the wrong type.
    """
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(folder()), version_base="1.3"):
            return to_config(hydra_compose(NAME, overrides=list(overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        raise explained(error) from error


def keys_of(words: Sequence[str]) -> list[str]:
    """Returns the keys and groups on the command line."""
    return [override.key_or_group for override in _parsed(words)]


def to_config(composed: DictConfig) -> Config:
    """Returns the dataclasses behind what Hydra composed. Raises ConfigError for keys at `???` or unknown ones."""
    if missing := sorted(_missing(OmegaConf.to_container(composed, resolve=False))):
        raise ConfigError(f"{missing[0]} has no value; give one with {missing[0]}=…")
    values = cast(dict[str, Any], OmegaConf.to_container(composed))
    try:  # a `+` on the command line adds keys that no dataclass has, which the merge refuses
        merged = OmegaConf.merge(OmegaConf.structured(Config), values)
        OmegaConf.copy_cache(from_config=composed, to_config=merged)
        config = cast(Config, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise explained(error) from error
    if config.run.resume == "auto" and "${started:}" in values["run"]["dir"]:
        raise ConfigError(
            "run.resume=auto looks into run.dir, and the default run.dir is new each time; name a folder with run.dir=…"
        )
    return config


def _missing(value: Any, name: str = "") -> Iterator[str]:
    """Yields the keys at `???`, and not those whose values follow from one."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _missing(item, f"{name}.{key}" if name else str(key))
    elif value == "???" or (isinstance(value, list) and "???" in value):
        yield name


def save(config: Config, path: Path) -> None:
    """Writes every key and its value as YAML, all or nothing.

    `--config-dir` and `--config-name` read it back. Its list of defaults lets the command line choose groups as well.
    """
    groups = "".join(f"\n- {group}: null" for group in sorted(_groups()))
    replace(path, f"{_HEAD}{groups}\n{OmegaConf.to_yaml(OmegaConf.structured(config))}")


def explained(error: Exception) -> ConfigError:
    """Returns one readable message for an error of Hydra or OmegaConf."""
    if isinstance(error, OverrideParseException):
        return _unread(str(error.override))
    text = "\n".join(map(str, chain(error)))
    if found := re.search(r"Could not find '([\w./]+)/([^'/]+)'", text):
        there = re.search(r"Available options in '.*':\n((?:\t.*\n)*)", text)
        return choices(found[1], found[2], there[1].split() if there else ())
    if found := re.search(r"Could not override '([^']+)'. No match in the defaults list", text):
        if found[1] not in _groups():
            return unknown_key(found[1])
        return ConfigError(f"{found[1]} is not in the defaults list of this configuration; write +{found[1]}=OPTION")
    if found := re.search(r"Ambiguous value for argument '([^']+)'", text):
        return ConfigError(
            f"{found.group(1)} names several values; add -m to run one after the other, or write [a,b] for a list"
        )
    named = re.search(r"full_key: (\S+)", text) or re.search(r"override '?([\w.]+)", text)
    if not named:
        return ConfigError(text.strip().splitlines()[0])
    key, sections = named.group(1), {field.name for field in dataclasses.fields(Config)}
    file = f"{place[1]}.yaml: " if (place := re.match(r"In '([^']+)': ", text)) else ""
    if file and (key in _groups() - sections or re.search(r"Could not override '\S+@", text)):
        return ConfigError(f"{file}its keys belong to its own folder; write '# @package _global_' in its first line")
    if key in sections - _groups():
        return ConfigError(f"{file}{key} is a section; change one of its keys with {key}.KEY=VALUE")
    if key in {*keys(), *sections}:
        lines = [line for line in text.splitlines() if not re.match(r"\s*(full_key|object_type|Error merging)", line)]
        said = (lines or [text])[0].strip().rstrip(".").removeprefix(place[0] if place else "")
        return ConfigError(f"{file}{key} cannot take that value: {said}; change {key}")
    return unknown_key(key, file)


def _unread(word: str) -> ConfigError:
    """Returns the error for a word that is no override."""
    key, equals, value = word.partition("=")
    if not equals:
        return ConfigError(f"cannot read '{word}': write KEY=VALUE, or see zero-train --help")
    quoted = value.replace("\\", "\\\\").replace("'", "\\'")
    return ConfigError(f"cannot read '{word}': such a text needs quotes; write \"{key}='{quoted}'\"")


def unknown_key(key: str, file: str = "") -> ConfigError:
    """Returns the error for a `key` that does not exist, with the most similar key if there is one."""
    known = list(keys())
    section, _, last = key.rpartition(".")
    if tier := re.match(r"(offload|hardware)\.tiers\.", key):
        return ConfigError(f"the key {key} does not exist; add a tier with a plus before the key: +{tier[0]}NAME={{…}}")
    nearer = [name for name in known if name.startswith(f"{section}.")] if section else []
    meant = next((ours for ours, theirs in _OTHER_NAMES.items() if last in theirs.split()), None)
    for candidates in (nearer, known):  # first the same section: a name alone must not make two keys alike
        lasts = {name.rpartition(".")[2]: name for name in reversed(candidates)}
        near = get_close_matches(last, list(lasts), n=1, cutoff=0.6)
        meant = meant or (lasts[near[0]] if near else None)
    hint = f"did you mean '{meant}'?" if meant else "zero-train --cfg job lists all of them"
    return ConfigError(f"{file}the key {key} does not exist; {hint}")


def _groups() -> set[str]:
    return {path.name for path in folder().iterdir() if path.is_dir() and not path.name.startswith("_")}


def keys() -> Iterator[str]:
    """Yields every key, as it is written on the command line, and every group."""
    for section in dataclasses.fields(Config):
        if section.name != "run":
            yield section.name
        for key in () if section.name == "trl" else dataclasses.fields(cast(Any, section.default_factory)):
            yield f"{section.name}.{key.name}"
    yield from ("tier", "recipe")


def _parsed(words: Sequence[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides(list(words))
    except HydraException as error:
        raise explained(error) from error
