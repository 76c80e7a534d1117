"""Finds the files of a run's rows and reads them row by row, each with its place.

JSON and CSV are read by Python, because readers that guess types make dates of texts ("2024-05-01") and null of "NA";
the others by `datasets`. What a row must hold is rows.py's matter.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from zero_train.errors import ConfigError
from zero_train.rows import Mistake

FORMATS = {".jsonl": "json", ".json": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "tsv"}
FORMATS |= {".parquet": "parquet", ".arrow": "arrow"}
_KINDS = {"jsonl": "json", "csv": "csv", "parquet": "parquet"}  # of data: how other endings are read
_PATTERNS = {f"*.{kind}" for kind in _KINDS}  # what conf/data says, which chooses nothing of a single file

Places = Iterator[tuple[str, Any]]  # ("line 7", the row or a Mistake)


def found(key: str, given: str, pattern: str) -> list[Path]:
    """Returns the files that `given` names: one, or those of a folder, by name. [] for the hub.

    Raises:
        ConfigError: there is no such file or folder, or the folder has no file that matches.
    """
    path = Path(given).expanduser()
    if path.is_file():
        if pattern != "*" and pattern not in _PATTERNS:
            raise ConfigError(f"{key}={given} is a file, so data.pattern={pattern} chooses nothing; leave one out")
        return [path]
    if not path.is_dir():
        if given.count("/") > 1 or given.startswith(("/", ".", "~")) or _format(path, ""):
            raise missing(key, given)
        return []
    if (path / "dataset_dict.json").is_file():
        splits = sorted(str(entry) for entry in path.iterdir() if entry.is_dir())
        raise ConfigError(f"{key}={given} has splits; name one: {key}={f' or {key}='.join(splits)}")
    if is_saved(path):
        return sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("cache-"))
    files = sorted(file for file in path.rglob(pattern) if file.is_file() and (pattern != "*" or _format(file, "")))
    if not files:
        names = [entry.name for entry in sorted(path.iterdir())]
        there = f"it has {', '.join(names[:5])}{', …' if len(names) > 5 else ''}" if names else "it is empty"
        raise ConfigError(f"{key}={given} has no file of rows that matches {pattern}: {there}; change data.pattern")
    return files


def is_saved(path: Path) -> bool:
    """Returns whether `Dataset.save_to_disk` wrote this folder."""
    return (path / "dataset_info.json").is_file() and (path / "state.json").is_file()


def missing(key: str, given: str) -> ConfigError:
    """Returns the error for a path that does not exist, with the names that are near."""
    path = Path(given).expanduser()
    if not path.parent.is_dir():
        return ConfigError(f"{key}={given} does not exist, nor does the folder {path.parent}; change {key}")
    near = get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"change {key}"
    return ConfigError(f"{key}={given} does not exist; {hint}")


def digest(key: str, given: str, files: list[Path]) -> str:
    """Returns a SHA-256 over the bytes of the files, in this order. Takes about a second a GB."""
    if not files:
        return str(_of_datasets(key, given, False)._fingerprint)
    total = hashlib.sha256()
    for path in files:
        own = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                own.update(chunk)
        total.update(own.digest())
    return total.hexdigest()


def places(key: str, given: str, kind: str, files: list[Path]) -> Places:
    """Yields the rows of `found` files. kind: of data, which says how files are read whose ending does not."""
    if not files or is_saved(Path(given).expanduser()):
        yield from ((f"{given}, row {n}", row) for n, row in enumerate(_of_datasets(key, given, bool(files)), 1))
        return
    for path in files:
        try:
            for place, row in _of_file(path, _format(path, _KINDS.get(kind, "json"))):
                yield f"{path}, {place}", row
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            yield f"{path}", Mistake(f"is not UTF-8: it has the byte 0x{byte:02x}; save it as UTF-8")
        except (EOFError, OSError) as error:
            yield f"{path}", Mistake(f"cannot be read: {error}; name a whole file")


def _format(path: Path, otherwise: str) -> str:
    return FORMATS.get(Path(path.name.removesuffix(".gz")).suffix.lower(), otherwise)


def _of_file(path: Path, written: str) -> Places:
    if written in ("json", "csv", "tsv"):
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if packed else path.open("rb") as file:
            if file.read(3) != b"\xef\xbb\xbf":
                file.seek(0)
            yield from _json(file) if written == "json" else _csv(file, "\t" if written == "tsv" else ",")
        return
    import datasets
    import pyarrow

    try:
        stream = datasets.load_dataset(written, data_files=str(path), split="train", streaming=True)
        yield from ((f"row {number}", row) for number, row in enumerate(stream, 1))
    except (datasets.exceptions.DatasetsError, pyarrow.ArrowException, ValueError) as error:
        yield "the file", Mistake(f"cannot be read as {written}: {str(error).splitlines()[0]}")


def _json(file: Any) -> Places:
    """Yields the objects of JSON lines, or of one array. Empty lines are skipped."""
    start = file.tell()
    while (byte := file.read(1)).isspace():
        pass
    file.seek(start)
    try:
        listed = json.loads(file.read()) if byte == b"[" else None
    except (ValueError, RecursionError) as error:
        yield "the array", Mistake(f"is not JSON: {error}")
        return
    if listed is not None:
        yield from ((f"row {number}", _whole(row)) for number, row in enumerate(listed, 1))
        return
    for number, line in enumerate(file, 1):
        try:
            text = line.decode()
            if text.strip():
                yield f"line {number}", _whole(json.loads(text)) if "\\ud" in text.lower() else json.loads(text)
        except UnicodeDecodeError as error:
            yield (
                f"line {number}",
                Mistake(f"is not UTF-8: it has the byte 0x{line[error.start]:02x}; save it as UTF-8"),
            )
        except (ValueError, RecursionError) as error:
            yield f"line {number}", Mistake(f"is not JSON: {error}; write one whole object a line, or one array")


def _whole(row: object) -> object:
    """Returns the row, or a Mistake if it has half of a character: JSON may escape what UTF-8 cannot hold."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        return Mistake(f"has {half}, half of a surrogate pair, which is no character; remove it")
    return row


def _csv(file: Any, between: str) -> Places:
    """Yields the rows of a file whose first line names the columns. All cells are texts; empty ones count as absent."""
    csv.field_size_limit(1 << 30)
    lines = (line.decode() for line in file)
    reader = csv.DictReader(lines, delimiter=between, strict=True)
    try:
        for number, row in enumerate(reader, 1):
            place, extra = f"row {number} (line {reader.line_num})", row.pop(None, None)
            if extra or None in row.values():
                count = len(reader.fieldnames or ())
                yield place, Mistake(f"has {'more' if extra else 'fewer'} cells than the {count} columns of the header")
            else:
                yield place, {name: cell or None for name, cell in row.items()}
    except csv.Error as error:
        yield f"line {reader.reader.line_num}", Mistake(f"is not CSV: {error} (the rows after it were not read)")


def _of_datasets(key: str, given: str, saved: bool) -> Any:
    import datasets

    try:
        return datasets.load_from_disk(given) if saved else datasets.load_dataset(given, split="train")
    except Exception as error:  # whatever the library, the network or the hub raises, the way out is the same
        where = "cannot be read" if saved else "is no folder here, and datasets cannot load it from the hub"
        raise ConfigError(f"{key}={given} {where}: {str(error).splitlines()[0]}; name files of rows") from error
