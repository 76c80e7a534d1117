"""Reads the text of a run as bytes, splits it into training and validation parts, and samples windows from them.

Splitting and sampling are pure functions of file names, seed and sample number: there is no state to checkpoint, and
the global batch is the same at every world size. Owns no model and no device.
"""

from __future__ import annotations

import random
import sysconfig
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from zero_train.declare import ROW_KINDS
from zero_train.errors import ConfigError, choices, told
from zero_train.schema import DataConfig

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Documents:
    """The texts of a run, split into training and validation parts."""

    name: str  # for people: where the texts came from
    training: list[bytes]
    validation: list[bytes]


@dataclass(frozen=True)
class Corpus:
    """The bytes or tokens of a run, split into training and validation parts."""

    name: str  # for people: where the text came from
    training: Tensor  # (n,) uint8, or int32 of tokens
    validation: Tensor  # (m,), of the same dtype
    unit: str = "byte"  # or token

    @cached_property
    def digest(self) -> str:
        """A text that changes if any byte does. Takes about a second a GB, once."""
        parts = (self.training, self.validation)
        unit = f"{self.unit}s with CRC"
        return " and ".join(f"{part.numel()} {unit} {zlib.crc32(part.numpy().data):08x}" for part in parts)

    def batch(self, first: int, rows: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets, (rows, length) int64 each, of `rows` samples from number `first` on.

        A sample's window depends only on its number and the seed.
        """
        last = self.training.numel() - length
        starts = [random.Random(f"{seed}/{first + row}").randrange(last) for row in range(rows)]
        return _windows(self.training, starts, length)

    def validation_batch(self, index: int, count: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Returns batch `index` of `count`, shaped as in `batch`. The windows cover the held-out bytes evenly."""
        last = self.validation.numel() - length - 1
        windows = max(count * rows - 1, 1)
        starts = [(index * rows + row) * last // windows for row in range(rows)]
        return _windows(self.validation, starts, length)


def _windows(text: Tensor, starts: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
    rows = torch.stack([text[start : start + length + 1] for start in starts]).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def load(config: DataConfig, seed: int) -> Corpus:
    """Reads the corpus that `config` names, as bytes.

    Raises:
        ConfigError: the kind does not exist, the path cannot be read, or there is too little text for one sequence.
    """
    if config.kind in ROW_KINDS:
        raise ConfigError(
            f"data={config.kind} has rows, which need a tokenizer, and this run reads bytes; name a tokenizer with "
            "data.tokenizer=FOLDER, choose task=sft or task=dpo, or data=text, stdlib or synthetic"
        )
    found = documents(config, seed)
    training, validation = (_tensor(b"\n".join(part)) for part in (found.training, found.validation))
    corpus = Corpus(found.name, training, validation)
    check_length(corpus, config.sequence_length)
    return corpus


def documents(config: DataConfig, seed: int) -> Documents:
    """Reads the texts that `config` names. Raises ConfigError if the kind or a text does not exist."""
    if config.kind not in READERS:
        raise choices("data", config.kind, READERS)
    return READERS[config.kind](config, seed)


def check_length(corpus: Corpus, sequence_length: int) -> None:
    """Raises ConfigError if a part of the corpus is shorter than one sequence and its targets."""
    needed = sequence_length + 2
    for part, text in (("training", corpus.training), ("validation", corpus.validation)):
        if text.numel() < needed:
            raise ConfigError(
                f"data.path: {corpus.name} has {text.numel()} {corpus.unit}s of {part} text, a sequence needs {needed};"
                " name more text with data.path, or lower data.sequence_length"
            )


def _stdlib(config: DataConfig, seed: int) -> Documents:
    """Reads the source files of the standard library that runs this program."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = (path for path in folder.rglob("*.py") if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(folder).parts))
    texts = {file: file.read_bytes() for file in sorted(files)}
    return _from_files("the standard library's sources", folder, texts, config.validation_fraction)


def _text(config: DataConfig, seed: int) -> Documents:
    """Reads a text file, or every text file of a folder."""
    if not config.path:
        raise ConfigError("data=text needs data.path: a text file or a folder of them")
    path = Path(config.path)
    if path.is_file():
        if (text := _read(path)) is None:
            raise ConfigError(
                f"data.path={path} is not text: it has zero bytes; name a text file, in UTF-8 or another encoding "
                "without zero bytes"
            )
        return _cut(str(path), text, config.validation_fraction)
    if not path.is_dir():
        raise ConfigError(f"data.path={path} is neither a file nor a folder; name text that exists with data.path")
    matching = sorted(file for file in path.rglob(config.pattern) if file.is_file())
    texts = {file: text for file in matching if (text := _read(file))}
    left_out = len(matching) - len(texts)
    name = f"{path}{f' (left out, as empty or not text: {left_out})' if left_out else ''}"
    return _from_files(name, path, texts, config.validation_fraction)


def _synthetic(config: DataConfig, seed: int) -> Documents:
    """Makes sentences of a small random vocabulary: learnable, the same on every machine, and quick to make."""
    dice = random.Random(f"synthetic/{seed}")
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(dice.choices(letters, k=dice.randint(2, 8))) for _ in range(200)]
    return _cut("synthetic words", " ".join(dice.choices(words, k=40_000)).encode(), config.validation_fraction)


READERS: dict[str, Callable[[DataConfig, int], Documents]] = {"stdlib": _stdlib, "text": _text, "synthetic": _synthetic}


def _from_files(name: str, root: Path, texts: Mapping[Path, bytes], fraction: float) -> Documents:
    """Holds out the files whose name hashes below `fraction`, so that adding a file moves no other file."""
    files = list(texts)
    if not files:
        raise ConfigError(
            f"{name}: no text file; change data.path or data.pattern, or choose data=text with a data.path"
        )
    held_out = [path for path in files if zlib.crc32(path.relative_to(root).as_posix().encode()) < fraction * 2**32]
    if not held_out or len(held_out) == len(files):
        held_out = [files[-1]]
    training = [path for path in files if path not in set(held_out)]
    if not training:
        return _cut(name, texts[files[0]], fraction)
    return Documents(f"{name}, {len(files)} files", *([texts[path] for path in part] for part in (training, held_out)))


def _cut(name: str, text: bytes, fraction: float) -> Documents:
    """Holds out the end of a single text, from the beginning of a character of UTF-8 on."""
    cut = int(len(text) * (1 - fraction))
    for _ in range(3):  # bytes of a character after its first
        cut += cut < len(text) and 0x80 <= text[cut] < 0xC0
    return Documents(name, [text[:cut]], [text[cut:]])


def _read(path: Path) -> bytes | None:
    """Returns the bytes of a file, or None if one of them is zero, which text does not have."""
    way_out = "; change data.path or data.pattern"
    with told(f"data.path: cannot read {path}: ", OSError, way_out=way_out), path.open("rb") as file:
        head = file.read(1 << 16)  # a large file that is not text usually has a zero byte here
        text = head if b"\0" in head else head + file.read()
    return None if b"\0" in text else text


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
