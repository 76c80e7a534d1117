"""Several sets of rows in one run (data=mixture), and the order in which their rows are learned from.

That order is a function of the seed, the weights and how many rows there are: row number N of a run is the same at any
number of ranks, and a run that is resumed goes on with the row that follows. There is no state to save. Owns no file.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count, islice
from pathlib import Path
from typing import Any

from zero_train import conversations, row_files
from zero_train.errors import ConfigError, choices
from zero_train.schema import ROW_KINDS, DataConfig

__all__ = ["Order", "load", "merged", "sources"]

_KEYS = ("path", "kind", "weight", "validation_fraction")


def sources(config: DataConfig) -> list[tuple[str, DataConfig, float | None]]:
    """Returns the key, the configuration and the weight of each set of rows that `config` names.

    Raises:
        ConfigError: an entry of data.sources is not one.
    """
    if config.kind != "mixture":
        return [("data.path", config, None)]
    given = config.sources
    if not isinstance(given, list) or not given:
        raise ConfigError(
            f"data.sources={given} names nothing to mix; list what to learn from, as in "
            "data.sources=[{path: a.jsonl, weight: 2}, {path: b.jsonl, weight: 1}]"
        )
    found = [_source(f"data.sources[{at}]", entry, config) for at, entry in enumerate(given)]
    places = [Path(str(part.path)).expanduser().resolve() for _, part, _ in found]
    if twice := next((part.path for at, (_, part, _) in enumerate(found) if places[at] in places[:at]), None):
        raise ConfigError(f"data.sources names {twice} twice; name it once, with the weight of both")
    without = [key for key, _, weight in found if weight is None]
    if without and len(without) < len(found):
        raise ConfigError(
            f"{without[0]} has no weight, and others have; give each of data.sources a weight, or none of them, which "
            "takes every row equally often"
        )
    return found


def _source(key: str, entry: Any, config: DataConfig) -> tuple[str, DataConfig, float | None]:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{key}={entry} is not an entry with a path; write {{path: {entry}}}")
    for name in entry:
        if name not in _KEYS:
            raise choices(f"a key of {key}", name, _KEYS)
    path = entry.get("path")
    if not isinstance(path, str) or not path.strip():
        raise ConfigError(f"{key} has no path; write {{path: FILE}}")
    ending = Path(path).suffix[1:]
    kind = entry.get("kind") or ("datasets" if not ending else "jsonl" if ending not in ROW_KINDS else ending)
    if kind not in ROW_KINDS:
        raise choices(f"{key}.kind", kind, ROW_KINDS)
    weight = entry.get("weight")
    if weight is not None and not (_is_number(weight) and 0 < weight <= 1e9):
        raise ConfigError(f"{key}.weight={weight} must be a number above 0 and at most 1e9; leave an entry out for 0")
    fraction = entry.get("validation_fraction", config.validation_fraction)
    if not (_is_number(fraction) and 0 <= fraction < 1):
        raise ConfigError(f"{key}.validation_fraction={fraction} must be a number of at least 0 and below 1")
    pattern = row_files.PATTERNS.get(kind, "*")
    own = dataclasses.replace(config, kind=kind, path=path, pattern=pattern, validation_fraction=float(fraction))
    return key, own, None if weight is None else float(weight)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def load(
    config: DataConfig, task: str, cache: Path, say: Callable[[str], None] = lambda _: None
) -> list[tuple[DataConfig, conversations.Rows]]:
    """Reads each set of rows that `config` names, as conversations.load does.

    Raises:
        ConfigError: as that does, or the sets have different columns.
    """
    key = "data.path" if config.kind != "mixture" else ""
    found = []
    for name, own, weight in sources(config):
        rows = conversations.load(own, task, cache, say, key or f"{name}.path")
        part = conversations.Part(own, rows.training, weight)
        found.append((own, dataclasses.replace(rows, parts=(part,))))
        (one, first), (other, last) = found[0], found[-1]
        if first.shape != last.shape:
            raise ConfigError(
                f"data.sources: {other.path} has rows of {last.shape}, and {one.path} of {first.shape}; "
                "write both alike"
            )
    return found


def merged(read: Sequence[conversations.Rows]) -> conversations.Rows:
    """Returns all sets of rows as one, in this order."""
    from datasets import concatenate_datasets

    parts = [dataclasses.replace(rows.parts[0], training=rows.training) for rows in read]  # which may be marked by now
    first = read[0]
    if len(read) == 1:
        return dataclasses.replace(first, parts=tuple(parts))
    held_out = [rows.validation for rows in read if rows.validation is not None]
    return conversations.Rows(
        "; ".join(rows.name for rows in read),
        first.kind,
        concatenate_datasets([rows.training for rows in read]),
        concatenate_datasets(held_out) if held_out else None,
        tuple(dict.fromkeys(remark for rows in read for remark in rows.remarks)),
        tuple(digest for rows in read for digest in rows.digests),
        first.shape,
        tuple(parts),
    )


@dataclass(frozen=True)
class Order:
    """The numbers of the rows that a run learns from, in turn: a sampler for torch's DataLoader.

    Rows of several parts lie one after the other. Without weights they are drawn as one set of rows. With weights, of
    any first N rows each part has its share, to within less than one row, however different the weights are.

    [Note: the first N rows] A part of share s is then s * N - 1 < rows < s * N + 1, so its row number j (from 0) may
    come as row floor(j / s) of the run at the earliest, and before row ceil((j + 1) / s). Taking the one that is due
    first, of those that may come, meets all these limits: fractions of rows taken evenly would meet them, and for jobs
    of unit length the earliest deadline first meets whatever can be met.
    """

    sizes: tuple[int, ...]  # rows of each part
    weights: tuple[float, ...] | None  # None: each row equally often
    seed: int
    samples: int  # of the whole run

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        return islice(self._endless(), self.samples)

    def passes(self, samples: float) -> list[float]:
        """Returns how often the first `samples` rows go through each part."""
        weights = self.weights or tuple(map(float, self.sizes))
        return [samples * w / sum(weights) / size for w, size in zip(weights, self.sizes, strict=True)]

    def _endless(self) -> Iterator[int]:
        if self.weights is None:
            yield from _shuffled(sum(self.sizes), lambda turn: self.seed + turn)
            return
        streams, begins = [], [sum(self.sizes[:at]) for at in range(len(self.sizes))]
        for at, size in enumerate(self.sizes):
            seeds = lambda turn, at=at: random.Random(f"{self.seed}/{at}/{turn}").getrandbits(62)  # noqa: E731
            streams.append(_shuffled(size, seeds))
        ready: list[tuple[int, int, int]] = []  # (before which row of the run, part, rows of it so far)
        waiting = [(0, at, 0) for at in range(len(self.sizes))]  # (from which row of the run on, ...)
        exact = [Fraction(str(weight)) / sum(map(Fraction, map(str, self.weights))) for weight in self.weights]
        for number in count():
            while waiting and waiting[0][0] <= number:
                _, at, taken = heapq.heappop(waiting)
                heapq.heappush(ready, (math.ceil((taken + 1) / exact[at]), at, taken))
            _, at, taken = heapq.heappop(ready)
            yield begins[at] + next(streams[at])
            heapq.heappush(waiting, (math.floor((taken + 1) / exact[at]), at, taken + 1))


def _shuffled(size: int, seed_of: Callable[[int], int]) -> Iterator[int]:
    """Yields each number below `size` once in each pass. The order of a pass is accelerate's for a seed of its own."""
    import torch

    for turn in count():
        yield from torch.randperm(size, generator=torch.Generator().manual_seed(seed_of(turn))).tolist()
