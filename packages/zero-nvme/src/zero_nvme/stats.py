"""Turns a backend's counters into what a user reads. Holds no state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any


def summary(per_path: Sequence[dict[str, Any]], labels: Sequence[str]) -> dict[str, Any]:
    """Returns plain values: what all paths did together, and the bytes of each.

    `read` and `write` have `bytes`, `blocks`, `retries` (short or interrupted transfers that were resumed), `failures`,
    `bounced_bytes` (copied because of alignment) and `latency_seconds` of a block: `p50`, `p90` and `p99`, to within
    19 %, and `max`. `depth` maps a number of blocks in flight to how often a block started with that many.
    `registered_file` says whether the kernel looks the file up once instead of at every request. `paths` has the bytes
    that were read and written on each path.
    """
    return {
        "read": _direction([entry["read"] for entry in per_path]),
        "write": _direction([entry["write"] for entry in per_path]),
        "depth": dict(sorted(_added(entry["depth"] for entry in per_path).items())),
        "registered_file": all(entry["registered_file"] for entry in per_path),
        "paths": [
            {"path": label, "read_bytes": entry["read"]["bytes"], "write_bytes": entry["write"]["bytes"]}
            for label, entry in zip(labels, per_path, strict=True)
        ],
    }


def _direction(entries: list[dict[str, Any]]) -> dict[str, Any]:
    counted = ("bytes", "blocks", "retries", "failures", "bounced_bytes")
    result: dict[str, Any] = {name: sum(entry[name] for entry in entries) for name in counted}
    latency = _added(entry["latency_nanoseconds"] for entry in entries)
    maximum = max(entry["latency_nanoseconds_maximum"] for entry in entries)
    result["latency_seconds"] = {
        **{f"p{q}": min(percentile(latency, q), maximum) / 1e9 for q in (50, 90, 99)},
        "max": maximum / 1e9,
    }
    return result


def _added(histograms: Any) -> Counter[int]:
    total: Counter[int] = Counter()
    for histogram in histograms:
        total.update(histogram)
    return total


def percentile(histogram: dict[int, int], q: float) -> int:
    """Returns the upper edge of the bucket that the q-th percentile falls into, 0 for an empty histogram."""
    wanted = sum(histogram.values()) * q / 100
    seen = 0
    for edge, count in sorted(histogram.items()):
        seen += count
        if seen >= wanted:
            return edge
    return 0
