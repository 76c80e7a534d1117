"""Finds the files of a run's rows and reads them row by row, each with its place.

JSON and CSV are read by Python, because readers that guess types make dates of texts ("2024-05-01") and null of "NA";
the others by `datasets`. rows.py checks the rows.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from zero_train.data.rows import Mistake
from zero_train.errors import ConfigError

FORMATS = {".jsonl": "json", ".json": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "tsv"}
FORMATS |= {".parquet": "parquet", ".arrow": "arrow"}
_KINDS = {"jsonl": "json", "csv": "csv", "parquet": "parquet"}  # of data: how other endings are read

Places = Iterator[tuple[str, Any]]  # ("line 7", the row or a Mistake)


def found(key: str, given: str, pattern: str) -> list[Path]:
    """Returns the files that `given` names: one, or those of a folder, by name.

    Raises:
        ConfigError: there is no such file or folder, or the folder has no file that matches.
    """
    path = Path(given).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        hub = f"; if it is on the hub, download it with `hf download --repo-type dataset {given} --local-dir FOLDER`"
        named = not path.is_absolute() and given.count("/") == 1
        raise ConfigError(f"{key}={given} does not exist; change {key}{hub if named else ''}")
    if (path / "dataset_dict.json").is_file():
        splits = sorted(str(entry) for entry in path.iterdir() if entry.is_dir())
        raise ConfigError(f"{key}={given} has splits; name one: {key}={f' or {key}='.join(splits)}")
    pattern = "data-*.arrow" if (path / "dataset_info.json").is_file() else pattern  # Dataset.save_to_disk wrote it
    files = sorted(file for file in path.rglob(pattern) if file.is_file() and (pattern != "*" or _format(file, "")))
    if not files:
        raise ConfigError(f"{key}={given} has no file of rows that matches {pattern}; change data.pattern")
    return files


def digest(files: list[Path]) -> str:
    """Returns a SHA-256 over the bytes of the files, in this order. Takes about a second a GB."""
    total = hashlib.sha256()
    for path in files:
        own = hashlib.sha256()
        with path.open("rb") as file:
            for chunk in iter(partial(file.read, 1 << 20), b""):
                own.update(chunk)
        total.update(own.digest())
    return total.hexdigest()


def places(kind: str, files: list[Path]) -> Places:
    """Yields the rows of files. kind: data's kind, which names the format of files whose ending names none."""
    for path in files:
        place = "its beginning"
        try:
            for place, row in _of_file(path, _format(path, _KINDS.get(kind, "json"))):
                yield f"{path}, {place}", row
        except Exception as error:  # of json, csv, gzip, Arrow or datasets: the way out is the same
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            yield f"{path}, after {place},", Mistake(f"cannot be read: {said}; name a whole file")


def _format(path: Path, otherwise: str) -> str:
    return FORMATS.get(Path(path.name.removesuffix(".gz")).suffix.lower(), otherwise)


def _of_file(path: Path, written: str) -> Places:
    if written in ("parquet", "arrow"):
        import datasets

        stream = datasets.load_dataset(written, data_files=str(path), split="train", streaming=True)
        yield from ((f"row {number}", row) for number, row in enumerate(stream, 1))
        return
    with path.open("rb") as binary:
        packed = binary.read(2) == b"\x1f\x8b"
    # rows.py finds bytes that are not UTF-8.
    how: dict[str, Any] = {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": ""}
    with gzip.open(path, "rt", **how) if packed else path.open("rt", **how) as file:
        yield from _json(file) if written == "json" else _csv(file, "\t" if written == "tsv" else ",")


def _json(file: Any) -> Places:
    """Yields the objects of JSON lines, or of one array. Empty lines are skipped."""
    first = next((line for line in file if not line.isspace()), "")
    file.seek(0)
    if first.lstrip().startswith("["):
        yield from ((f"row {number}", row) for number, row in enumerate(json.load(file), 1))
        return
    for number, line in enumerate(file, 1):
        try:
            if not line.isspace():
                yield f"line {number}", json.loads(line)
        except (ValueError, RecursionError) as error:
            yield f"line {number}", Mistake(f"is not JSON: {error}; write one whole object a line, or one array")


def _csv(file: Any, between: str) -> Places:
    """Yields the rows of a file whose first line names the columns. All cells are texts; empty ones count as absent."""
    csv.field_size_limit(1 << 30)
    reader = csv.DictReader(file, delimiter=between, strict=True)
    for number, row in enumerate(reader, 1):
        place = f"row {number} (line {reader.line_num})"
        if None in row or None in row.values():
            yield place, Mistake("has more or fewer cells than the header has columns")
        else:
            yield place, {name: cell or None for name, cell in row.items()}
