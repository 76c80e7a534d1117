"""Compares optimizers of other packages, declared "by itself", with plain torch on every tier.

    python -m tests.optimizers                    all packages; writes docs/optimizers.md and contracts.json
    python -m tests.optimizers optimi.Adan ...    these; prints, and writes nothing

A column says "equal" for plain torch's bits, by how much of the largest motion it differs, or what refused it.
"""

import json
import multiprocessing
import signal
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.optimizers.catalogue import PACKAGES
from tests.optimizers.compare import PLACES, SCALES, compared, found_in, without_its_models
from tests.tables import markdown
from zero_core.optim.contracts import _LIST, TOGETHER
from zero_core.testing import RankPool

SECONDS = 120  # that one optimizer may take
PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"


def page(rows: Sequence[tuple[str, Sequence[str]]], plain: Sequence[tuple[str, str]]) -> str:
    """The Markdown of docs/optimizers.md."""
    equal = sum(all(not each.startswith(("refused", "differs")) for each in told) for _, told in rows)
    head = f"""# Optimizers of other packages

`nox -s optimizers` wrote this page. Each optimizer took {len(SCALES)} steps beside plain torch, with
`optimizer_contract="by itself"`: a model with parameters of no to three dimensions, two groups, gradients of sizes from
1e-3 to 300, a rate that changes. **{equal} of {len(rows)}** are equal at every place: they have plain torch's bits, or
differ by at most 1e-6 of the largest motion of a weight, which is the number then. The list of
`zero_core/optim/contracts.json` has "together" for those whose steps look at several parameters: they run on one device
alone. It holds for these versions, and for options that are on or off as they were here; with others say the contract
yourself.
"""
    table = markdown(
        ("optimizer", *PLACES), ([name, *(each.replace("|", "/") for each in told)] for name, told in rows)
    )
    tail = "## Without a comparison\n\nPlain torch itself did not take these steps.\n"
    without = "\n".join(f"- {name}: {why}"[:120].rstrip() for name, why in plain)
    return f"{head}\n{table}\n\n{tail}\n{without}\n"


def listing(data: dict[str, Any]) -> str:
    """JSON with one optimizer a line."""
    blocks = []
    for module, entry in data.items():
        lines = [f"      {json.dumps(k)}: {json.dumps(v)}" for k, v in entry["optimizers"].items()]
        told = [f'    "{key}": {json.dumps(entry[key])},' for key in ("distribution", "versions")]
        blocks.append("\n".join([f'  "{module}": {{', *told, '    "optimizers": {', ",\n".join(lines), "    }", "  }"]))
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def too_long(*_: object) -> None:
    raise TimeoutError(f"the comparison took more than {SECONDS} s")


def main(words: Sequence[str]) -> None:
    signal.signal(signal.SIGALRM, too_long)
    multiprocessing.set_forkserver_preload(["tests.preload"])
    wanted: dict[str, list[str]] = {}
    for word in words:
        module, _, name = word.rpartition(".")
        wanted.setdefault(module, []).append(name)
    pool = RankPool(2, start_method="forkserver")
    data: dict[str, Any] = json.loads(_LIST.read_text(encoding="utf-8"))
    rows: list[tuple[str, list[str]]] = []
    plain: list[tuple[str, str]] = []
    without_its_models()
    for module, pin in PACKAGES.items():
        if words and module not in wanted:
            continue
        known: dict[str, Any] = {}
        for name in wanted.get(module) or found_in(module):
            signal.alarm(SECONDS)
            try:
                told, said, switches = compared(module, name, pool)
            except Exception as error:  # of the package, in plain torch
                plain.append((f"{module}.{name}", f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"))
                print(*plain[-1], sep=": ", flush=True)
                continue
            finally:
                signal.alarm(0)
            rows.append((f"{module}.{name}", told))
            print(f"{module}.{name}", *told, sep=" | ", flush=True)
            if said is not None:
                known[name] = [said] if said == TOGETHER else [said, switches]
        distribution, _, version = pin.partition("==")
        if version and known:
            versions = [".".join(metadata.version(distribution).split(".")[:2])]
            top = module.partition(".")[0]
            data[top] = {"distribution": distribution, "versions": versions, "optimizers": known}
    pool.close()
    if not words:
        _LIST.write_text(listing(data), encoding="utf-8")
        PAGE.write_text(page(rows, plain), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
