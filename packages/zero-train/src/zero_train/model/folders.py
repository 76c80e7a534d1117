"""Reads from the JSON files of a folder which kind of model it holds. No weight is read."""

from __future__ import annotations

import json
from pathlib import Path

from zero_train.errors import ConfigError

_MODEL, _ADAPTER = "config.json", "adapter_config.json"


def scores(folder: Path) -> bool:
    """Returns whether a folder holds a model, or adapters of one, that scores texts rather than writes them."""
    for name, key, marked in ((_MODEL, "architectures", "SequenceClassification"), (_ADAPTER, "task_type", "SEQ_CLS")):
        if (folder / name).is_file() and marked in str(json.loads((folder / name).read_text()).get(key)):
            return True
    return False


def local(given: str | None) -> Path:
    """Returns the folder that model.path names. Raises ConfigError, with the folder to name instead, if it has none."""
    path = Path(str(given))
    if given and (path / _MODEL).is_file():
        return path
    exported = path / "pretrained"  # of a run
    if (exported / _MODEL).is_file():
        raise ConfigError(f"model.path={path} is the folder of a run; name its exported model, {exported}")
    for adapter in (path, exported):
        if (adapter / _ADAPTER).is_file():
            merged = adapter.parent / "merged"
            base = json.loads((adapter / _ADAPTER).read_text()).get("base_model_name_or_path") or "BASE"
            way = f"write both as one model with `zero-hf merge {base} {adapter} {merged}`, and name {merged}"
            if (merged / _MODEL).is_file():
                way = f"name {merged}, which has both"
            raise ConfigError(f"model.path={path} has an adapter, and not the model that it was trained with; {way}")
    named = not path.is_absolute() and str(path).count("/") == 1  # as models on the hub are
    hub = f", or download it with `hf download {path} --local-dir FOLDER`" if named else ""
    raise ConfigError(f"model.path={path} has no config.json; name a folder saved by save_pretrained{hub}")
