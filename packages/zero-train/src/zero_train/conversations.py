"""Converts the rows of fine-tuning into Arrow files on disk, split into training and validation, for TRL's trainers.

One pass checks every row and writes it, so that memory does not grow with the file. A mistake anywhere means that
nothing is trained. The converted rows of the same bytes are used again. Owns the cache folder; rows.py says what a row
must hold, and row_files.py reads the files. Needs the extra `finetune`, which is imported by `load` only.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_train import checks, row_files, rows
from zero_train.errors import ConfigError
from zero_train.schema import DataConfig

if TYPE_CHECKING:
    from datasets import Dataset

_VERSION = 1  # of the converted rows: raise it when the same file is converted differently
_SHOWN = 10  # mistakes
_BATCH_ROWS = 1000
_BATCH_BYTES = 8 << 20
_KEYS = ("data.path", "data.validation_path")
_PARTS = ("training", "validation")


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
    checks.installed("datasets", f"data={config.kind}")
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
    training, validation = first.datasets()
    found = [first]
    if given:
        found.append(second := _converted(_KEYS[1], given, config, task, 0.0, cache, say))
        if (first.kind, first.of_messages) != (second.kind, second.of_messages):
            raise ConfigError(
                f"data.validation_path={given} has rows of {second.shape}, and data.path={config.path} of "
                f"{first.shape}; write both alike"
            )
        validation = second.datasets()[0]
    counted = f"{len(training):,} rows of {first.shape} to train on, {len(validation or ()):,} held out"
    remarks = tuple(
        f"{name}: {remark}" for name, part in zip((key, _KEYS[1]), found, strict=False) for remark in part.remarks
    )
    digests = tuple(digest for part in found for digest in part.digests)
    return Rows(f"{config.path}, {counted}", first.kind, training, validation, remarks, digests, first.shape)


@dataclass(frozen=True)
class _Converted:
    """A complete conversion: what its rows.json holds."""

    folder: Path
    kind: str
    of_messages: bool
    counts: list[int]  # rows of each of _PARTS, as the hashes split them
    moved: int | None  # the row of the part that has rows which changes to the part that has none
    remarks: list[str]
    digests: list[str]

    @property
    def shape(self) -> str:
        """Returns the kind, and what its columns hold where that may differ."""
        held = "messages" if self.of_messages else "texts"
        return self.kind if self.kind in ("messages", "text") else f"{self.kind} ({held})"

    def datasets(self) -> tuple[Dataset, Dataset | None]:
        """Returns the training rows and the validation rows, without reading them."""
        from datasets import Dataset, concatenate_datasets

        files = [self.folder / f"{part}.arrow" for part in _PARTS]
        parts = [Dataset.from_file(str(file)) if n else None for file, n in zip(files, self.counts, strict=True)]
        if self.moved is not None:
            whole = next(part for part in parts if part is not None)
            around = (range(self.moved), range(self.moved + 1, len(whole)))
            kept, one = (
                concatenate_datasets([whole.select(rows) for rows in around if rows]),
                whole.select([self.moved]),
            )
            parts = [kept, one] if self.counts[0] else [one, kept]
        assert parts[0] is not None
        return parts[0], parts[1]


def _converted(
    key: str, given: str, config: DataConfig, task: str, fraction: float, cache: Path, say: Callable[[str], None]
) -> _Converted:
    """Returns the conversion of the rows that `given` names, from `cache` if it is there."""
    source = _source(key, given, config)

    def convert(partial: Path) -> dict[str, Any]:
        say(f"{key}={given}: checking {source.size / 1e6:,.1f} MB and converting them into {cache}")
        return _convert(source, task, fraction, partial)

    named = ("rows", f"{key}={given}", "the converted rows", "about as much room as the file")
    folder, found = kept(cache, *named, [_VERSION, source.digest, config.kind, task, fraction], convert)
    return _Converted(folder, **found)


def kept(
    cache: Path, kind: str, source: str, what: str, room: str, identity: list[Any], make: Callable[[Path], Any]
) -> tuple[Path, Any]:
    """Returns the folder in `cache` that `make` filled for `identity`, now or in another run, and what it returned.

    The folder appears when it is complete, and the JSON of what `make` returned is written last, to the disk itself.

    Raises:
        ConfigError: the cache cannot be written. It names `source`, `what` is written, and the `room` that it needs.
    """
    folder = cache / f"{kind}-{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]}"
    partial, done = folder.with_name(f"{folder.name}.{os.getpid()}.partial"), f"{kind}.json"
    try:
        with locked(cache):
            if not (folder / done).is_file():
                try:
                    partial.mkdir()
                    found = make(partial)
                    with (partial / done).open("w") as file:
                        json.dump(found, file)
                        file.flush()
                        os.fsync(file.fileno())
                    if not (folder / done).is_file():  # it is there if another process was as fast, without locks
                        partial.rename(folder)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
            return folder, json.loads((folder / done).read_text())
    except OSError as error:
        raise ConfigError(
            f"{source}: cannot write {what} to {cache}: {error.strerror or error}; they need {room}: make room, or "
            "name a folder with more by XDG_CACHE_HOME"
        ) from error


def place_of(configs: Iterable[DataConfig], wanted: dict[str, Any], task: str) -> str:
    """Returns the file and the place in it of a row with these columns, for which it reads the files once more."""
    configs = list(configs)
    for config in configs:
        for key, given in zip(_KEYS, (config.path, config.validation_path), strict=True):
            for place, found in _source(key, given, config).places if given else ():
                columns = rows.read(found, task).columns
                if all(_plain(columns[name]) == wanted[name] for name in columns if name != "tools"):
                    return place
    return " or ".join(str(config.path) for config in configs)


def _plain(column: str | list[str] | None) -> Any:
    return [json.loads(text) for text in column] if isinstance(column, list) else column


def cache_folder() -> Path:
    """Returns where converted data are kept, for all runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zero-train"


