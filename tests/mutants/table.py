"""The table of mutants, tests/mutants/table.tsv: a line each, with its first killer, or why none is asked for."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.mutants.draw import AREAS, Mutant
from tests.mutants.trial import trial

__all__ = ["INVALID", "write"]

TABLE = Path(__file__).with_name("table.tsv")
EQUIVALENT = Path(__file__).with_name("equivalent.tsv")
INVALID = "does not compile"


def reasons() -> dict[str, str]:
    """Why no test is asked to catch a mutant, by its key; written by hand."""
    lines = EQUIVALENT.read_text(encoding="utf-8").splitlines() if EQUIVALENT.exists() else []
    return dict(line.split("\t", 1) for line in lines if line)


def write(mutants: Sequence[Mutant], found: Mapping[str, tuple[str, str]], tree: Path) -> None:
    """Writes the table, and says how many live. Raises SystemExit if a killer fails without its mutant."""
    tests = sorted({killer for _, killer in found.values() if killer.startswith("tests/") and not killer.endswith(")")})
    device = [test for test in tests if test.startswith("tests/device") or "/zero_sim/" in test]
    here = [test for test in tests if test not in device]
    failed = trial(tree, here, 3600, first=False).failed + trial(tree, device, 3600, True, first=False).failed
    if failed:
        raise SystemExit(f"killers that fail without a mutant: {failed}")
    why, lines, counts = reasons(), ["key\tarea\tplace\tchange\tphase\tfirst killer"], Counter[tuple[str, str]]()
    for mutant in mutants:
        phase, killer = found.get(mutant.key, ("not tried", ""))
        if killer == INVALID:
            continue
        kind = f"killed: {phase}" if killer else "equivalent" if mutant.key in why else f"lives: {phase}"
        counts[mutant.area, kind] += 1
        place = f"{mutant.path.removeprefix('packages/').replace('/src/', '/')}:{mutant.line} {mutant.function}".strip()
        lines.append(
            "\t".join([mutant.key, mutant.area, place, mutant.change, phase, killer or why.get(mutant.key, "-")])
        )
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    kinds = sorted({kind for _, kind in counts})
    for area in AREAS:
        sys.stdout.write(f"{area}: " + ", ".join(f"{counts[area, kind]} {kind}" for kind in kinds) + "\n")
    sys.stdout.write(
        f"{len(lines) - 1} mutants: "
        + ", ".join(f"{sum(n for (_, k), n in counts.items() if k == kind)} {kind}" for kind in kinds)
        + "\n"
    )
