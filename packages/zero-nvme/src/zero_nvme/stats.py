"""Counters, as a user reads them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero_nvme.engine import Engine
    from zero_nvme.store import Store

PERCENTILES = (50, 90, 99)


def summary(store: Store) -> dict[str, Any]:
    """A dict of plain values:

    `backend`, `reason`, `direct`; `read` and `write`, each with `bytes`, `blocks`, `retries` (short or interrupted, and
    resumed), `failures`, `bounced_bytes` (copied because of alignment), `registered_blocks` and `latency_seconds`
    (of a block: `p50`, `p90`, `p99`, to 19 %, and `max`); `depth` (blocks in flight as each block started ->
    how often); `registered` (`file`; `buffers`, `bytes`, and `reason` if there is none); `paths`, bytes of each.
    """
    engine: Engine = store._engine
    per_path = engine.statistics()
    return {
        "backend": store.backend,
        "reason": store.reason,
        "direct": store.direct,
        "read": _direction([entry["read"] for entry in per_path]),
        "write": _direction([entry["write"] for entry in per_path]),
        "depth": dict(sorted(_added(entry["depth"] for entry in per_path).items())),
        "registered": {"file": all(entry["registered_file"] for entry in per_path), **engine.registered},
        "paths": [
            {"path": path.label, "read_bytes": entry["read"]["bytes"], "write_bytes": entry["write"]["bytes"]}
            for path, entry in zip(engine.paths, per_path, strict=True)
        ],
    }


def _direction(entries: list[dict[str, Any]]) -> dict[str, Any]:
    counted = ("bytes", "blocks", "retries", "failures", "bounced_bytes", "registered_blocks")
    result: dict[str, Any] = {name: sum(entry[name] for entry in entries) for name in counted}
    latency = _added(entry["latency_nanoseconds"] for entry in entries)
    maximum = max(entry["latency_nanoseconds_maximum"] for entry in entries)
    result["latency_seconds"] = {
        **{f"p{q}": min(percentile(latency, q), maximum) / 1e9 for q in PERCENTILES},
        "max": maximum / 1e9,
    }
    return result


def _added(histograms: Any) -> Counter[int]:
    total: Counter[int] = Counter()
    for histogram in histograms:
        total.update(histogram)
    return total


def percentile(histogram: dict[int, int], q: float) -> int:
    """The upper edge of the bucket in which the q-th percentile falls; 0 for an empty histogram."""
    wanted = sum(histogram.values()) * q / 100
    seen = 0
    for edge, count in sorted(histogram.items()):
        seen += count
        if seen >= wanted:
            return edge
    return 0