@contextmanager
def locked(cache: Path) -> Iterator[None]:
    """Lets one process at a time write into `cache`. What a killed conversion left is deleted by the next."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # this filesystem has no locks: two processes may convert the same, in folders of their own
            pass
        else:
            for left in cache.glob("*.partial"):
                shutil.rmtree(left, ignore_errors=True)
        yield


@dataclass(frozen=True)
class _Source:
    """Rows with their places, and a digest of what they are read from."""

    key: str
    given: str
    digest: str
    files: list[Path]
    stamps: list[tuple[int, int]]  # from before the digest
    places: Iterable[tuple[str, Any]]

    @property
    def size(self) -> int:
        """Returns the bytes of the files."""
        return sum(size for size, _ in self.stamps)


def _source(key: str, given: str, config: DataConfig) -> _Source:
    """Finds the rows and takes the digest of their files.

    Raises:
        ConfigError: they do not exist or cannot be read.
    """
    try:
        if config.kind == "datasets":
            return _of_datasets(key, given)
        files = row_files.found(key, given, config.kind, config.pattern)
        read = row_files.READERS[config.kind]
        places = ((f"{path}, {place}", row) for path in files for place, row in read(path))
        stamps = _stamps(files)
        return _Source(key, given, row_files.digest(files), files, stamps, places)
    except OSError as error:
        raise ConfigError(f"{key}={given} cannot be read: {error.strerror or error}; change {key}") from error


def _stamps(files: list[Path]) -> list[tuple[int, int]]:
    """Returns what changes if a file is written to."""
    return [(found.st_size, found.st_mtime_ns) for found in (path.stat() for path in files)]


def _of_datasets(key: str, given: str) -> _Source:
    """Opens a folder of save_to_disk, or hands any other name to load_dataset, which is untried."""
    import datasets

    path = Path(given).expanduser()
    if path.is_dir():
        try:
            opened = datasets.load_from_disk(str(path))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{key}={given} is no folder that Dataset.save_to_disk wrote ({str(error).splitlines()[0]}); a folder "
                "of files is read by data=jsonl, parquet or csv"
            ) from error
        if not isinstance(opened, datasets.Dataset):
            raise ConfigError(
                f"{key}={given} has the splits {', '.join(opened)}; name one, such as {key}={path / next(iter(opened))}"
            )
        files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("cache-"))
        stamps = _stamps(files)
        return _Source(key, given, row_files.digest(files), files, stamps, _named(given, opened))
    if path.exists():
        raise ConfigError(
            f"{key}={given} is a file, and data=datasets reads folders of save_to_disk; choose another data"
        )
    if given.count("/") > 1 or given.startswith(("/", ".", "~")):
        raise row_files.missing(key, given)
    try:
        opened = datasets.load_dataset(given, split="train")
    except Exception as error:  # whatever the library, the network or the hub raises, the way out is the same
        raise ConfigError(
            f"{key}={given} is no folder here, and datasets cannot load it from the hub: {str(error).splitlines()[0]}; "
            "name a folder that Dataset.save_to_disk wrote"
        ) from error
    return _Source(key, given, str(opened._fingerprint), [], [], _named(given, opened))


def _named(given: str, opened: Any) -> Iterator[tuple[str, Any]]:
    return ((f"{given}, {place}", row) for place, row in row_files.of_datasets(opened))


def _convert(source: _Source, task: str, fraction: float, folder: Path) -> dict[str, Any]:
    """Checks every row and writes it to `folder`. Returns what rows.json holds."""
    with _Conversion(folder, fraction) as conversion:
        for checked in check(source.key, source.given, source.places, task):
            conversion.add(checked)
    if _stamps(source.files) != source.stamps:
        raise ConfigError(f"{source.key}={source.given} was written to while it was read; start again")
    return conversion.summary(source)


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


class _Conversion:
    """Splits rows by their hashes and writes each part to an Arrow file."""

    def __init__(self, folder: Path, fraction: float) -> None:
        self._folder, self._fraction = folder, fraction
        self._parts: list[_Part] = []
        self._kind, self._of_messages = "", False
        self._dropped: dict[str, None] = {}
        self._remarks: dict[str, None] = {}

    def __enter__(self) -> _Conversion:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for part in self._parts:
            part.close(complete=kind is None)

    def add(self, row: rows.Row) -> None:
        """Writes a row, of the same kind as those before it."""
        if not self._parts:
            self._kind, self._of_messages = row.kind, row.of_messages
            self._parts = [_Part(self._folder / f"{name}.arrow", row) for name in _PARTS]
        hashed = int.from_bytes(hashlib.sha256(row.content).digest()[:8], "big") / 2**64
        self._parts[hashed < self._fraction].add(row, hashed)
        self._remarks.update(dict.fromkeys(row.remarks))
        if row.dropped and len(self._dropped) <= _SHOWN:
            self._dropped.update(dict.fromkeys(row.dropped))

    def summary(self, source: _Source) -> dict[str, Any]:
        """Returns what rows.json holds."""
        training, validation = self._parts
        remarks, names = list(self._remarks), [f"`{name}`" for name in self._dropped]
        if names:
            shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
            remarks.append(f"columns that are not read: {shown}")
        moved = None
        if self._fraction and not (training.count and validation.count):
            if training.count + validation.count < 2:
                entry = source.key.removesuffix(".path")
                own = "data.validation_fraction=0" if entry == "data" else f"validation_fraction: 0 in {entry}"
                raise ConfigError(
                    f"{source.key}={source.given} has 1 row, which leaves none for validation; write more, or set {own}"
                )
            moved = (validation.largest if validation.count else training.smallest)[1]
        return {
            "kind": self._kind,
            "of_messages": self._of_messages,
            "counts": [training.count, validation.count],
            "moved": moved,
            "remarks": remarks,
            "digests": [f"{part.count} rows with SHA-256 {part.hash.hexdigest()}" for part in self._parts],
        }


class _Part:
    """One Arrow file, written in batches."""

    def __init__(self, path: Path, first: rows.Row) -> None:
        import pyarrow
        from datasets import Features, Json, List, Value

        columns = {name: List(Json()) for name in first.columns} if first.of_messages else {}
        texts = [name for name in first.columns if name == "tools" or not first.of_messages]
        self._schema = Features(columns | {name: Value("string") for name in texts}).arrow_schema
        self._arrow = pyarrow
        self._file = path.open("wb")
        self._writer = pyarrow.ipc.new_stream(self._file, self._schema)
        self._waiting: list[rows.Row] = []
        self._bytes = 0
        self.count = 0
        self.hash = hashlib.sha256()
        self.smallest, self.largest = (2.0, 0), (-1.0, 0)  # (its hash, the row)

    def add(self, row: rows.Row, hashed: float) -> None:
        """Adds a row, whose hash lies between 0 and 1."""
        self.smallest = min(self.smallest, (hashed, self.count))
        self.largest = max(self.largest, (hashed, self.count))
        self.hash.update(len(row.content).to_bytes(8, "big") + row.content)
        self.count += 1
        self._waiting.append(row)
        self._bytes += len(row.content)
        if len(self._waiting) >= _BATCH_ROWS or self._bytes >= _BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        arrow, columns = self._arrow, []
        for column in self._schema:
            values = [row.columns[column.name] for row in self._waiting]
            plain = arrow.string() if column.type == arrow.string() else arrow.list_(arrow.string())
            columns.append(arrow.array(values, type=plain).cast(column.type))
        self._writer.write_batch(arrow.record_batch(columns, schema=self._schema))
        self._waiting, self._bytes = [], 0

    def close(self, *, complete: bool) -> None:
        """Writes the rest, to the disk itself, or gives the file up."""
        try:
            if complete:
                if self._waiting:
                    self._flush()
                self._writer.close()
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()
