"""The largest model that trains three steps on this machine, by the layout of its states.

A Llama of hidden size 5120 with as many layers as the planner accepts on what is free, over device, host and, with
`--nvme-gib`, nvme. Each is a process of its own (step_worker.py, configuration `auto`), takes three steps of 4 Ki
tokens, with clipping 1.0 and activations recomputed, and has what is left of the stage's time. Its weights begin as a
constant: what is tried is the room, and whether losses stay finite.
"""

import math
from typing import Any

from tests.benchmarks.gpu.stage import Piece
from tests.benchmarks.gpu.tables import worker_options
from tests.benchmarks.worker import Worker

CANDIDATES = {  # layers (None: as many as fit) and layout of the states
    "14b": (44, "split"),
    "exact": (None, "split"),
    "bf16-moment": (None, "split_bf16m"),
    "8-bit": (None, "split_8bit"),
}
DEFAULT = ("exact", "8-bit")
SHAPE = {"hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40}
TINY_GIB = 6 / 1024
ROWS, STEPS = 2, 3
TILE_NUMEL = 1 << 22
LEAST_SECONDS = 30


def run(piece: Piece) -> None:
    options = worker_options(piece) | {"deferred": True, "constants": True, "micro_batch": ROWS, "most_rows": ROWS}
    options |= {"nvme_gib": piece.options["nvme_gib"], "sizes": {} if piece.dry else SHAPE}
    options["tile_numel"] = options["tile_numel"] or (1 << 20 if piece.dry else TILE_NUMEL)
    if piece.dry:
        options["host_gib"] = TINY_GIB
    for name in piece.options["largest"] or (DEFAULT[:1] if piece.dry else DEFAULT):
        layers, layout = CANDIDATES[name]
        row: dict[str, Any] = {"name": name, "layout": layout, "missing": "no time was left"}
        if piece.left() > LEAST_SECONDS:
            fixed = {"num_hidden_layers": layers} if layers and not piece.dry else {}
            each = {"layout": layout, "fill": not fixed, "sizes": options["sizes"] | fixed}
            row |= {"missing": None} | trained(options | each, piece.left() - 5)
        piece.keep(rows=[*piece.found.get("rows", []), row])
        print(row, flush=True)
        if row["missing"]:
            piece.failed.append(f"{name}: {row['missing'].splitlines()[-1]}")


def trained(options: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What the process says of its three steps, or why it says nothing."""
    worker = Worker("auto", options, limit_seconds=seconds)
    try:
        if worker.ready().missing:
            return {"missing": worker.missing}
        worker.turn(STEPS - 1)
        told = {key: value for key, value in worker.told.items() if key != "name"}
        losses = worker.answers[-1].get("losses", [math.nan])
        return told | worker.answers[-1] | {"trained": all(map(math.isfinite, losses))}
    finally:
        worker.close()


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| | states | parameters, B | three steps | setup, s; a step, s | planned: HBM, host, nvme, GB | peaks, GB |",
        "|---" * 7 + "|",
    ]
    for row in rows:
        if row["missing"]:
            lines.append(f"| {row['name']} | {row['layout']} | | **no**: {row['missing'].splitlines()[-1]} | | | |")
            continue
        cells = [
            *(row["name"], row["layout"], f"{row['numel'] / 1e9:.2f}", "yes" if row["trained"] else "**not finite**"),
            f"{row['setup_seconds']:.0f}; {row['seconds']:.1f}",
            ", ".join(f"{nbytes / 1e9:.1f}" for nbytes in row["planned_bytes"].values()),
            f"{row.get('peak_device_bytes', 0) / 1e9:.1f}, {row['peak_rss_bytes'] / 1e9:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
