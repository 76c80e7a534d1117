"""Runs a program twice, on plain torch and sharded, and compares what the two recorded. Runs on every rank.

Plain torch stands for R ranks with R replicas in one process: each runs its own batches with its own random numbers,
and before a step every replica's gradients become their mean, as DistributedDataParallel makes them.
"""

from __future__ import annotations

import copy
import gc
import itertools
import math
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

import zero_core
from tests.fuzz.models import Piece, build
from tests.fuzz.program import Op, Program
from tests.fuzz.side import Record, Side
from tests.interrupting import interrupted
from zero_core.errors import CheckpointError, StoreError, ZeroError
from zero_offload.errors import ClosedError, OffloadError, SwapError

UPDATES = 1e-3  # the tolerance of parameters, relative to their update; the others are side.NUMBERS
FAULTS = (CheckpointError, ClosedError, StoreError, SwapError)  # of files, devices and stores, which are in order here
_runs = itertools.count()  # of this process
ALLOWANCE = 10  # how many times what jitter changed is allowed beside the tolerances


@dataclass(frozen=True)
class Outcome:
    """match, refused, invalid (plain torch cannot run it), differs or error; what was seen; the refusal's reason."""

    kind: str
    text: str = ""
    loose: bool = False  # it matched with an allowance for rounding


class Invalid(Exception):
    """Plain torch does not define what the program computes."""


# -- plain torch -------------------------------------------------------------------------------------------------------


class Plain(Side):
    """One replica on plain torch."""

    first: Plain  # rank 0's, whose buffers a checkpoint holds

    def step(self, op: Op) -> None:
        self.optimizer.step()
        for group in self.optimizer.param_groups:
            if group.get("fused"):  # torch's kernels move no version counter: a backward would mix old and new values
                increment_version([p for p in group["params"] if p.grad is not None])

    def interrupted(self, op: Op) -> None:
        self.batch()

    def op_resume(self, op: Op) -> None:
        random, noise, self.noise = torch.get_rng_state(), self.noise, None
        super().op_resume(op)
        self.noise = noise
        torch.set_rng_state(random)

    def save(self) -> Any:
        return copy.deepcopy((self.first.model.state_dict(), self.first.optimizer.state_dict()))

    def load(self, saved: Any, op: Op) -> None:
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])
        self.prepare()


class World:
    """Every rank's replica in this process, one after another."""

    def __init__(self, program: Program, jitter: int = 0) -> None:
        self.program = program
        self.sides: list[Plain] = []
        self.random: list[Tensor] = []
        for rank in range(program.config.ranks):
            self.sides.append(Plain(program, rank, jitter))
            self.sides[-1].first = self.sides[0]
            self.random.append(torch.get_rng_state())
        self.before = self.values()
        self.travelled = [torch.zeros(()) for _ in self.before]

    def run(self) -> list[list[Record]]:
        """Every rank's records."""
        try:
            return self._run()
        finally:
            for side in self.sides:
                side.unhook()

    def _run(self) -> list[list[Record]]:
        for at, op in enumerate(self.program.loop):
            joint = op.name == "step"
            if joint and op.how == "closure":
                self.each(at, Op("backward"))
            norm = self.average() if joint else None
            self.each(at, op)
            for side in self.sides:
                if norm is not None:
                    side.record(f"gradient norm at {side.at}", norm)
            self.measure()
        for side in self.sides:
            for (name, p), far in zip(side.model.named_parameters(), self.travelled, strict=True):
                side.record(name, p, tolerance=UPDATES, scale=float(far))
            for name, buffer in side.model.named_buffers():
                side.record(name, buffer)
        self.restore_each(lambda side: side.record("the next random number", torch.rand(1)))
        for one, other in zip(self.sides[0].parameters, self.sides[-1].parameters, strict=True):
            if not torch.allclose(one, other, rtol=1e-6, atol=1e-7):
                raise Invalid("the replicas' parameters part: ranks write different values in forward")
        raised = [[r for r in side.records if r.label.startswith("raised")] for side in self.sides]
        for told in zip(*raised, strict=True):
            if len({float(record.value) for record in told}) > 1:
                raise Invalid("a backward raises on one rank alone, and the others wait")
        for side in self.sides:
            for record in side.records:
                if not bool(record.value.isfinite().all()):
                    raise Invalid(f"{record.label} is not finite")
        return [side.records for side in self.sides]

    def each(self, at: int, op: Op) -> None:
        self.restore_each(lambda side: side.run(at, op))

    def restore_each(self, act: Callable[[Plain], None]) -> None:
        for rank, side in enumerate(self.sides):
            torch.set_rng_state(self.random[rank])
            act(side)
            self.random[rank] = torch.get_rng_state()

    def average(self) -> float:
        """Give every replica the mean gradient, clipped; its norm before."""
        total = 0.0
        members = [{id(p) for g in side.optimizer.param_groups for p in g["params"]} for side in self.sides]
        for replicas in zip(*(side.parameters for side in self.sides), strict=True):
            found = [p.grad for p in replicas if p.grad is not None]
            if found and id(replicas[0]) in members[0]:
                mean = torch.stack(found).sum(0) / len(replicas)
                total += float(mean.double().square().sum())
                for p in replicas:
                    p.grad = mean.clone()
        norm, limit = math.sqrt(total), self.program.config.max_grad_norm
        if limit is not None:
            for side, mine in zip(self.sides, members, strict=True):
                for p in side.parameters:
                    if p.grad is not None and id(p) in mine:
                        p.grad.mul_(min(1.0, limit / (norm + 1e-6)))
        return norm

    def values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.sides[0].parameters]

    def measure(self) -> None:
        """How far each parameter went so far, by its largest change of every operation."""
        now = self.values()
        for k, (old, new) in enumerate(zip(self.before, now, strict=True)):
            if new.numel():
                self.travelled[k] = self.travelled[k] + (new - old).abs().max()
        self.before = now


