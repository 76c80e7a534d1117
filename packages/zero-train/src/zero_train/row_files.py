"""Finds the files of a run's rows, and reads JSONL, parquet, CSV and `datasets` row by row.

Memory does not grow with a file. Each row comes with its place, or with what is wrong there. What a row must hold is
rows.py's matter.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from zero_train.errors import ConfigError
from zero_train.rows import KNOWN, Mistake

LINE_LIMIT = 16 << 20  # bytes. A conversation of a million tokens is about 5 MB.
PATTERNS = {"jsonl": "*.jsonl", "parquet": "*.parquet", "csv": "*.csv"}  # of the files in a folder
_CHUNK = 1 << 20
_MAGIC = {b"PAR1": "is a parquet file; choose data=parquet", b"\x1f\x8b": "is compressed by gzip; unpack it first"}
_MAGIC |= {b"\x28\xb5\x2f\xfd": "is compressed by zstd; unpack it first", b"PK\x03\x04": "is a zip; unpack it first"}

Places = Iterator[tuple[str, Any]]  # ("line 7", the row or a Mistake)


@dataclass(frozen=True)
class Source:
    """Rows with their places, and the files that they are read from."""

    key: str  # what names them, for errors
    given: str
    files: list[Path]
    stamps: list[tuple[int, int]]  # of the files, from before the digest
    digest: str
    places: Places

    @property
    def size(self) -> int:
        """Returns the bytes of the files."""
        return sum(size for size, _ in self.stamps)

    def check_unchanged(self) -> None:
        """Raises ConfigError if a file was written to since the digest was taken."""
        if _stamps(self.files) != self.stamps:
            raise ConfigError(f"{self.key}={self.given} was written to while it was read; start again")


def source(key: str, given: str, kind: str, pattern: str) -> Source:
    """Returns the rows that `given` names, and takes the digest of their files: about a second a GB.

    kind: a key of READERS, or "datasets": a folder of save_to_disk; any other name is handed to load_dataset, which is
    untried.

    Raises:
        ConfigError: they do not exist or cannot be read.
    """
    try:
        if kind == "datasets":
            return _of_datasets(key, given)
        files = found(key, given, kind, pattern)
        read = READERS[kind]
        places = ((f"{path}, {place}", row) for path in files for place, row in read(path))
        return Source(key, given, files, _stamps(files), digest(files), places)
    except OSError as error:
        raise ConfigError(f"{key}={given} cannot be read: {error.strerror or error}; change {key}") from error


def _stamps(files: list[Path]) -> list[tuple[int, int]]:
    """Returns what changes if a file is written to."""
    return [(found.st_size, found.st_mtime_ns) for found in (path.stat() for path in files)]


def _of_datasets(key: str, given: str) -> Source:
    import datasets

    path = Path(given).expanduser()
    if path.exists() and not path.is_dir():
        raise ConfigError(
            f"{key}={given} is a file, and data=datasets reads folders of save_to_disk; choose another data"
        )
    if not path.is_dir():
        if given.count("/") > 1 or given.startswith(("/", ".", "~")):
            raise missing(key, given)
        try:
            opened = datasets.load_dataset(given, split="train")
        except Exception as error:  # whatever the library, the network or the hub raises, the way out is the same
            raise ConfigError(
                f"{key}={given} is no folder here, and datasets cannot load it from the hub: "
                f"{str(error).splitlines()[0]}; name a folder that Dataset.save_to_disk wrote"
            ) from error
        return Source(key, given, [], [], str(opened._fingerprint), _named(given, opened))
    try:
        opened = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{key}={given} is no folder that Dataset.save_to_disk wrote ({str(error).splitlines()[0]}); a folder of "
            "files is read by data=jsonl, parquet or csv"
        ) from error
    if not isinstance(opened, datasets.Dataset):
        raise ConfigError(
            f"{key}={given} has the splits {', '.join(opened)}; name one, such as {key}={path / next(iter(opened))}"
        )
    files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("cache-"))
    return Source(key, given, files, _stamps(files), digest(files), _named(given, opened))


def _named(given: str, opened: Any) -> Places:
    return ((f"{given}, {place}", row) for place, row in of_datasets(opened))


def found(key: str, given: str, kind: str, pattern: str) -> list[Path]:
    """Returns the files that `given` names: one file, or those of a folder that match `pattern`, by name.

    Raises:
        ConfigError: there is no such file or folder, or the folder has no file that matches.
    """
    path = Path(given).expanduser()
    if path.is_file():
        if pattern not in ("*", PATTERNS[kind]):
            raise ConfigError(f"{key}={given} is a file, so data.pattern={pattern} chooses nothing; leave one out")
        return [path]
    if not path.is_dir():
        raise missing(key, given)
    files = sorted(file for file in path.rglob(pattern) if file.is_file())
    if not files:
        names = [entry.name for entry in sorted(path.iterdir())]
        there = f"it has {', '.join(names[:5])}{', …' if len(names) > 5 else ''}" if names else "it is empty"
        raise ConfigError(f"{key}={given} has no file that matches {pattern}: {there}; change data.pattern")
    return files


def missing(key: str, given: str) -> ConfigError:
    """Returns the error for a path that does not exist, with the names that are near."""
    path = Path(given).expanduser()
    if not path.parent.is_dir():
        return ConfigError(f"{key}={given} does not exist, nor does the folder {path.parent}; change {key}")
    names = [entry.name for entry in path.parent.iterdir()]
    near = get_close_matches(path.name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"change {key}"
    return ConfigError(f"{key}={given} does not exist; {hint}")


def digest(files: list[Path]) -> str:
    """Returns a SHA-256 over the bytes of the files, in this order. Takes about a second a GB."""
    total = hashlib.sha256()
    for path in files:
        own = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                own.update(chunk)
        total.update(own.digest())
    return total.hexdigest()


def jsonl(path: Path) -> Places:
    """Yields the objects of a JSONL file. Empty lines are skipped at its end and a mistake elsewhere."""
    empty: list[str] = []  # the first of the empty lines that are not yet known to be the file's end
    for place, line in _lines(path):
        if isinstance(line, str) and not line.strip():
            empty = empty or [place]
            continue
        if empty:
            yield empty.pop(), Mistake("is empty; delete it")
        if isinstance(line, Mistake):
            yield place, line
            continue
        try:
            row: object = json.loads(line.rstrip())
        except json.JSONDecodeError as error:
            row = Mistake(f"is not JSON: {error.msg} at column {error.colno}; a line holds one whole object")
        except (ValueError, RecursionError) as error:  # a number of 5,000 digits; 10,000 brackets
            row = Mistake(f"is JSON that cannot be read: {error}")
        yield place, row


def _lines(path: Path) -> Iterator[tuple[str, str | Mistake]]:
    """Yields the lines of a file with their newline. No more than LINE_LIMIT bytes of a line are in memory."""
    number = end = 0
    with path.open("rb") as file:
        magic = file.read(4)
        if reason := next((reason for start, reason in _MAGIC.items() if magic.startswith(start)), ""):
            yield "line 1", Mistake(reason)
            return
        file.seek(3 if magic.startswith(b"\xef\xbb\xbf") else 0)
        end = file.tell()
        while line := file.readline(LINE_LIMIT + 1):
            number, start, end = number + 1, end, end + len(line)
            place = f"line {number}"
            if len(line) > LINE_LIMIT:
                while not line.endswith(b"\n") and (line := file.readline(_CHUNK)):
                    end += len(line)
                limit = f"{LINE_LIMIT >> 20} MiB" if LINE_LIMIT >> 20 else f"{LINE_LIMIT} bytes"
                yield place, Mistake(f"has {end - start:,} bytes, and a line may have {limit}; split the row")
                continue
            try:
                yield place, line.decode()
            except UnicodeDecodeError as error:
                at, byte = start + error.start, line[error.start]
                yield place, Mistake(f"is not UTF-8: byte 0x{byte:02x} at offset {at:,} of the file; save it as UTF-8")


def csv_rows(path: Path) -> Places:
    """Yields the rows of a CSV file whose first line names the columns. A row may span lines.

    After a line that is not UTF-8 or breaks the quoting, where the next row begins is not known: the rest is not read.
    """
    csv.field_size_limit(max(csv.field_size_limit(), LINE_LIMIT))
    place = "line 1"  # of the line that was read last

    def texts() -> Iterator[str]:
        nonlocal place
        for here, line in _lines(path):
            place = here
            if isinstance(line, Mistake):
                raise line
            yield line

    reader, number, empty = csv.reader(texts(), strict=True), 0, ""
    try:
        header = next(reader, [])
        for cells in reader:
            if not cells:
                empty = empty or place
                continue
            number += 1
            here = f"row {number} ({place})"
            if empty:
                yield empty, Mistake("is empty; delete it")
                empty = ""
            if len(cells) != len(header):
                yield here, Mistake(f"has {len(cells)} cells, and the header names {len(header)} columns")
            else:
                yield here, {name: _parsed(name, cell) for name, cell in zip(header, cells, strict=True)}
    except Mistake as mistake:
        yield place, Mistake(f"{mistake} (the rows after it were not read)")
    except csv.Error as error:
        yield place, Mistake(f"is not CSV: {error} (the rows after it were not read)")


def _parsed(name: str, cell: str) -> object:
    """Returns the list that a cell holds as JSON, if it holds one in a column of messages; else the cell."""
    if name in ("messages", "conversations", "prompt", "completion", "chosen", "rejected") and cell[:1] == "[":
        try:
            return json.loads(cell)
        except ValueError:
            return cell
    return None if name == "tools" and not cell else cell


def parquet(path: Path) -> Places:
    """Yields the rows of a parquet file, which is mapped into memory: read otherwise, a whole row group would be."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, memory_map=True) as file:
            number = 0
            for batch in file.iter_batches(batch_size=256):
                for row in _of_batch(batch):
                    number += 1
                    yield f"row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        yield "the file", Mistake(f"cannot be read as parquet: {str(error).splitlines()[0]}")


def _of_batch(batch: Any) -> Iterator[object]:
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:  # somewhere in the batch
        for at in range(batch.num_rows):
            try:
                yield batch.slice(at, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield Mistake(f"has a text that is not UTF-8: {error.reason} at its byte {error.start}")


def of_datasets(dataset: Any) -> Places:
    """Yields the rows of a datasets.Dataset. Columns that no trainer reads are not decoded: they are yielded as `…`."""
    others = {name: "…" for name in dataset.column_names if name not in KNOWN}
    for number, row in enumerate(dataset.remove_columns(list(others)).with_format(None), 1):
        yield f"row {number}", {**row, **others}


READERS: dict[str, Callable[[Path], Places]] = {"jsonl": jsonl, "csv": csv_rows, "parquet": parquet}
