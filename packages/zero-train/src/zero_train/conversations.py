"""Converts the rows of fine-tuning into Arrow files on disk, split into training and validation, for TRL's trainers.

One pass checks every row and writes it, so that memory does not grow with the file. A mistake anywhere means that
nothing is trained. The converted rows of the same bytes are used again, see cached.py. rows.py says what a row must
hold, and row_files.py reads the files. Needs the extra `finetune`, which is imported by `load` only.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_train import cached, extras, row_files, rows
from zero_train.errors import ConfigError
from zero_train.schema import DataConfig

if TYPE_CHECKING:
    from datasets import Dataset

_VERSION = 3  # of the converted rows: raise it when the same file is converted differently
_SHOWN = 10  # mistakes
_BATCH_ROWS = 1000
_BATCH_BYTES = 8 << 20
_KEYS = ("data.path", "data.validation_path")
_ARROW = "rows.arrow"
_HASH = "hash"  # a column of it, besides those of rows.COLUMNS: which side a row is on


@dataclass(frozen=True)
class Part:
    """The rows of a run that come from one place."""

    config: DataConfig  # that names the place
    training: Dataset
    weight: float | None  # None: each row is taken as often as those of other parts


@dataclass(frozen=True)
class Rows:
    """The rows of a run, memory-mapped."""

    name: str  # for people: where they came from and how many there are
    kind: str  # a key of rows.COLUMNS
    training: Dataset  # the columns of rows.COLUMNS[kind], and `tools` where they hold lists of messages
    validation: Dataset | None  # None: nothing is held out
    remarks: tuple[str, ...]  # columns that were dropped, synonyms that were read
    digests: tuple[str, ...]
    shape: str  # the kind, and what its columns hold where that may differ
    parts: tuple[Part, ...] = ()

    def digest(self) -> str:
        """Returns a text that changes if the contents, order or split of the rows do. Takes no time."""
        return " and ".join(self.digests)


def load(
    config: DataConfig,
    task: str,
    cache: Path,
    say: Callable[[str], None] = lambda _: None,
    key: str = "data.path",
) -> Rows:
    """Reads the rows that `config` names, for `task`, a key of rows.KINDS.

    The first call converts them into `cache`: about as many bytes as the file has. Later calls with files of the same
    bytes read the files once, for their digest, and convert nothing. Several processes may call this at once.

    data=datasets reads a folder that `Dataset.save_to_disk` wrote. Any other name is handed to
    `datasets.load_dataset`, which fetches it from the Hugging Face hub. This is untried.

    Args:
        config: `kind` is jsonl, parquet, csv or datasets. A row is held out if the hash of its content is below
            `validation_fraction`, so rows that are appended move no other row. If that holds out every row or none,
            the row with the nearest hash changes sides.
        task: decides which columns are read, see rows.py.
        cache: a folder, which is made. It may be kept for other runs.
        say: is told when a conversion begins, which takes about a minute a GB.
        key: what names the rows to train on, for errors.

    Raises:
        ConfigError: a package is missing, a path does not exist, a row has a mistake (the first ten are listed), no row
            is left to train on or to hold out, or the cache cannot be written. No incomplete conversion is left.
    """
    extras.installed("datasets", f"data={config.kind}")
    if not config.path:
        raise ConfigError(f"data={config.kind} needs data.path; name what to train on with data.path=…")
    given = config.validation_path
    if given and Path(given).expanduser().resolve() == Path(config.path).expanduser().resolve():
        raise ConfigError(
            f"data.validation_path={given} is data.path too; name other rows, or leave it out for "
            "data.validation_fraction"
        )
    fraction = 0.0 if given else config.validation_fraction
    first = _converted(key, config.path, config, task, fraction, cache, say)
    training, validation = first.split()
    found = [first]
    if given:
        found.append(second := _converted(_KEYS[1], given, config, task, 0.0, cache, say))
        if (first.kind, first.of_messages) != (second.kind, second.of_messages):
            raise ConfigError(
                f"data.validation_path={given} has rows of {second.shape}, and data.path={config.path} of "
                f"{first.shape}; write both alike"
            )
        validation = second.split()[0]
    counted = f"{len(training):,} rows of {first.shape} to train on, {len(validation or ()):,} held out"
    remarks = tuple(
        f"{name}: {remark}" for name, part in zip((key, _KEYS[1]), found, strict=False) for remark in part.remarks
    )
    digests = tuple(digest for part in found for digest in part.digests)
    return Rows(f"{config.path}, {counted}", first.kind, training, validation, remarks, digests, first.shape)


@dataclass(frozen=True)
class _Converted:
    """A complete conversion: its folder, the share that is held out, and what its rows.json holds."""

    folder: Path
    fraction: float
    kind: str
    of_messages: bool
    remarks: list[str]
    digests: list[str]

    @property
    def shape(self) -> str:
        """Returns the kind, and what its columns hold where that may differ."""
        held = "messages" if self.of_messages else "texts"
        return self.kind if self.kind in ("messages", "text") else f"{self.kind} ({held})"

    def split(self) -> tuple[Dataset, Dataset | None]:
        """Returns the training rows and the validation rows, of which only the hashes are read."""
        from datasets import Dataset

        whole = Dataset.from_file(str(self.folder / _ARROW))
        hashes, whole = whole.data.column(_HASH).to_numpy(), whole.remove_columns(_HASH)
        if not self.fraction:
            return whole, None
        held_out = hashes < self.fraction
        if held_out.all() or not held_out.any():  # the row that is nearest changes sides
            nearest = hashes.argmax() if held_out.all() else hashes.argmin()
            held_out[nearest] = not held_out[nearest]
        return whole.select((~held_out).nonzero()[0]), whole.select(held_out.nonzero()[0])


def _converted(
    key: str, given: str, config: DataConfig, task: str, fraction: float, cache: Path, say: Callable[[str], None]
) -> _Converted:
    """Returns the conversion of the rows that `given` names, from `cache` if it is there."""
    source = row_files.source(key, given, config.kind, config.pattern)

    def convert(partial: Path) -> dict[str, Any]:
        say(f"{key}={given}: checking {source.size / 1e6:,.1f} MB and converting them into {cache}")
        return _convert(source, task, fraction, partial)

    named = ("rows", f"{key}={given}", "the converted rows", "about as much room as the file")
    folder, found = cached.kept(cache, *named, [_VERSION, source.digest, config.kind, task, fraction], convert)
    return _Converted(folder, fraction, **found)


def place_of(configs: Iterable[DataConfig], wanted: dict[str, Any], task: str) -> str:
    """Returns the file and the place in it of a row with these columns, for which it reads the files once more."""
    configs = list(configs)
    for config in configs:
        for key, given in zip(_KEYS, (config.path, config.validation_path), strict=True):
            for place, found in row_files.source(key, given, config.kind, config.pattern).places if given else ():
                columns = rows.read(found, task).columns
                if all(_plain(columns[name]) == wanted[name] for name in columns if name != "tools"):
                    return place
    return " or ".join(str(config.path) for config in configs)


def _plain(column: str | list[str] | None) -> Any:
    return [json.loads(text) for text in column] if isinstance(column, list) else column


def _convert(source: row_files.Source, task: str, fraction: float, folder: Path) -> dict[str, Any]:
    """Checks every row and writes it to `folder`, with its hash. Returns what rows.json holds."""
    import pyarrow

    counts, digests = [0, 0], [hashlib.sha256(), hashlib.sha256()]  # of what is learned from, and of what is held out
    remarks: dict[str, None] = {}
    dropped: dict[str, None] = {}
    row: rows.Row | None = None
    with (folder / _ARROW).open("wb") as file:
        for batch in _batches(check(source.key, source.given, source.places, task)):
            hashes = [int.from_bytes(hashlib.sha256(row.content).digest()[:8], "big") / 2**64 for row in batch]
            for row, hashed in zip(batch, hashes, strict=True):
                held_out = hashed < fraction
                counts[held_out] += 1
                digests[held_out].update(len(row.content).to_bytes(8, "big") + row.content)
                remarks.update(dict.fromkeys(row.remarks))
                if row.dropped and len(dropped) <= _SHOWN:
                    dropped.update(dict.fromkeys(row.dropped))
            if sum(counts) == len(batch):
                schema = _schema(batch[0])
                writer = pyarrow.ipc.new_stream(file, schema)
            writer.write_batch(_arrow(batch, hashes, schema))
        writer.close()
        file.flush()
        os.fsync(file.fileno())
    assert row is not None
    source.check_unchanged()
    if fraction and sum(counts) < 2:
        entry = source.key.removesuffix(".path")
        own = "data.validation_fraction=0" if entry == "data" else f"validation_fraction: 0 in {entry}"
        raise ConfigError(
            f"{source.key}={source.given} has 1 row, which leaves none for validation; write more, or set {own}"
        )
    if names := [f"`{name}`" for name in dropped]:
        shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
        remarks[f"columns that are not read: {shown}"] = None
    told = [f"{count} rows with SHA-256 {part.hexdigest()}" for count, part in zip(counts, digests, strict=True)]
    return {"kind": row.kind, "of_messages": row.of_messages, "remarks": list(remarks), "digests": told}


def _batches(checked: Iterable[rows.Row]) -> Iterator[list[rows.Row]]:
    batch: list[rows.Row] = []
    held = 0
    for row in checked:
        batch.append(row)
        held += len(row.content)
        if len(batch) >= _BATCH_ROWS or held >= _BATCH_BYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _schema(row: rows.Row) -> Any:
    from datasets import Features, Json, List, Value

    of_text = [name for name in row.columns if name == "tools" or not row.of_messages]
    columns = {name: Value("string") if name in of_text else List(Json()) for name in row.columns}
    return Features(columns | {_HASH: Value("float64")}).arrow_schema


def _arrow(batch: list[rows.Row], hashes: list[float], schema: Any) -> Any:
    import pyarrow

    columns = []
    for field in schema:
        values = hashes if field.name == _HASH else [row.columns[field.name] for row in batch]
        lists = field.type not in (pyarrow.string(), pyarrow.float64())
        plain = pyarrow.list_(pyarrow.string()) if lists else field.type
        columns.append(pyarrow.array(values, type=plain).cast(field.type))
    return pyarrow.record_batch(columns, schema=schema)


def check(key: str, given: str, places: Iterable[tuple[str, Any]], task: str) -> Iterator[rows.Row]:
    """Yields the rows for `task`. Needs no library beyond Python's.

    Raises:
        ConfigError: after the last row, if any had a mistake. The first ten are listed, with their places.
    """
    first: tuple[str, rows.Row] | None = None
    mistakes: list[str] = []
    count = 0
    for place, found in places:
        try:
            if isinstance(found, rows.Mistake):
                raise found
            row = rows.read(found, task)
            if first is None:
                first = place, row
            elif (row.kind, row.of_messages) != (first[1].kind, first[1].of_messages):
                raise rows.Mistake(f"has {_kind(row)}, and {first[0]} has {_kind(first[1])}; write all rows alike")
        except rows.Mistake as mistake:
            count += 1
            if count <= _SHOWN:
                mistakes.append(f"\n  {place} {mistake}")
        else:
            if not count:
                yield row
    if count:
        more = f"\n  and {count - _SHOWN:,} more" if count > _SHOWN else ""
        raise ConfigError(
            f"{key}={given} has {count:,} mistake{'s' * (count > 1)}, so nothing is trained:{''.join(mistakes)}{more}"
        )
    if first is None:
        raise ConfigError(f"{key}={given} has no row; write at least one, or change {key}")


def _kind(row: rows.Row) -> str:
    names = " and ".join(f"`{name}`" for name in rows.COLUMNS[row.kind])
    return f"{names} {'as lists of messages' if row.of_messages else 'as texts'}"
