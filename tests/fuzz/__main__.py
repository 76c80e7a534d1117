"""`python -m tests.fuzz`: run the fuzzer as long as one likes; see README.md."""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

from tests.fuzz.fuzzer import Failed, Fuzzer, script
from tests.fuzz.program import generate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, help="stop after this time; without it, after --programs")
    parser.add_argument("--programs", type=int, default=500, help="how many, where no --minutes are given")
    parser.add_argument("--seed", type=int, default=0, help="the first program's seed; the next have those after it")
    parser.add_argument("--failures", type=int, help="stop after so many")
    parser.add_argument("--scripts", type=Path, default=Path("runs/fuzz"), help="a folder for the failures' scripts")
    parser.add_argument("--show", action="store_true", help="print the seed's program and how it ends, nothing else")
    given = parser.parse_args()
    with Fuzzer() as fuzzer:
        if given.show:
            print(generate(given.seed), fuzzer.judge(generate(given.seed)), sep="\n")
            return 0

        def tell(failed: Failed) -> None:
            given.scripts.mkdir(parents=True, exist_ok=True)
            path = given.scripts / f"seed_{failed.seed}.py"
            path.write_text(script(failed), encoding="utf-8")
            print(f"seed {failed.seed}, program {failed.after}: {failed.outcome.kind}; {path}")
            print(f"{failed.smallest!r}\n{failed.outcome.text}\n", flush=True)

        seeds = itertools.count(given.seed)
        bounded = seeds if given.minutes else itertools.islice(seeds, given.programs)
        seconds = given.minutes * 60 if given.minutes else None
        tally = fuzzer.run(bounded, seconds=seconds, failures=given.failures, tell=tell)
    print(tally)
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
