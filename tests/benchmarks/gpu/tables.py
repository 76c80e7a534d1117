"""A step by where its states lie, and what others make of the same model: configurations that take turns.

Owns who takes turns with whom, and what is claimed of the outcome. bf16, activation checkpointing, exact fp32 states,
clipping 1.0. Each configuration is a process (step_worker.py) that takes turns of one untimed and two timed steps with
the others, at 8 Ki tokens and at 32 Ki, so that all see the same minutes. A peer whose memory does not fit beside ours
has its turns after the others have gone; its row says so. What is known is kept after every round, and no round begins
that may not end in time. Claims (BOUNDS) are of tokens per second: ours over the other's.

exposed: the step less forward and backward alone (`floor`, another process), against the planner's, which is given the
figures of the stage `facts` and the TFLOP/s of that floor.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.benchmarks.gpu.stage import GIB, Piece
from tests.benchmarks.intervals import interval_of_median
from tests.benchmarks.worker import Worker
from tests.tables import markdown

MODELS = {
    "1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32},
    "3b": {"hidden_size": 2560, "intermediate_size": 8960, "num_hidden_layers": 32, "num_attention_heads": 20},
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
}
MODELS["8b"] |= {"num_key_value_heads": 8, "vocab_size": 128256}  # as Llama 3.1; ours computes its logits by rows
LENGTH = 2048
ROWS = {8192: 4, 32768: 16}  # rows of a step, by its tokens
BOUNDS = {  # least tokens/s of ours over the other's with 3b, by tokens of a step
    "none": {8192: 0.6, 32768: 0.90},
    "fsdp2-host": {8192: 2.0, 32768: 2.0},
    "deepspeed-host": {8192: 1.5, 32768: 1.5},
}
OURS = ("host", "floor")  # what everything is compared with
PER_PARAMETER = {  # about: bytes of host memory, and of the device's; None: all that is free
    "host": (16, 0),
    "floor": (0, 4),
    "none": (0, 18),
    "auto": (16, None),
    "shared": (16, None),  # as auto, and the device updates the share of the other tiles that `facts` has found
    "nvme": (5, 0),
    "plain": (0, 18),
    "fsdp2-host": (20, 0),
    "deepspeed-host": (22, 0),
    "deepspeed-super-host": (26, 0),
}
STAGES = {"placements": ("none", "auto", "shared", "nvme"), "peers": ("plain", "fsdp2-host", "deepspeed-host")}
STAGES["large"] = ("auto", "nvme")
OTHERS = [name for name in PER_PARAMETER if name not in OURS]
SPARE = (12 * GIB, 14 * GIB)  # of host and device: what the estimates leave out; activations of a turn
TURN = 2  # timed steps
LONGEST_ANSWER = 240  # seconds: to be built, or of a turn
LEAST_SECONDS = 60  # for a group to begin
PREDICTION = 0.2
Turn = dict[str, Any]


@dataclass
class Found:
    """What has been measured so far: turns by name and tokens, in order, and what does not depend on a round."""

    turns: dict[str, dict[int, list[Turn]]] = field(default_factory=dict)
    told: dict[str, dict[str, Any]] = field(default_factory=dict)  # its first word
    apart: list[str] = field(default_factory=list)  # had their turns after ours
    missing: dict[str, str] = field(default_factory=dict)
    predicted: dict[int, dict[str, Any]] = field(default_factory=dict)  # of host, by tokens

    def add(self, name: str, tokens: int, turn: Turn) -> None:
        self.turns.setdefault(name, {}).setdefault(tokens, []).append(turn)

    def median(self, name: str, tokens: int, key: str = "seconds") -> float | None:
        values = [turn.get(key, 0.0) for turn in self.turns.get(name, {}).get(tokens, [])]
        return statistics.median(values) if values else None


def run(piece: Piece) -> None:
    if piece.options["stage"] == "large" and piece.options["model"] != "8b":
        piece.options["model"] = "7b"  # 8 B needs 128 GB of host memory
    options, facts, found = worker_options(piece), piece.known("facts"), Found()
    wanted = STAGES[piece.options["stage"]]
    if piece.options["others"] is not None:
        peers = set(OTHERS) - set(STAGES["placements"]) if "auto" not in wanted else ()
        wanted = [name for name in piece.options["others"] if name in wanted or name in peers]
    if not wanted:
        print("nothing of this stage is among --others", flush=True)
        return
    free = free_bytes(piece.options, facts)
    print(f"free: {free[0] / GIB:.1f} GiB of host memory, {free[1] / GIB:.1f} GiB of the device", flush=True)
    rows = {tokens: ROWS[tokens] for tokens in piece.options["tokens"]}
    for names in groups(wanted, numel_of(MODELS[piece.options["model"]]), free):
        found.apart += [name for name in names if OURS[0] not in names]
        if piece.left() < LEAST_SECONDS and OURS[0] not in names:
            found.missing |= dict.fromkeys(names, "no time was left")
            continue
        print(f"{', '.join(names)}:", flush=True)
        take_turns(found, names, options, rows, piece)
    keep(found, piece)
    if reason := found.missing.get(OURS[0]):
        piece.failed.append(f"{OURS[0]}: {' '.join(reason.split())}")


def keep(found: Found, piece: Piece) -> None:
    piece.keep(rows=report(found, piece.options), **vars(found))


def worker_options(piece: Piece) -> dict[str, Any]:
    """What step_worker is told of a stage's options."""
    names = ("device", "dtype", "folder", "tile_numel", "optimizer", "host_gib", "device_gib")
    given = {key: piece.options[key] for key in names} | {"logits_by_rows": piece.options["model"] == "8b"}
    given |= {"tiny": piece.dry, "length": LENGTH, "checkpointing": True, "micro_batch": 1}
    probe = piece.known("facts").get("probe", {})
    given["probe"] = {} if "failed" in probe else probe
    given["update_share"] = piece.known("facts").get("loaded", {}).get("share", 0.3)
    given["most_rows"] = max(ROWS[tokens] for tokens in piece.options["tokens"])
    return given | {"sizes": {} if piece.dry else MODELS[piece.options["model"]]}


