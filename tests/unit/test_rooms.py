"""docs/architecture.md draws which file of a package may import which; this holds the drawing to the files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("zero_core", "zero_offload", "zero_nvme", "zero_optim_cpu", "zero_train", "zero_sim")


def drawn(package: str) -> list[set[str]]:
    """The lines of the package's block, top first: names of modules."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = re.search(rf"^{package}\n((?:    .+\n)+)", text, re.MULTILINE)
    assert block is not None, f"{package} has no block in docs/architecture.md"
    return [set(line.split("·")[0].split()) for line in block.group(1).splitlines()]


def imported(path: Path, package: str) -> Iterator[str]:
    """Modules of the same package that the file imports when it is imported itself."""
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level == 1:
                yield from [module.split(".")[0]] if module else [alias.name for alias in node.names]
            elif module.startswith(f"{package}."):
                yield module.split(".")[1]
        waiting.extend(ast.iter_child_nodes(node))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_file_imports_only_from_lines_below_its_own(package):
    lines = drawn(package)
    line_of = {name: number for number, names in enumerate(lines) for name in names}
    source = ROOT / "packages" / package.replace("_", "-") / "src" / package
    files = {path.stem: path for path in source.glob("*.py") if path.stem != "__init__"}
    assert set(line_of) == set(files) and sum(map(len, lines)) == len(files)
    upwards = [
        f"{name} imports {other}"
        for name, path in files.items()
        for other in imported(path, package)
        if other in files and line_of[other] <= line_of[name]
    ]
    assert not upwards
