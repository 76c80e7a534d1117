"""Turns conf/ and a command line into a `Config`, and Hydra's exceptions into one readable line.

Owns where conf/ is found and how a mistyped key is explained. Values are checked in checks.py.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zero_train import unused_keys
from zero_train.errors import ConfigError, chain, choices
from zero_train.run_folder import replace
from zero_train.schema import ROW_KINDS, Config, rate, tenth

NAME = "train"  # of the root file, conf/train.yaml
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
ConfigStore.instance().store(name="schema", node=Config, provider="zero_train")

# Names the default run folder. Has milliseconds, because jobs of an array start in the same second; a sweep shares it.
_STARTED = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}.{time.time_ns() // 1_000_000 % 1000:03d}"
OmegaConf.register_new_resolver("started", lambda: _STARTED, replace=True)
OmegaConf.register_new_resolver("tenth", lambda steps, epochs: tenth(steps) if epochs is None else None, replace=True)
OmegaConf.register_new_resolver("rate", rate, replace=True)


def folder() -> Path:
    """Returns the folder conf/, which is inside an installed wheel or at the root of this repository.

    Raises:
        FileNotFoundError: it is in neither place, so the installation is broken.
    """
    here = Path(__file__).resolve().parent
    for candidate in (here / "conf", *(parent / "conf" for parent in here.parents[:5])):
        if (candidate / f"{NAME}.yaml").is_file():
            return candidate
    raise FileNotFoundError(f"no conf/{NAME}.yaml in {here} nor at the root of its repository; reinstall zero-train")


def compose(overrides: Sequence[str] = ()) -> Config:
    """Returns the configuration of one run, given overrides as on the command line, like `["run.steps=5"]`.

    Raises:
        ConfigError: a key or an option does not exist, or a value has the wrong type.
    """
    words = completed(overrides)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(folder()), version_base="1.3"):
            return to_config(hydra_compose(NAME, overrides=words))
    except (HydraException, OmegaConfBaseException) as error:
        raise explained(error) from error


def jobs(words: Sequence[str], sweep: bool, defaults: Sequence[str] = ()) -> list[tuple[list[str], Config]]:
    """Composes every job of the command line before any runs, so that a mistyped key of the last one stops the first.

    defaults: words that come before all others, and that a run need not use.

    Raises:
        ConfigError: as `compose` does, and also if no job uses a key.
    """
    words = completed(words)
    lists: Sequence[Sequence[str]] = [words]
    if sweep:
        parsed = [override for override in _parsed(words) if not override.get_key_element().startswith("hydra")]
        lists = BasicSweeper.split_arguments(parsed, None)[0]
    composed = [(list(job), compose([*defaults, *job])) for job in lists]
    unused_keys.check(keys_of(words), [config for _, config in composed])
    return composed


def completed(words: Sequence[str]) -> list[str]:
    """Adds what follows from other words: the groups of model.path and data.path, and the recipe of a task."""
    given = {override.key_or_group: override.value() for override in _parsed(words)}
    tunes = (given.get("task") or _task_of(given.get("recipe")) or "pretrain") != "pretrain"
    ending = Path(str(given.get("data.path"))).suffix[1:]
    rows = "datasets" if not ending else ending if ending in ("parquet", "csv") else "jsonl"
    of_rows = tunes or ("data.tokenizer" in given and ending in ROW_KINDS)
    reads = {"model": "hf", "data": rows if of_rows else "text"}
    paths = [group for group in reads if given.get(f"{group}.path") is not None and group not in given]
    recipe = ["recipe=finetune"] if tunes and "recipe" not in given else []
    if "data.sources" in given and "data" not in given:
        paths.append("data")
        reads["data"] = "mixture"
    return [*words, *(f"{group}={reads[group]}" for group in paths), *recipe]


def _task_of(recipe: Any) -> str | None:
    """Returns the task that a recipe chooses, or None."""
    file = folder() / "recipe" / f"{recipe}.yaml"
    found = re.search(r"override /task: (\w+)", file.read_text()) if file.is_file() else None
    return found and found[1]


def keys_of(words: Sequence[str]) -> list[str]:
    """Returns the keys and groups on the command line."""
    return [override.key_or_group for override in _parsed(words)]


def to_config(composed: DictConfig) -> Config:
    """Returns the dataclasses behind what Hydra composed. Raises ConfigError for keys at `???` or unknown ones."""
    if missing := sorted(_missing(OmegaConf.to_container(composed, resolve=False))):
        raise ConfigError(f"{missing[0]} has no value; give one with {missing[0]}=…")
    values = cast(dict[str, Any], OmegaConf.to_container(composed))
    try:  # a `+` on the command line adds keys that no dataclass has, which the merge refuses
        config = cast(Config, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), values)))
    except OmegaConfBaseException as error:
        raise explained(error) from error
    if config.run.resume == "auto" and _STARTED in config.run.dir:
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
    """Writes every key and its value as YAML, all or nothing. `--config-dir` and `--config-name` read it back."""
    replace(path, OmegaConf.to_yaml(OmegaConf.structured(config)))


def explained(error: Exception) -> ConfigError:
    """Returns one readable message for an error of Hydra or OmegaConf."""
    if isinstance(error, OverrideParseException):
        return ConfigError(
            f"cannot read '{error.override}': write KEY=VALUE, with quotes around text that has spaces or commas"
        )
    text = "\n".join(map(str, chain(error)))
    if found := re.search(r"Could not find '([\w./]+)/([^'/]+)'", text):
        group, option = found.groups()
        return choices(group, option, sorted(path.stem for path in (folder() / group).glob("*.yaml")))
    if found := re.search(r"Ambiguous value for argument '([^']+)'", text):
        return ConfigError(
            f"{found.group(1)} names several values; add -m to run one after the other, or write [a,b] for a list"
        )
    named = re.search(r"full_key: (\S+)", text) or re.search(r"override '?([\w.]+)", text)
    if not named:
        return ConfigError(text.strip().splitlines()[0])
    key, sections = named.group(1), {field.name for field in dataclasses.fields(Config)}
    if key in sections and not (folder() / key).is_dir():
        return ConfigError(f"{key} is a section; change one of its keys with {key}.KEY=VALUE")
    if key in {*keys(), *sections}:
        lines = [line for line in text.splitlines() if not re.match(r"\s*(full_key|object_type|Error merging)", line)]
        return ConfigError(f"{key} cannot take that value: {(lines or [text])[0].strip().rstrip('.')}; change {key}")
    return unknown_key(key)


def unknown_key(key: str) -> ConfigError:
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
    hint = f"did you mean '{meant}'?" if meant else "zero-train --help all lists all of them"
    return ConfigError(f"the key {key} does not exist; {hint}")


def unknown_command(word: str) -> ConfigError:
    """Returns the error for a command line whose first `word` is neither a command nor KEY=VALUE."""
    meant = get_close_matches(word, ["help", "version", "generate"], n=1)
    flag = "" if meant == ["generate"] else "--"
    hint = f"did you mean '{flag}{meant[0]}'?" if meant else "write KEY=VALUE, or see zero-train --help"
    return ConfigError(f"there is no command '{word}'; {hint}")


def keys() -> Iterator[str]:
    """Yields every key, as it is written on the command line, and every group."""
    for section in dataclasses.fields(Config):
        if section.name != "run":
            yield section.name
        for key in dataclasses.fields(cast(Any, section.default_factory)):
            yield f"{section.name}.{key.name}"
    yield from ("tier", "recipe")


def _parsed(words: Sequence[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides(list(words))
    except HydraException as error:
        raise explained(error) from error
