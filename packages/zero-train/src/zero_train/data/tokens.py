"""Reads the text of a pretraining run with a tokenizer, into files of token numbers that are mapped into memory.

The same text and tokenizer find the files again. text.py and row_sets.py choose the text and hold out a part of it.
Needs transformers, which is imported by `load` only.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_train.data import row_sets
from zero_train.data import text as data
from zero_train.declare import ROW_KINDS
from zero_train.errors import ConfigError
from zero_train.model import pretrained
from zero_train.schema import Config

_VERSION = 1  # of the files: raise it when the same text is read differently
_PARTS = ("training", "validation")
_PIECE_BYTES = 1 << 20  # a longer text is cut at the end of a line, as a tokenizer takes many times its memory
_AT_ONCE = 16  # pieces: their tokens are Python's numbers for a moment


def folder_of(config: Config) -> Path | None:
    """Returns the folder of the tokenizer that reads the text of task=pretrain, or None: it is read as bytes."""
    if config.task.kind != "pretrain":
        return None
    if config.data.tokenizer:
        return Path(config.data.tokenizer)
    own = Path(str(config.model.path))
    return own if config.model.kind == "hf" and not config.data.as_bytes and pretrained.tokenizer_files(own) else None


def load(config: Config, tokenizer: Any, folder: Path, say: Callable[[str], None] = lambda _: None) -> data.Corpus:
    """Returns the corpus in tokens: documents one after the other, each followed by the tokenizer's end of text.

    The first call writes the tokens, 4 bytes each, into the cache; later ones read the text for its digest only.

    Raises:
        ConfigError: the text cannot be read, is too short for a sequence, or has a mistake; or the cache is full.
    """
    name, digest, parts = _texts(config)
    identity = hashlib.sha256(repr([_VERSION, digest, pretrained.tokenizer_digest(folder)]).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zero-train"
    found = []
    for part, texts in zip(_PARTS, parts, strict=True):
        path = cache / f"tokens-{identity}-{part}"
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            if not path.is_file():
                say(f"{name}: reading it with the tokenizer of {folder}, into {path}")
                cache.mkdir(parents=True, exist_ok=True)
                _write(texts, tokenizer, partial)
                partial.rename(path)
            found.append(_mapped(path, path.stat().st_size // 4))
        except OSError as error:
            raise ConfigError(
                f"cannot write the tokens of the data ({name}) to {cache}: {error.strerror or error}; set "
                "XDG_CACHE_HOME to another folder. Or, if the disk is full, make room: 4 bytes a token"
            ) from error
        finally:
            if partial.is_file():
                partial.unlink()
    training, validation = found
    end = "" if tokenizer.eos_token_id is not None else "; the tokenizer has no end of text, so documents are joined"
    corpus = data.Corpus(f"{name}, read by the tokenizer of {folder}{end}", training, validation, "token")
    data.check_length(corpus, config.data.sequence_length)
    return corpus


def _texts(config: Config) -> tuple[str, str, list[Iterable[str]]]:
    """Returns the text's name, a digest of the text and its split, and the documents of each part."""
    if config.data.kind in ROW_KINDS:
        rows = row_sets.load(config)
        of_rows = (rows.training, rows.validation)
        return rows.name, rows.digest, [(row["text"] for row in part or ()) for part in of_rows]
    found = data.documents(config.data, config.run.seed)
    hashed = hashlib.sha256()
    for part in (found.training, found.validation):
        hashed.update(f"{len(part)}:".encode())
        for text in part:
            hashed.update(len(text).to_bytes(8, "big") + text)
    parts = (found.training, found.validation)
    odd = sum(text.decode(errors="ignore").encode() != text for part in parts for text in part)
    name = found.name + (f" (not UTF-8, so read with replacement marks: {odd})" if odd else "")
    return name, hashed.hexdigest(), [(text.decode(errors="replace") for text in part) for part in parts]


def _write(texts: Iterable[str], tokenizer: Any, path: Path) -> None:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    pieces = _pieces(texts)
    with path.open("wb") as file:
        while batch := list(islice(pieces, _AT_ONCE)):
            read = tokenizer([text for text, _ in batch], add_special_tokens=False, verbose=False)["input_ids"]
            ended = chain.from_iterable(ids + end * last for ids, (_, last) in zip(read, batch, strict=True))
            file.write(torch.tensor(list(ended), dtype=torch.int32).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _pieces(texts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yields pieces of documents, and whether each is its document's last one."""
    for text in texts:
        start = 0
        while start < len(text):
            stop = start + _PIECE_BYTES
            if stop < len(text):
                stop = (text.rfind("\n", start, stop) + 1) or stop
            yield text[start:stop], stop >= len(text)
            start = stop


def _mapped(path: Path, count: int) -> Tensor:
    """(count,) int32, read from the disk when it is used."""
    if not count:
        return torch.empty(0, dtype=torch.int32)
    return torch.from_file(str(path), shared=False, size=count, dtype=torch.int32)