def free_bytes(options: dict[str, Any], facts: dict[str, Any]) -> tuple[float, float]:
    """Of host and device, as the stage `facts` has found them. What is not known is 0: then all but ours go apart."""
    if options["dry"]:
        return math.inf, math.inf
    host = options["host_gib"] or facts.get("memory", {}).get("available_gib", 0)
    return host * GIB, facts.get("device", {}).get("free_gib", 0) * GIB


def numel_of(sizes: dict[str, int]) -> int:
    """Parameters of such a Llama; with 8192 words where none are given."""
    hidden, inner, layers = (sizes[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    words, share = sizes.get("vocab_size", 8192), sizes.get("num_key_value_heads", 1) / sizes["num_attention_heads"]
    attention = int((2 + 2 * (share if "num_key_value_heads" in sizes else 1)) * hidden * hidden)
    return (2 * words + 1) * hidden + layers * (attention + 3 * hidden * inner + 2 * hidden)


def groups(others: Sequence[str], numel: int, free: tuple[float, float]) -> list[list[str]]:
    """Who takes turns with whom: ours, and each other beside it as far as memory goes, the rest one by one."""
    first, last = list(OURS), list[list[str]]()
    room = [have - spare for have, spare in zip(free, SPARE, strict=True)]
    for name in (*OURS, *others):
        needs = [0 if each is None else each * numel for each in PER_PARAMETER[name]]
        fits = None not in PER_PARAMETER[name] and all(need <= have for need, have in zip(needs, room, strict=True))
        if name in OURS or fits:
            room = [have - need for have, need in zip(room, needs, strict=True)]
            first += [name] if name not in OURS else []
        else:
            last.append([name])
    return [first, *last]


def take_turns(found: Found, names: list[str], options: dict[str, Any], rows: dict[int, int], piece: Piece) -> None:
    """Of one group. The first round is for the caches."""
    workers: list[Worker] = []
    begun = time.monotonic()
    try:
        workers = [Worker(each, options, limit_seconds=LONGEST_ANSWER) for each in names]
        for worker in workers:
            found.told[worker.name] = worker.ready().told
            if worker.missing:
                found.missing[worker.name] = worker.missing
                print(f"  {worker.name} is left out: {worker.missing}", flush=True)
        there = [worker for worker in workers if not worker.missing]
        print(f"  {', '.join(w.name for w in there)} after {time.monotonic() - begun:.0f} s", flush=True)
        for number in range(piece.options["rounds"] + 1):
            begun = time.monotonic()
            for tokens, count in rows.items():
                for k in range(len(there)):
                    _turn(found, there[(k + number) % len(there)], tokens, count, keep=number > 0)
                there = [worker for worker in there if not worker.missing]
            for worker in there:
                _predict(found, worker, rows)
            keep(found, piece)
            lasted = time.monotonic() - begun
            print(f"  {number}/{piece.options['rounds']} in {lasted:.0f} s", flush=True)
            if 1.2 * lasted > piece.left():
                print("  no time for another round", flush=True)
                break
    finally:
        for worker in workers:
            worker.leave()
        for worker in workers:
            worker.close()


def _turn(found: Found, worker: Worker, tokens: int, rows: int, *, keep: bool) -> None:
    if worker.missing:
        return
    worker.turn(TURN, rows)
    answer = worker.answers[-1]
    if reason := answer.get("missing"):
        worker.missing = found.missing[worker.name] = f"at {tokens} tokens: {reason}"
        print(f"  {worker.name} is gone {worker.missing}", flush=True)
    elif keep:
        found.add(worker.name, tokens, answer)
    print(f"    {worker.name} {tokens}: {answer.get('seconds', float('nan')):.3f} s", flush=True)


def _predict(found: Found, worker: Worker, rows: dict[int, int]) -> None:
    for tokens, count in rows.items():
        if worker.name == OURS[0] and (seconds := found.median("floor", tokens)) is not None:
            found.predicted[tokens] = worker.ask(f"predict {count} {seconds}")


def report(found: Found, options: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each other and number of tokens that both have been measured at."""
    rows, bounded = [], (options["model"], options["optimizer"]) == ("3b", "adamw")
    for count in options["tokens"]:
        for other in OTHERS:
            ours, theirs = (found.turns.get(name, {}).get(count, []) for name in (OURS[0], other))
            if not ours or not theirs:
                continue
            pairs = list(zip(ours, theirs, strict=False))
            if other in found.apart:
                middle = statistics.median(turn["seconds"] for turn in ours)
                ratios = [turn["seconds"] / middle for turn in theirs]
            else:
                ratios = [b["seconds"] / a["seconds"] for a, b in pairs]
            row = {
                "tokens": count,
                "other": other,
                "pairs": len(ratios),
                "apart": other in found.apart,
                "ratio": statistics.median(ratios),
                "interval": interval_of_median(ratios),
                "bound": BOUNDS.get(other, {}).get(count) if bounded else None,
                "floor_seconds": found.median("floor", count),
                "predicted": found.predicted.get(count, {}),
            }
            for name in (OURS[0], other):
                for key in ("seconds", "peak_device_bytes", "peak_rss_bytes"):
                    row[f"{key}_{name}"] = found.median(name, count, key)
            if row["floor_seconds"] is not None:
                row["exposed_seconds"] = row["seconds_host"] - row["floor_seconds"]
            rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    head = ("tokens a step", "to", "ours on the host, tokens/s", "theirs", "ratio (95 %)", "bound")
    lines = []
    for each in rows:
        other, (low, high), bound = each["other"], each["interval"], each["bound"]
        rates = [f"{each['tokens'] / each[f'seconds_{name}']:.0f}" for name in ("host", other)]
        ratio = f"{each['ratio']:.2f} ({low:.2f}-{high:.2f}), {each['pairs']} {'apart' if each['apart'] else 'pairs'}"
        kept = "-" if bound is None else f"{bound:.2f}: {'met' if high >= bound else '**missed**'}"
        peaks = [
            ", ".join(f"{each[f'{key}_{name}'] / 1e9:.1f}" for name in ("host", other))
            for key in ("peak_device_bytes", "peak_rss_bytes")
        ]
        lines.append([each["tokens"], other, *rates, ratio, kept, *peaks])
    return markdown((*head, "peak HBM: ours, theirs, GB", "peak host: ours, theirs, GB"), lines)


def exposed_table(rows: list[dict[str, Any]]) -> str:
    """What the planner says of `host` beside what was measured, once for each number of tokens."""
    lines = []
    known = [row for row in rows if row["predicted"].get("seconds") and "exposed_seconds" in row]
    for each in {row["tokens"]: row for row in known}.values():
        guess, exposed = each["predicted"], each["exposed_seconds"]
        off = guess["exposed_seconds"] / exposed - 1 if exposed > 0 else float("inf")
        verdict = "met" if abs(off) <= PREDICTION else "**missed**"
        seconds = (each["floor_seconds"], each["seconds_host"], exposed, guess["exposed_seconds"])
        held = f"{each['peak_device_bytes_host'] / 1e9:.2f}, {guess['device_bytes'] / 1e9:.2f}"
        cells = [each["tokens"], *(f"{part:.3f}" for part in seconds), f"{off:+.0%}, 20 %: {verdict}", held]
        lines.append(cells)
    head = ("tokens a step", "forward + backward, s", "host, s", "exposed, s", "predicted, s", "off by")
    return markdown((*head, "HBM, planned, GB"), lines)
