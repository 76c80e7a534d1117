"""How bytes are spread over paths: weights to a pattern, and what each path must hold. Integers; one measurement."""

from __future__ import annotations

import time
from collections.abc import Sequence

from zero_nvme.buffers import as_memory, empty
from zero_nvme.engine import Engine
from zero_nvme.filesystem import open_nameless
from zero_nvme.options import Options

MAX_PERIOD = 16  # units; weights are honoured to about 1/16


def pattern_of(weights: Sequence[float]) -> list[int]:
    """One period of units, as indices of paths, spread as evenly as the weights allow: [2, 1] gives [0, 1, 0].

    Raises ValueError for a weight that is not positive.
    """
    if not weights or min(weights) <= 0:
        raise ValueError(f"weights={list(weights)} must all be positive, one for each path")
    if len(weights) == 1:
        return [0]
    best: list[int] = []
    best_error = float("inf")
    total = sum(weights)
    for period in range(len(weights), max(MAX_PERIOD, 2 * len(weights)) + 1):
        counts = [max(1, round(weight / total * period)) for weight in weights]
        length = sum(counts)
        error = sum(abs(count / length - weight / total) for count, weight in zip(counts, weights, strict=True))
        if error < best_error - 1e-9:
            best, best_error = counts, error
    return _interleave(best)


def _interleave(counts: Sequence[int]) -> list[int]:
    """Smooth weighted round-robin: the path that is furthest behind its share goes next."""
    credit = [0] * len(counts)
    pattern = []
    for _ in range(sum(counts)):
        for index, count in enumerate(counts):
            credit[index] += count
        chosen = max(range(len(counts)), key=lambda index: (credit[index], -index))
        credit[chosen] -= sum(counts)
        pattern.append(chosen)
    return pattern


def bytes_per_path(nbytes: int, pattern: Sequence[int], unit_bytes: int, paths: int) -> list[int]:
    """Bytes that each path's file needs for the first `nbytes` of the striped range."""
    if len(pattern) == 1:
        return [nbytes]
    units = -(-nbytes // unit_bytes)
    whole, rest = divmod(units, len(pattern))
    return [(whole * pattern.count(path) + list(pattern[:rest]).count(path)) * unit_bytes for path in range(paths)]


def measure_weights(
    folders: Sequence[str], options: Options, backend: str, *, direct: bool, nbytes: int = 64 << 20
) -> list[float]:
    """GB/s of each folder alone, written once and read twice, the harmonic mean. Writes and frees `nbytes` in each."""
    buffer = empty(nbytes)
    rates = []
    for folder in folders:
        engine = Engine(folder, [open_nameless(folder, direct=direct)], options, backend=backend)
        try:
            engine.submit(True, 0, as_memory(buffer, writable=False)).wait()  # allocates; not timed
            start = time.perf_counter()
            engine.submit(True, 0, as_memory(buffer, writable=False)).wait()
            engine.submit(False, 0, as_memory(buffer, writable=True)).wait()
            rates.append(2 * nbytes / (time.perf_counter() - start) / 1e9)
        finally:
            engine.close()
    return rates
