"""`python -m tests.fuzz`: run the fuzzer as long as one likes; see README.md."""

import argparse
import itertools
import sys

from tests.fuzz import program
from tests.fuzz.drawing import generate
from tests.fuzz.fuzzer import Failed, Fuzzer, failing
from tests.fuzz.mutants import MUTANTS, runner


def find_mutants(words: list[str], seed: int, programs: int) -> int:
    """Look for bugs of mutants.py, with the unharmed library beside it: what fails there too does not count.

    words: only those whose names have one of them.
    """
    missed = 0
    for name in MUTANTS:
        if words and not any(word in name for word in words):
            continue
        with Fuzzer(runner(name)) as fuzzer, Fuzzer() as sane:
            for count, each in enumerate(range(seed, seed + programs), start=1):
                outcome = fuzzer.judge(program := generate(each))
                if failing(outcome) and not failing(sane.judge(program)):
                    smallest, outcome = fuzzer.shrink(program, outcome, seconds=60)
                    print(f"{name}: seed {each}, program {count}: {outcome.kind}, {smallest!r}", flush=True)
                    break
            else:
                missed += 1
                print(f"{name}: NOT FOUND in {programs} programs", flush=True)
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, help="stop after this time; without it, after --programs")
    parser.add_argument("--programs", type=int, default=500, help="how many, where no --minutes are given")
    parser.add_argument("--seed", type=int, default=0, help="the first program's seed; the next have those after it")
    told = "print the seed's program, or the one that is given as it was printed, and how it ends; nothing else"
    parser.add_argument("--show", nargs="?", const="", metavar="PROGRAM", help=told)
    told = "how many programs it takes to find each of mutants.py, or those whose names have one of these words"
    parser.add_argument("--mutants", nargs="*", metavar="WORD", help=told)
    given = parser.parse_args()
    if given.mutants is not None:
        return find_mutants(given.mutants, given.seed, given.programs)
    with Fuzzer() as fuzzer:
        if given.show is not None:
            shown = eval(given.show, vars(program)) if given.show else generate(given.seed)
            print(shown, fuzzer.judge(shown), sep="\n")
            return 0

        def tell(failed: Failed) -> None:
            print(f"seed {failed.seed}, program {failed.after}: {failed.outcome.kind}")
            print(f"{failed.smallest!r}\n{failed.outcome.text}\n", flush=True)

        seeds = itertools.count(given.seed)
        bounded = seeds if given.minutes else itertools.islice(seeds, given.programs)
        seconds = given.minutes * 60 if given.minutes else None
        tally = fuzzer.run(bounded, seconds=seconds, tell=tell)
    print(tally)
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
