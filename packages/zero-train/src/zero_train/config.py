"""From conf/ and a command line to a `Config`, and from Hydra's exceptions to one readable line.

Owns where the tree is found and how a mistyped key is explained. What values mean is checked in checks.py.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zero_train.errors import ConfigError, choices, suggestion
from zero_train.schema import Config

NAME = "train"  # of the root file, conf/train.yaml
ConfigStore.instance().store(name="schema", node=Config, provider="zero_train")


def folder() -> Path:
    """The Hydra tree: inside an installed wheel, else at the root of the repository that this file is in.

    Raises:
        FileNotFoundError: neither is there: a broken installation.
    """
    here = Path(__file__).resolve().parent
    for candidate in (here / "conf", *(parent / "conf" for parent in here.parents[:5])):
        if (candidate / f"{NAME}.yaml").is_file():
            return candidate
    raise FileNotFoundError(f"no conf/{NAME}.yaml in {here} nor at the root of its repository; reinstall zero-train")


def compose(overrides: Sequence[str] = ()) -> Config:
    """The configuration of one run. `overrides` as on the command line: `["run.steps=5", "offload=host"]`.

    Raises:
        ConfigError: a key, an option or a type that does not exist.
    """
    return to_config(_composed(overrides))


def check(overrides: Sequence[str], sweep: bool) -> None:
    """Composes every job of the command line, so that a mistyped key of the last job stops the first.

    Raises:
        ConfigError: as in `compose`.
    """
    jobs: Sequence[Sequence[str]] = [overrides]
    if sweep:
        try:
            parsed = OverridesParser.create().parse_overrides(list(overrides))
            jobs = BasicSweeper.split_arguments(
                [o for o in parsed if not o.get_key_element().startswith("hydra")], None
            )[0]
        except HydraException as error:
            raise explained(error) from error
    for job in jobs:
        compose(job)


def to_config(composed: DictConfig) -> Config:
    """The dataclasses behind what Hydra composed. Raises ConfigError for keys left at `???` or in no schema."""
    if missing := sorted(OmegaConf.missing_keys(composed)):
        raise ConfigError(f"{missing[0]} has no value; give one with {missing[0]}=…")
    known = set(keys())
    for section in map(str, composed):
        values = composed[section]
        if not isinstance(values, DictConfig):
            raise unknown_key(section)
        for key in map(str, values):
            if f"{section}.{key}" not in known:  # a `+` on the command line adds keys that no dataclass has
                raise unknown_key(f"{section}.{key}")
    return cast(Config, OmegaConf.to_object(composed))


def save(config: Config, path: Path) -> None:
    """Writes every key and its value as YAML: `zero-train --config-dir … --config-name …` takes it back."""
    OmegaConf.save(OmegaConf.structured(config), path)


def explained(error: Exception) -> ConfigError:
    """One readable message for what Hydra or OmegaConf raised."""
    if isinstance(error, OverrideParseException):
        return ConfigError(
            f"cannot read '{error.override}': write KEY=VALUE, with quotes around text that has spaces or commas"
        )
    text = _with_causes(error)
    if found := re.search(r"Could not find '([\w./]+)/([^'/]+)'", text):
        group, option = found.groups()
        return choices(group, option, sorted(path.stem for path in (folder() / group).glob("*.yaml")))
    if found := re.search(r"Ambiguous value for argument '([^']+)'", text):
        return ConfigError(f"{found.group(1)} names several values; add -m to run one after the other")
    named = re.search(r"full_key: (\S+)", text) or re.search(r"override '?([\w.]+)", text)
    if not named:
        return ConfigError(text.strip().splitlines()[0])
    key = named.group(1)
    if key in set(keys()) | {field.name for field in dataclasses.fields(Config)}:
        lines = [
            line.strip() for line in text.splitlines() if not re.match(r"\s*(full_key|object_type|Error merging)", line)
        ]
        return ConfigError(f"{key} cannot take that value: {lines[0].rstrip('.') if lines else text}; change {key}")
    return unknown_key(key)


def unknown_key(key: str) -> ConfigError:
    """The error for a `key` that is in no dataclass, naming the nearest that is."""
    known = list(keys())
    last = key.rsplit(".", 1)[-1]
    hint = next((f"did you mean '{name}'?" for name in known if name.rsplit(".", 1)[-1] == last), "")
    hint = hint or suggestion(key, known)
    return ConfigError(f"the key {key} does not exist; {hint or 'zero-train --help lists all of them'}")


def keys() -> Iterator[str]:
    """Every key, as it is written on the command line, and every group."""
    for section in dataclasses.fields(Config):
        if section.name != "run":
            yield section.name
        for key in dataclasses.fields(cast(Any, section.default_factory)):
            yield f"{section.name}.{key.name}"
    yield "recipe"


def _composed(overrides: Sequence[str]) -> DictConfig:
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(folder()), version_base="1.3"):
            return hydra_compose(NAME, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise explained(error) from error


def _with_causes(error: BaseException) -> str:
    texts = []
    cause: BaseException | None = error
    while cause is not None:
        texts.append(str(cause))
        cause = cause.__cause__
    return "\n".join(texts)
