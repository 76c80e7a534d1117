"""Runs programs on ranks that may hang or die, keeps the record and makes failures smaller."""

from __future__ import annotations

import multiprocessing
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from tests.fuzz.drawing import generate
from tests.fuzz.program import Program, smaller, sound
from tests.fuzz.run import Outcome, execute
from zero_core.testing import RankError, RankPool

COLLECTIVE_SECONDS, PROGRAM_SECONDS = 20.0, 45.0  # a program takes some 0.1 s; a rank that waits alone is told first
PRELOAD = ["tests.preload", "tests.fuzz.run", "torch._dynamo"]  # the last comes with the first optimizer, in seconds


@dataclass(frozen=True)
class Failed:
    """A program that neither matched nor was refused, made small; and how many programs it took to find."""

    seed: int
    after: int
    program: Program
    smallest: Program
    outcome: Outcome


@dataclass
class Tally:
    """What became of the programs that plain torch can run."""

    programs: int = 0
    matched: int = 0
    loose: list[int] = field(default_factory=list)  # seeds of those that matched with an allowance for rounding
    invalid: int = 0  # not counted in `programs`
    refused: Counter[str] = field(default_factory=Counter)
    example: dict[str, int] = field(default_factory=dict)  # of each refusal, the first seed
    failed: list[Failed] = field(default_factory=list)
    unsteady: list[tuple[int, Outcome]] = field(default_factory=list)  # failed once, and not when run again
    seconds: float = 0.0

    def add(self, seed: int, outcome: Outcome) -> None:
        if outcome.kind == "invalid":
            self.invalid += 1
            return
        self.programs += 1
        self.matched += outcome.kind == "match"
        self.loose += [seed] * outcome.loose
        if outcome.kind == "refused":
            self.refused[reason(outcome.text)] += 1
            self.example.setdefault(reason(outcome.text), seed)

    def __str__(self) -> str:
        share = self.matched / max(1, self.programs)
        lines = [
            f"{self.programs} programs in {self.seconds:.0f} s: {self.matched} matched ({share:.1%}, {len(self.loose)} "
            f"of them with an allowance for rounding), {self.refused.total()} refused, {len(self.failed)} failed, "
            f"{len(self.unsteady)} failed once; {self.invalid} more could not be run by plain torch"
        ]
        lines += [f"  {n:5}  {text} (seed {self.example[text]})" for text, n in self.refused.most_common()]
        lines += [f"  with an allowance for rounding: seed {seed}" for seed in self.loose]
        lines += [f"  failed once, and not again: seed {seed}: {o.kind} {o.text[:500]}" for seed, o in self.unsteady]
        return "\n".join(lines)


def reason(text: str) -> str:
    """A refusal without what differs from program to program."""
    kind, _, told = text.partition(": ")
    told = re.split(r"[:;,]", re.sub(r"'[^']*'|\([^)]*\)|\[[^]]*\]|[\w.]*\d[\w.]*|\w+\.[\w.]+", "_", told))[0]
    told = re.sub(r"^\w+ is not elementwise", "_ is not elementwise", told)
    return f"{kind}: {told}"[:120]


class Fuzzer:
    """Programs run on pools of ranks, which are replaced when one of them hangs or dies.

    `runner` runs one program on a rank: run.execute, or a mutant's.
    """

    def __init__(self, runner: Callable[[Program, str], Outcome] = execute) -> None:
        self.runner = runner
        multiprocessing.set_forkserver_preload(PRELOAD)
        self._pools: dict[int, RankPool] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="zero-fuzz-")

    def __enter__(self) -> Fuzzer:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.close()
        self._folder.cleanup()

    def judge(self, program: Program) -> Outcome:
        """What became of a program, on all its ranks together."""
        ranks = program.config.ranks
        if ranks not in self._pools:
            self._pools[ranks] = RankPool(ranks, COLLECTIVE_SECONDS, start_method="forkserver")
        with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
            try:
                outcomes = self._pools[ranks].run(self.runner, program, folder, timeout_seconds=PROGRAM_SECONDS)
            except RankError as error:
                return Outcome(_kind(str(error)), str(error))
        if not any(block.kind == "experts" for block in program.model.blocks):  # else ranks may take different paths
            outcomes = [replace(o, kind="crossed") if o.text.startswith("CollectiveError") else o for o in outcomes]
        kinds = {outcome.kind for outcome in outcomes}
        if ranks > 1 and kinds & {"refused", "crossed"}:
            self.renew()  # a collective may be half done
        if len(kinds) > 1 and "refused" in kinds:
            told = "\n".join(f"rank {rank}: {o.kind} {o.text}" for rank, o in enumerate(outcomes))
            return Outcome("uneven", told)
        return next((o for o in outcomes if o.kind in ("crossed", "differs", "invalid")), outcomes[0])

    def renew(self) -> None:
        """End all ranks; the next program has new ones."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def run(
        self,
        seeds: Iterable[int],
        *,
        seconds: float | None = None,
        shrink_seconds: float = 120.0,
        tell: Callable[[Failed], None] = lambda failed: None,
    ) -> Tally:
        """Judge the programs of the seeds, until the time is over."""
        tally, start = Tally(), time.monotonic()
        for count, seed in enumerate(seeds, start=1):
            outcome = self.judge(program := generate(seed))
            if failing(outcome):
                self.renew()
                again = self.judge(program)
                if failing(again):
                    smallest, last = self.shrink(program, again, shrink_seconds)
                    tally.failed.append(Failed(seed, count, program, smallest, last))
                    tell(tally.failed[-1])
                else:
                    tally.unsteady.append((seed, outcome))
            tally.add(seed, outcome)
            tally.seconds = time.monotonic() - start
            if seconds is not None and tally.seconds > seconds:
                break
        return tally

    def shrink(self, program: Program, outcome: Outcome, seconds: float) -> tuple[Program, Outcome]:
        """Greedily the smallest program that still fails in the same way."""
        deadline = time.monotonic() + seconds
        candidates = list(filter(sound, smaller(program)))
        at, in_vain = 0, 0
        while in_vain < len(candidates) and time.monotonic() < deadline:
            less = candidates[at % len(candidates)]
            now = self.judge(less)
            if now.kind == outcome.kind:
                program, outcome, in_vain = less, now, 0
                candidates = list(filter(sound, smaller(program)))
            else:
                at, in_vain = at + 1, in_vain + 1
        return program, outcome


def failing(outcome: Outcome) -> bool:
    return outcome.kind not in ("match", "refused", "invalid")


def _kind(text: str) -> str:
    """What a RankError tells of."""
    if "did not finish" in text:
        return "hang"
    if "died" in text:
        return "crash"
    raised = re.findall(r"^(\w[\w.]*(?:Error|Exception|Invalid|Interrupt)\b)", text, re.MULTILINE)
    return f"error {raised[-1] if raised else ''}".strip()
