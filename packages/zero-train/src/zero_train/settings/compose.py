"""Turns conf/ and a command line into a `Config`, and Hydra's exceptions into one readable line.

Owns where conf/ is found. Values are checked in checks.py.
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
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import zero_train
from zero_train.declare import ROW_KINDS, rate, tenth
from zero_train.errors import ConfigError
from zero_train.schema import Config

NAME = "train"  # of the root file, conf/train.yaml
_GONE = {  # keys of earlier versions, and their replacements
    "deepspeed": "`zero-hf translate FILE` says what each of its keys means here: set these",
    "model.checkpointing": "set offload.activations=recompute",
    "optim.schedule": "set optim.warmup_steps and optim.final_fraction, or call zero_deepspeed.initialize in a loop",
    "run.durable_every": "leave it out, as run.durable keeps each step",
    "run.min_improvement": "leave it out, as run.patience counts validation losses that did not fall",
    "zero.update_in_backward": "leave it out, or call zero_core.shard(update_in_backward=True) in a loop of your own",
}
_HEAD = dedent("""\
    # GROUP=OPTION on the command line wins over the values below, and KEY=VALUE over both.
    hydra:
      searchpath: [pkg://zero_train.conf]
    defaults:
    - settings
    - schema
    - _self_""")
_SCHEMA = OmegaConf.structured(Config)
OmegaConf.set_struct(_SCHEMA.trl, False)  # its keys are TRL's
OmegaConf.set_struct(_SCHEMA.hardware, False)  # zero_offload.Hardware's
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
    return Path(zero_train.__file__).resolve().parent / "conf"


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
    """Returns the keys and groups on the command line. Raises ConfigError for a word that is no override."""
    try:
        return [override.key_or_group for override in OverridesParser.create().parse_overrides(list(words))]
    except HydraException as error:
        raise explained(error) from error


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
    """Yields the keys whose own value is `???`, without the keys that interpolate one of them."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _missing(item, f"{name}.{key}" if name else str(key))
    elif value == "???" or (isinstance(value, list) and "???" in value):
        yield name


def as_yaml(config: Config) -> str:
    """Returns every key and its value as YAML, for a file that `--config-dir` and `--config-name` read back.

    Its list of defaults lets the command line choose groups as well.
    """
    groups = "".join(f"\n- {path.name}: null" for path in sorted(folder().glob("[!_]*")) if path.is_dir())
    return f"{_HEAD}{groups}\n{OmegaConf.to_yaml(OmegaConf.structured(config))}"


def explained(error: Exception) -> ConfigError:
    """Returns an error of Hydra's or OmegaConf's as one line. For an unknown key, it suggests a similar one."""
    if isinstance(error, OverrideParseException):
        key, equals, value = str(error.override).partition("=")
        if not equals:
            return ConfigError(f"cannot read '{key}': write KEY=VALUE, or see zero-train --help")
        quoted = value.replace("\\", "\\\\").replace("'", "\\'")
        return ConfigError(f"cannot read '{error.override}': such a text needs quotes; write \"{key}='{quoted}'\"")
    cause = error.__cause__ or error.__context__  # the causes of this one repeat it
    texts = [str(each) for each in (error, cause) if each is not None]
    if unknown := re.search(r"Key '.*' (?:is )?not in .*\n *full_key: (\S+)", "\n".join(texts)):
        file = re.match(r"In '\S+': ", texts[0])
        return ConfigError(f"{file[0] if file else ''}the key {unknown[1]} does not exist; {_hint(unknown[1])}")
    said = (re.split(r"\n *(?:full_key|Config search path)", text)[0] for text in texts)
    way_out = "; choose an option that zero-train --help lists" if texts[0].startswith("Config group override") else ""
    return ConfigError(": ".join(dict.fromkeys(" ".join(text.split()) for text in said)) + way_out)


def _hint(key: str) -> str:
    """Returns a hint on a key that does not exist: its replacement, or a similar key."""
    known = list(keys())
    if key in _GONE:
        return _GONE[key]
    if key in known:  # a file of a group
        return "write '# @package _global_' in the first line of the file"
    if any(key.startswith(f"{name}.") for name in known if "." in name):
        return f"add it with a plus before the key: +{key}=…"
    near = get_close_matches(key, [name for name in known if "." in name or "." not in key], n=1, cutoff=0.7)
    return f"did you mean '{near[0]}'?" if near else "zero-train --cfg job lists all keys"


def keys() -> Iterator[str]:
    """Yields every key, as it is written on the command line, and every group."""
    for section in dataclasses.fields(Config):
        if section.name != "run":
            yield section.name
        if section.name not in ("trl", "hardware"):
            yield from (f"{section.name}.{key.name}" for key in dataclasses.fields(cast(Any, section.default_factory)))
    yield from ("tier", "recipe")