# -- sharded -----------------------------------------------------------------------------------------------------------


class Sharded(Side):
    """This rank of the sharded run."""

    def __init__(self, program: Program, rank: int, folder: str, bytestore: Any) -> None:
        self.folder, self.bytestore = folder, bytestore
        super().__init__(program, rank)
        self.optimizer = self.shard(program.config.stage)

    def make(self, seed: int) -> Any:
        with zero_core.deferred_init() if self.program.config.deferred else nullcontext():
            return build(self.program.model, seed)

    def shard(self, stage: int) -> Any:
        config = self.program.config
        units: Any = {"blocks": [Piece], "linears": [nn.Linear]}.get(config.units)
        names = ("expert_bytes", "prefetch_bytes", "resident_bytes", "max_grad_norm", "update_in_backward")
        options = {name: getattr(config, name) for name in names}
        return zero_core.shard(self.model, self.optimizer, stage=stage, units=units, store=self.store(), **options)

    def store(self) -> Any:
        config = self.program.config
        if not config.placement:
            return None
        import zero_offload
        import zero_optim_cpu

        kinds = dict(zip(("parameters", "gradients", "optimizer"), config.placement.split(), strict=True))
        return zero_offload.TieredStore(
            **kinds,
            nvme=self.bytestore if "nvme" in config.placement else None,
            step=zero_optim_cpu.CpuStep() if config.cpu_step else None,
            tile_numel=1 << 20,
            overlap=config.overlap,
        )

    def quietly(self, op: Op) -> Any:
        return zero_core.no_sync(self.model) if op.quiet else nullcontext()

    def gathered(self) -> Any:
        return zero_core.gathered(self.model)

    def step(self, op: Op) -> None:
        if op.how == "closure":
            self.optimizer.step(self.closure)
        else:
            self.optimizer.step()
        self.tell()
        self.record(f"gradient norm at {self.at}", self.optimizer.grad_norm)

    def closure(self) -> None:
        at, seen = self.at, dict(self.seen)  # by hooks on the step, which is told after the backward
        self.seen.clear()
        self.run(int(at.split(":")[0]), Op("backward"))
        self.at = at
        self.seen.update(seen)

    def interrupted(self, op: Op) -> None:
        with (
            suppress(KeyboardInterrupt),
            interrupted(op.index),
            torch.no_grad() if op.how == "evaluate" else nullcontext(),
        ):
            self.backward(self.forward())

    def save(self) -> Path:
        folder = Path(self.folder) / f"checkpoint-{len(self.records)}-{self.batches}"
        zero_core.checkpoint.save(folder, self.model, self.optimizer)
        self.optimizer.close()
        return folder

    def load(self, saved: Path, op: Op) -> None:
        self.prepare()
        self.optimizer = self.shard((self.program.config.stage + 1) % 4 if op.how else self.program.config.stage)
        zero_core.checkpoint.load(saved, self.model, self.optimizer)

    def finish(self) -> None:
        with zero_core.gathered(self.model, master=True):
            for name, p in self.model.named_parameters():
                self.record(name, p)
        for name, buffer in self.model.named_buffers():
            self.record(name, buffer)
        self.record("the next random number", torch.rand(1))
        self.optimizer.close()


