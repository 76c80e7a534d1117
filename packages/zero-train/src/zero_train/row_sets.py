"""Makes `datasets.Dataset`s of a run's rows: checked, split into training and validation, several sets interleaved.

Every row is read and checked once, and kept by `datasets` in its cache, where the next run with the same bytes finds
it. A mistake anywhere means that nothing is trained. rows.py says what a row must hold; row_files.py reads files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_train import extras, row_files, rows
from zero_train.errors import ConfigError, choices
from zero_train.schema import ROW_KINDS, Config, DataConfig

if TYPE_CHECKING:
    from datasets import Dataset

_VERSION = 4  # of the conversion: raise it when the same file is converted differently
_SHOWN = 10  # mistakes
_KEYS = ("path", "kind", "weight", "validation_fraction")  # of an entry of data.sources


@dataclass(frozen=True)
class Rows:
    """The rows of a run, memory-mapped."""

    name: str  # for people: where they came from and how many there are
    kind: tuple[str, ...]  # of rows.KINDS
    of_messages: bool
    training: Dataset  # the columns of the kind, and those of ours
    validation: Dataset | None  # None: nothing is held out
    remarks: tuple[str, ...]  # columns that are not read, names that were read as others
    digests: tuple[str, ...]  # of the files

    def digest(self) -> str:
        """Returns a text that changes if a file of the rows does."""
        return " and ".join(self.digests)

    @property
    def shape(self) -> str:
        """Returns the kind, and what its columns hold where that may differ."""
        name = "-".join(self.kind)
        return (
            name
            if self.kind in (("messages",), ("text",))
            else f"{name} ({'messages' if self.of_messages else 'texts'})"
        )

    def mapped(self, function: Callable[[Dataset], Dataset], **more: Any) -> Rows:
        """Returns rows whose parts are what `function` makes of them."""
        held_out = None if self.validation is None else function(self.validation)
        return dataclasses.replace(self, training=function(self.training), validation=held_out, **more)


def named(config: DataConfig) -> bool:
    """Returns whether the configuration says what to learn from."""
    return config.path is not None or config.kind == "mixture"


def load(config: Config) -> Rows:
    """Reads all rows of a run. Several processes may call this at once.

    Raises:
        ConfigError: a package is missing, a path does not exist, a row has a mistake (the first ten are listed), no row
            is left to train on or to hold out, or the cache of `datasets` cannot be written.
    """
    data = config.data
    extras.installed("datasets", f"data={data.kind}")
    if data.kind == "mixture":
        return _mixed(config)
    if not data.path:
        raise ConfigError(f"data={data.kind} needs data.path; name what to train on with data.path=…")
    given = data.validation_path
    if given and Path(given).expanduser().resolve() == Path(data.path).expanduser().resolve():
        raise ConfigError(
            f"data.validation_path={given} is data.path too; name other rows, or leave it out for "
            "data.validation_fraction"
        )
    read = _one("data.path", data.path, data.kind, config, 0.0 if given else data.validation_fraction)
    if given is None:
        return read
    other = _one("data.validation_path", given, data.kind, config, 0.0)
    _alike(read, f"data.path={data.path}", other, f"data.validation_path={given}")
    remarks, digests = read.remarks + other.remarks, read.digests + other.digests
    read = dataclasses.replace(read, validation=other.training, remarks=remarks, digests=digests)
    return dataclasses.replace(read, name=_counted(data.path, read))


def _one(key: str, given: str, kind: str, config: Config, fraction: float) -> Rows:
    """Converts one set of rows, or finds it converted. Holds out `fraction` of it."""
    pattern = config.data.pattern if config.data.kind != "mixture" else f"*.{kind}" if kind != "datasets" else "*"
    files, task = row_files.found(key, given, pattern), config.task
    how: dict[str, Any] = {"key": key, "given": given, "kind": kind, "files": tuple(map(str, files)), "task": task.kind}
    how["everything"] = task.loss_on == "everything"
    digest = row_files.digest(key, given, files)
    _, first = next(checked(**how))

    from datasets import Dataset, disable_progress_bars  # takes a second: after the first row
    from datasets.exceptions import DatasetGenerationError

    disable_progress_bars()
    try:
        identity = {"how": how, "identity": (_VERSION, digest)}
        whole = Dataset.from_generator(_columns, features=_features(first), gen_kwargs=identity)
    except (DatasetGenerationError, OSError) as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(
            f"{key}={given}: datasets cannot keep the rows: {error.__cause__ or error}; they need about as much room "
            "as the files: make room, or name a folder with more by HF_HOME"
        ) from error
    training, validation = whole, None
    if fraction and task.kind != "grpo":  # which has no validation loss
        if len(whole) < 2:
            own = key.replace("path", "validation_fraction")
            raise ConfigError(f"{key}={given} has 1 row, which leaves none for validation; write more, or set {own}=0")
        parts = whole.train_test_split(min(max(1, round(len(whole) * fraction)), len(whole) - 1), seed=0)
        training, validation = parts["train"], parts["test"]
    unread = ", ".join(f"`{name}`" for name in first.unread[:_SHOWN]) + (", …" if len(first.unread) > _SHOWN else "")
    said = [first.remark, f"columns that are not read: {unread}" if unread else ""]
    remarks = tuple(f"{key}: {remark}" for remark in said if remark)
    read = Rows("", first.kind, first.of_messages, training, validation, remarks, (f"SHA-256 {digest}",))
    return dataclasses.replace(read, name=_counted(given, read))


def _counted(given: str, read: Rows) -> str:
    return f"{given}, {len(read.training):,} rows of {read.shape} to train on, {len(read.validation or ()):,} held out"


def _alike(one: Rows, its: str, other: Rows, others: str) -> None:
    if one.shape != other.shape:
        raise ConfigError(f"{others} has rows of {other.shape}, and {its} of {one.shape}; write both alike")


def checked(
    key: str, given: str, kind: str, files: Sequence[str], task: str, everything: bool
) -> Iterator[tuple[str, rows.Row]]:
    """Yields the rows for `task`, with their places. Needs no library for JSON and CSV.

    Raises:
        ConfigError: after the last row, if any had a mistake. The first ten are listed, with their places.
    """
    first: tuple[str, rows.Row] | None = None
    mistakes: list[str] = []
    count = 0
    for place, found in row_files.places(key, given, kind, list(map(Path, files))):
        try:
            if isinstance(found, rows.Mistake):
                raise found
            row = rows.read(found, task, everything)
            first = first or (place, row)
            if row.shape != first[1].shape:
                raise rows.Mistake(f"has {_told(row)}, and {first[0]} has {_told(first[1])}; write all rows alike")
        except rows.Mistake as mistake:
            count += 1
            mistakes += [f"\n  {place} {mistake}"] if count <= _SHOWN else []
        else:
            if not count:
                yield place, row
    if count:
        more = f"\n  and {count - _SHOWN:,} more" if count > _SHOWN else ""
        raise ConfigError(
            f"{key}={given} has {count:,} mistake{'s' * (count > 1)}, so nothing is trained:{''.join(mistakes)}{more}"
        )
    if first is None:
        raise ConfigError(f"{key}={given} has no row; write at least one, or change {key}")


def _told(row: rows.Row) -> str:
    names = " and ".join(f"`{name}`" for name in row.columns if not name.startswith("_") and row.columns[name])
    return f"{names} {'as lists of messages' if row.of_messages else 'as texts'}"


def _columns(how: Mapping[str, Any], identity: Any) -> Iterator[dict[str, Any]]:
    """Yields what `datasets` keeps, under a name that follows from all arguments."""
    for place, row in checked(**how):
        yield {**row.columns, rows.PLACE: place}


def _features(row: rows.Row) -> Any:
    """Returns the types of the columns. Messages and what is passed on are JSON, as their keys differ between rows."""
    from datasets import Features, Json, List, Value

    own = {"label": "bool", "margin": "float64", "tools": "string", rows.ANSWER: "int32", rows.SKIPS: "bool"}
    found: dict[str, Any] = {rows.PLACE: Value("string")}
    for name in row.columns:
        if name in row.kind and name not in own:
            found[name] = List(Json()) if row.of_messages else Value("string")
        else:
            found[name] = Value(own[name]) if name in own and row.kind != ("prompt",) else Json()
    return Features(found)


# -- data=mixture ------------------------------------------------------------------------------------------------------


def _mixed(config: Config) -> Rows:
    """Returns all sets of rows as one, interleaved by their weights."""
    entries = sources(config.data)
    read = [_one(f"{key}.path", path, kind, config, fraction) for key, path, kind, fraction, _ in entries]
    for other, entry in zip(read, entries, strict=True):
        _alike(read[0], f"{entries[0][0]}: {entries[0][1]}", other, f"{entry[0]}: {entry[1]}")

    from datasets import concatenate_datasets, interleave_datasets

    weights = [weight for *_, weight in entries]
    parts, held_out = [one.training for one in read], [one.validation for one in read if one.validation is not None]
    if weights[0] is None:
        training = concatenate_datasets(parts)
    else:
        shares = [weight / sum(weights) for weight in weights]
        how = {"seed": config.run.seed, "stopping_strategy": "all_exhausted"}
        training = interleave_datasets(parts, probabilities=shares, **how)
    return dataclasses.replace(
        read[0],
        name="; ".join(one.name for one in read),
        training=training,
        validation=concatenate_datasets(held_out) if held_out else None,
        remarks=tuple(dict.fromkeys(remark for one in read for remark in one.remarks)),
        digests=tuple(digest for one in read for digest in one.digests),
    )


def sources(data: DataConfig) -> list[tuple[str, str, str, float, Any]]:
    """Returns key, path, kind, share that is held out, and weight of each set of rows of data=mixture.

    Raises:
        ConfigError: an entry of data.sources is not one.
    """
    if not isinstance(data.sources, list) or not data.sources:
        raise ConfigError(
            f"data.sources={data.sources} names nothing to mix; list what to learn from, as in "
            "data.sources=[{path: a.jsonl, weight: 2}, {path: b.jsonl, weight: 1}]"
        )
    found = [_source(f"data.sources[{at}]", entry, data) for at, entry in enumerate(data.sources)]
    paths = [Path(path).expanduser().resolve() for _, path, *_ in found]
    if twice := next((found[at][1] for at, path in enumerate(paths) if path in paths[:at]), None):
        raise ConfigError(f"data.sources names {twice} twice; name it once, with the weight of both")
    without = [key for key, *_, weight in found if weight is None]
    if without and len(without) < len(found):
        raise ConfigError(
            f"{without[0]} has no weight, and others have; give each of data.sources a weight, or none of them, which "
            "takes every row equally often"
        )
    return found


def _source(key: str, entry: Any, data: DataConfig) -> tuple[str, str, str, float, Any]:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{key}={entry} is not an entry with a path; write {{path: {entry}}}")
    for name in entry:
        if name not in _KEYS:
            raise choices(f"a key of {key}", name, _KEYS)
    path = entry.get("path")
    if not isinstance(path, str) or not path.strip():
        raise ConfigError(f"{key} has no path; write {{path: FILE}}")
    kind = entry.get("kind") or ("jsonl" if Path(path).suffix else "datasets")
    if kind not in ROW_KINDS:
        raise choices(f"{key}.kind", kind, ROW_KINDS)
    weight, fraction = entry.get("weight"), entry.get("validation_fraction", data.validation_fraction)
    if weight is not None and not (_is_number(weight) and 0 < weight <= 1e9):
        raise ConfigError(f"{key}.weight={weight} must be a number above 0 and at most 1e9; leave an entry out for 0")
    if not (_is_number(fraction) and 0 <= fraction < 1):
        raise ConfigError(f"{key}.validation_fraction={fraction} must be a number of at least 0 and below 1")
    return key, path, kind, float(fraction), weight


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
