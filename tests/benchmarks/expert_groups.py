"""Memory and bytes read against the number of groups that a block's experts are cut into, as a table and a picture.

    python -m tests.benchmarks.expert_groups DIRECTORY --picture docs/mixtures.png

For each size of a group, and for experts that are not cut, `tests.benchmarks.experts` trains the model of 104 M for two
steps, and then generates: a forward without gradients for each of eight tokens. What is read ahead is one group. Bytes
of a generated token stand beside what they should be: all units but groups, and the groups that were routed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SIZES = [0, 64 << 20, 32 << 20, 16 << 20, 8 << 20, 4 << 20, 2 << 20, 1 << 20]
"""Bytes of a group; 0: not cut."""


def measured(directory: str, train: str, size: int, steps: int) -> dict[str, Any]:
    """What `experts` prints about one variant."""
    sizes = [f"--expert_bytes={size}", f"--prefetch_bytes={size}"] if size else []
    variant = "groups" if size else "whole"
    more = ["--train", train, "--variants", variant, "--pairs", "1", "--steps", str(steps)]
    command = [sys.executable, "-m", "tests.benchmarks.experts", directory, "--model", "104m", *more, *sizes]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def row(directory: str, size: int) -> dict[str, Any]:
    trained, generated = measured(directory, "full", size, 1), measured(directory, "none", size, 8)
    return {
        "expert_bytes": size or None,
        "groups": int(trained["groups"]),
        "arena_mb": round(trained["arena_bytes"] / 1e6, 1),
        "peak_rss_mb": round(trained["peak_rss_kib"] * 1024 / 1e6),
        "step_read_mb": round(trained["nvme_read_bytes"] / 1e6),
        "token_read_mb": round(generated["nvme_read_bytes"] / 1e6, 2),
        "token_expected_mb": round((generated["dense_bytes"] + generated["routed_bytes"]) / 1e6, 2),
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (memory, read) = pyplot.subplots(1, 2, figsize=(10, 3.6))
    groups = [each["groups"] for each in rows]
    memory.plot(groups, [each["peak_rss_mb"] for each in rows], "o-", label="peak RSS, training")
    memory.plot(groups, [each["arena_mb"] for each in rows], "s-", label="the store's arena")
    memory.set_ylabel("MB")
    read.plot(groups, [each["token_read_mb"] for each in rows], "o-", label="read for a generated token")
    read.plot(
        groups, [each["token_expected_mb"] for each in rows], "k+", markersize=12, label="dense part + routed groups"
    )
    read.set_ylabel("MB")
    for axes in (memory, read):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("groups a block")
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="on the drive that is measured")
    parser.add_argument("--picture", default="", help="a PNG file")
    given = parser.parse_args()
    rows = []
    for size in SIZES:
        rows.append(row(given.directory, size))
        print(json.dumps(rows[-1]), flush=True)
    if given.picture:
        draw(rows, Path(given.picture))