# -- judgement ---------------------------------------------------------------------------------------------------------


def execute(program: Program, folder: str) -> Outcome:
    """Run the program on plain torch and as this rank of the sharded run. Raises what nobody raised on purpose."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = World(program).run()[rank]
        except ZeroError as error:  # deferred_init has a part in it
            return Outcome("refused", f"{type(error).__name__}: {error}")
        except Exception as error:
            return Outcome("invalid", f"{type(error).__name__}: {error}"[:300])
        try:
            found = _sharded(program, rank, folder)
        except Exception as error:
            if _on_purpose(error):
                return Outcome("refused", f"{type(error).__name__}: {error}")
            raise
        finally:
            if next(_runs) % 10 == 0:
                gc.collect()
                gc.freeze()  # what is left is torch's; looking through it takes longer than a program
        return _compare(program, rank, expected, found)


def _sharded(program: Program, rank: int, folder: str) -> list[Record]:
    bytestore = None
    if "nvme" in program.config.placement:
        import zero_nvme
        import zero_offload

        place = tempfile.mkdtemp(dir=folder)
        bytestore = zero_nvme.Slab([place]) if program.config.slab else zero_offload.MemoryByteStore()
    side = None
    try:
        side = Sharded(program, rank, folder, bytestore)
        for at, op in enumerate(program.loop):
            side.run(at, op)
        side.finish()
        return side.records
    finally:
        if side is not None:
            side.unhook()
        if bytestore is not None:
            bytestore.close()


def _on_purpose(error: BaseException) -> bool:
    """One of our classes for mistakes of a user's; or a TypeError or ValueError that a `raise` of ours raised."""
    if isinstance(error, (ZeroError, OffloadError)):
        return not isinstance(error, FAULTS)
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = Path(last.filename).parent.name.startswith("zero_")
    return ours and isinstance(error, (TypeError, ValueError)) and str(last.line).startswith("raise ")


def _compare(program: Program, rank: int, expected: list[Record], found: list[Record]) -> Outcome:
    labels = [[record.label for record in records] for records in (expected, found)]
    if labels[0] != labels[1]:
        return Outcome("differs", f"recorded {labels[0]}, sharded {labels[1]}")
    wrong = [k for k, (a, b) in enumerate(zip(expected, found, strict=True)) if _distance(a, b) > _allowed(a)]
    if not wrong:
        return Outcome("match")
    jittered = []
    for jitter in (1, 2, 3):
        with torch.random.fork_rng():
            jittered.append(World(program, jitter).run()[rank])
    told = []
    for k in wrong:
        noise = max(_distance(expected[k], records[k]) for records in jittered)
        if _distance(expected[k], found[k]) > max(_allowed(expected[k]), ALLOWANCE * noise):
            told.append(_tell(expected[k], found[k], noise))
    return Outcome("differs", "\n".join(told)) if told else Outcome("match", loose=True)


def _distance(expected: Record, found: Record) -> float:
    if expected.value.shape != found.value.shape:
        return math.inf
    far = (expected.value - found.value).abs()
    return float(far.nan_to_num(math.inf).max()) if far.numel() else 0.0


def _allowed(expected: Record) -> float:
    largest = float(expected.value.abs().max()) if expected.value.numel() else 0.0
    if expected.scale is None:
        return expected.tolerance * largest
    return expected.tolerance * expected.scale + 2e-7 * largest  # what fp32 cannot hold


def _tell(expected: Record, found: Record, noise: float) -> str:
    def shown(values: Tensor) -> str:
        return "[" + " ".join(f"{v:.7g}" for v in values.tolist()[:6]) + (" ...]" if values.numel() > 6 else "]")

    return (
        f"{expected.label}: plain {shown(expected.value)}, sharded {shown(found.value)}; apart by "
        f"{_distance(expected, found):.2g}, allowed {_allowed(expected):.2g}, rounding makes {noise:.1g}"
    )
