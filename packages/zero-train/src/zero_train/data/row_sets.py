"""Makes `datasets.Dataset`s of a run's rows: checked, split into training and validation, several sets interleaved.

Every row is read and checked once, and kept by `datasets` in its cache, where the next run with the same bytes finds
it. A mistake in any row refuses the run. Not here: the check of a row (in rows.py), reading files (in row_files.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zero_train.data import row_files, rows
from zero_train.declare import ROW_KINDS
from zero_train.errors import ConfigError, choices
from zero_train.schema import Config, DataConfig
from zero_train.settings import checks, extras

if TYPE_CHECKING:
    from datasets import Dataset

_VERSION = 5  # of the conversion: raise it when the same file is converted differently
_SHOWN = 10  # mistakes


_TYPES = {str: "string", bool: "bool", int: "int64", float: "float64", type(None): "string"}  # of columns


class Source(NamedTuple):
    """A set of rows as the configuration names it."""

    key: str  # of its path
    path: str
    kind: str  # of data
    weight: float | None = None  # in a mixture; None: all rows are taken equally often
    validation_fraction: float = 0.0


class Part(NamedTuple):
    """A set of rows, converted."""

    first: rows.Row
    training: Dataset
    validation: Dataset | None
    digest: str


@dataclass(frozen=True)
class Rows:
    """The rows of a run, memory-mapped."""

    name: str  # for people: where they came from and how many there are
    kind: tuple[str, ...]  # of a rows.Row
    of_messages: bool  # likewise
    training: Dataset  # the columns of the kind, and those of ours
    validation: Dataset | None  # None: nothing is held out
    remarks: tuple[str, ...]  # columns that are not read, names that were read as others
    digest: str  # changes if a file of the rows does

    def mapped(self, function: Callable[[Dataset], Dataset], kind: tuple[str, ...]) -> Rows:
        """Returns the rows with `function` applied to the training and validation parts."""
        held_out = None if self.validation is None else function(self.validation)
        return dataclasses.replace(self, training=function(self.training), validation=held_out, kind=kind)


def learned(config: Config) -> Rows | None:
    """Returns the rows of a fine-tuning run; None for a plan without any.

    Raises:
        ConfigError: as `load` does, or a package is missing, or the run needs validation losses and no row is held out.
    """
    run = config.run
    planned = run.dry and config.data.path is None and config.data.kind != "mixture"
    checks.tuning_packages(config, planned)
    if planned:
        return None
    read = load(config)
    if read.validation is None and (run.keep_best or run.patience):
        raise ConfigError(
            f"run.{'keep_best' if run.keep_best else 'patience'} goes by the loss on rows that are held out, and none "
            "are; set data.validation_fraction=0.05 or data.validation_path"
        )
    return read


def load(config: Config) -> Rows:
    """Reads all rows of a run. Several processes may call this at once.

    Raises:
        ConfigError: a package is missing, a path does not exist, a row has a mistake (the first ten are listed), no row
            is left to train on or to hold out, or the cache of `datasets` cannot be written.
    """
    data = config.data
    extras.installed("datasets", f"data={data.kind}")
    sources = sources_of(data)
    read = [_one(source, config) for source in sources]
    first, names = read[0].first, []
    remarks: dict[str, None] = {}
    for source, part in zip(sources, read, strict=True):
        if part.first.shape != first.shape:
            raise ConfigError(
                f"{source.key}={source.path} has rows of {part.first.shape}, and {sources[0].key}={sources[0].path} of "
                f"{first.shape}; write all rows in one shape"
            )
        learned, held_out = len(part.training), len(part.validation or ())
        names.append(f"{source.path}, {learned:,} rows of {first.shape} to train on, {held_out:,} held out")
        remarks |= dict.fromkeys(f"{source.key}: {remark}" for remark in part.first.remarks)

    from datasets import concatenate_datasets, interleave_datasets

    parts = [part.training for part in read if len(part.training)]
    validations = [part.validation for part in read if part.validation is not None]
    weights = [source.weight for source in sources if source.weight is not None]
    if weights:
        shares = [weight / sum(weights) for weight in weights]
        how = {"seed": config.run.seed, "stopping_strategy": "all_exhausted"}
        training = interleave_datasets(parts, probabilities=shares, **how)
    else:
        training = concatenate_datasets(parts)
    return Rows(
        "; ".join(names),
        first.kind,
        first.of_messages,
        training,
        concatenate_datasets(validations) if validations else None,
        tuple(remarks),
        " and ".join(part.digest for part in read),
    )


def _one(source: Source, config: Config) -> Part:
    """Converts one set of rows, or finds it converted. Holds out a part of it, or all."""
    data, task = config.data, config.task
    pattern = "*" if source.kind == "datasets" else f"*.{source.kind}"
    files = row_files.found(source.key, source.path, pattern if data.kind == "mixture" else data.pattern)
    how: dict[str, Any] = {"key": source.key, "given": source.path, "kind": source.kind, "task": task.kind}
    how |= {"files": tuple(map(str, files)), "everything": task.loss_on == "everything"}
    digest = row_files.digest(files)
    _, first = next(checked(**how))

    from datasets import Dataset, disable_progress_bars  # takes a second: after the first row
    from datasets.exceptions import DatasetGenerationError

    disable_progress_bars()
    try:
        identity = {"how": how, "identity": (_VERSION, digest)}
        whole = Dataset.from_generator(_columns, features=_features(first, task.kind), gen_kwargs=identity)
    except (DatasetGenerationError, OSError) as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(
            f"{source.key}={source.path}: datasets cannot keep the rows: {error.__cause__ or error}; they need about "
            "as much room as the files: make room, or name a folder with more by HF_HOME"
        ) from error
    fraction, count, digest = source.validation_fraction, len(whole), f"SHA-256 {digest}"
    if not fraction or task.kind == "grpo":  # grpo has no validation loss
        return Part(first, whole, None, digest)
    if fraction == 1:
        return Part(first, whole.select(range(0)), whole, digest)
    if count < 2:
        share = source.key.replace("path", "validation_fraction")
        raise ConfigError(f"{source.key}={source.path} has 1 row: none is left to validate; add rows, or set {share}=0")
    parts = whole.train_test_split(min(max(1, round(count * fraction)), count - 1), seed=0)
    return Part(first, parts["train"], parts["test"], digest)


def checked(
    key: str, given: str, kind: str, files: Sequence[str], task: str, everything: bool
) -> Iterator[tuple[str, rows.Row]]:
    """Yields the rows for `task`, with their places. Needs no library for JSON and CSV.

    Raises:
        ConfigError: after the last row, if any had a mistake. The first ten are listed, with their places.
    """
    first, shape, count, mistakes = "", "", 0, ""
    for place, found in row_files.places(kind, list(map(Path, files))):
        try:
            if isinstance(found, rows.Mistake):
                raise found
            row = rows.read(found, task, everything)
            first, shape = first or place, shape or row.shape
            if row.shape != shape:
                raise rows.Mistake(f"has {row.shape}, but {first} has {shape}; write all rows in one shape")
        except rows.Mistake as mistake:
            count += 1
            mistakes += f"\n  {place} {mistake}" if count <= _SHOWN else ""
        else:
            if not count:
                yield place, row
    if count:
        more = f"\n  and {count - _SHOWN:,} more" if count > _SHOWN else ""
        raise ConfigError(
            f"{key}={given} has {count:,} mistake{'s' * (count > 1)}; nothing is trained:{mistakes}{more}"
        )
    if not first:
        raise ConfigError(f"{key}={given} has no row; write at least one, or change {key}")


def _features(row: rows.Row, task: str) -> Any:
    """Returns the types of the columns. Messages are JSON, so that none gains a key that others have."""
    from datasets import Features, Json, List, Value

    if task == "grpo":  # its other columns may have any type
        return None
    found: dict[str, Any] = {rows.PLACE: Value("string")}
    for name, value in row.columns.items():
        json = List(Json()) if isinstance(value, list) else Json()
        found[name] = Value(_TYPES[type(value)]) if type(value) in _TYPES else json
    if "margin" in found:
        found["margin"] = Value("float64")
    return Features(found)


def _columns(how: Mapping[str, Any], identity: Any) -> Iterator[dict[str, Any]]:
    """Yields the columns of each row, which `datasets` caches under a digest of all arguments."""
    from datasets import Json

    json = Json()
    for place, row in checked(**how):
        lists = [row.columns[name] for name in row.kind if rows.ANSWER in row.columns and name not in rows.TYPES]
        for message in (message for messages in lists for message in messages):
            if json.decode_example(json.encode_example(message)) != message:
                raise ConfigError(f"{place} has a number that `datasets` rounds, in {message}; quote that number")
        yield {**row.columns, rows.PLACE: place}


def sources_of(data: DataConfig) -> list[Source]:
    """Returns the sets of rows that are named; data.validation_path is the last.

    Raises:
        ConfigError: there is none, one is named twice, or an entry of data.sources is none.
    """
    fraction = 0.0 if data.validation_path else data.validation_fraction
    if data.kind != "mixture":
        if not data.path:
            raise ConfigError(f"data={data.kind} needs data.path; name what to train on with data.path=…")
        found = [Source("data.path", data.path, data.kind, None, fraction)]
    elif isinstance(data.sources, list) and data.sources:
        found = [_source(f"data.sources[{at}]", entry, data) for at, entry in enumerate(data.sources)]
    else:
        raise ConfigError(
            f"data.sources={data.sources} names nothing to mix; list what to learn from, as in "
            "data.sources=[{path: a.jsonl, weight: 2}, {path: b.jsonl, weight: 1}]"
        )
    without = [source.key for source in found if source.weight is None]
    if without and len(without) < len(found):
        raise ConfigError(
            f"{without[0].removesuffix('.path')} has no weight, and others have; give each of data.sources a weight, "
            "or none of them, which takes every row equally often"
        )
    if data.validation_path:
        found.append(Source("data.validation_path", data.validation_path, data.kind, None, 1.0))
    paths = [Path(source.path).expanduser().resolve() for source in found]
    if twice := next((found[at] for at, path in enumerate(paths) if path in paths[:at]), None):
        raise ConfigError(f"{twice.key}={twice.path} is named twice; name other rows, or once, with the weight of both")
    return found


def _source(key: str, entry: Any, data: DataConfig) -> Source:
    if not isinstance(entry, Mapping) or not isinstance(path := entry.get("path"), str) or not path.strip():
        raise ConfigError(f"{key}={entry} has no path; write {{path: FILE}}")
    fields = {"kind": "jsonl" if Path(path).suffix else "datasets", "validation_fraction": data.validation_fraction}
    for name in entry:
        if name not in Source._fields[1:]:
            raise choices(f"a key of {key}", name, Source._fields[1:])
    source = Source(f"{key}.path", **{**fields, **entry})
    if source.kind not in ROW_KINDS:
        raise choices(f"{key}.kind", source.kind, ROW_KINDS)
    weight, fraction = source.weight, source.validation_fraction
    if weight is not None and not (isinstance(weight, (int, float)) and 0 < weight <= 1e9):
        raise ConfigError(f"{key}.weight={weight} must be a number above 0 and at most 1e9; leave an entry out for 0")
    if not (isinstance(fraction, (int, float)) and 0 <= fraction < 1):
        raise ConfigError(f"{key}.validation_fraction={fraction} must be a number of at least 0 and below 1")
    return source
