"""The table of mutants, tests/mutants/table.tsv: a line each, with its first killer, or why none is asked for.

A later run goes on from it: what has a phase is not tried again, unless its killer is gone or fails by itself.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.mutants.draw import AREAS, Mutant
from tests.mutants.trial import collected, trial

__all__ = ["INVALID", "read", "write"]

TABLE = Path(__file__).with_name("table.tsv")
EQUIVALENT = Path(__file__).with_name("equivalent.tsv")
INVALID = "does not compile"
UNTRIED = "not tried"
HEAD = "key\tarea\tfunction\tchange\tphase\tfirst killer\twhy none is asked for"


def read() -> dict[str, tuple[str, str]]:
    """Of each mutant of the table that was tried, by its key: the last phase, and its killer or ""."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()[1:] if TABLE.exists() else []
    rows = [line.split("\t") for line in lines]
    return {row[0]: (row[4], row[5]) for row in rows if row[4] != UNTRIED}


def reasons() -> dict[str, str]:
    """Why no test is asked to catch a mutant, by its key; written by hand."""
    lines = EQUIVALENT.read_text(encoding="utf-8").splitlines() if EQUIVALENT.exists() else []
    return dict(line.split("\t", 1) for line in lines if line)


def write(mutants: Sequence[Mutant], found: Mapping[str, tuple[str, str]], tree: Path) -> None:
    """Writes the table, and says how many live. Each killer runs once without a mutant."""
    keys = {mutant.key for mutant in mutants}
    tests = {killer for key, (_, killer) in found.items() if key in keys and killer.startswith("tests/")}
    wrong = {test for test in tests if "::" in test and not test.endswith(")")} - collected(tree, tests)
    for device in (False, True):
        mine = [t for t in sorted(tests - wrong) if device == (t.startswith("tests/device") or "/zero_sim/" in t)]
        mine = [test for test in mine if not test.endswith(")")]
        wrong |= set(trial(tree, mine, 3600, device, first=False).failed) if mine else set()
    sys.stdout.write("".join(f"gone, or fails without a mutant: {test}\n" for test in sorted(wrong)))
    why, lines, counts = reasons(), [HEAD], Counter[tuple[str, str]]()
    for mutant in mutants:
        phase, killer = found.get(mutant.key, (UNTRIED, ""))
        if killer in wrong:
            phase, killer = UNTRIED, ""
        reason = why.get(mutant.key, "")
        function = (
            f"{mutant.path.removeprefix('packages/').partition('/src/')[2] or mutant.path} {mutant.function}".strip()
        )
        lines.append("\t".join([mutant.key, mutant.area, function, mutant.change, phase, killer, reason]))
        if killer != INVALID:
            lives = phase if phase == UNTRIED else f"lives: {phase}"
            kind = f"killed: {phase}" if killer else "equivalent" if reason else lives
            counts[mutant.area, kind] += 1
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    kinds = sorted({kind for _, kind in counts})
    for name, areas in (*((area, [area]) for area in AREAS), ("in all", list(AREAS))):
        sums = {kind: sum(counts[area, kind] for area in areas) for kind in kinds}
        sys.stdout.write(f"{name}: " + ", ".join(f"{number} {kind}" for kind, number in sums.items() if number) + "\n")
