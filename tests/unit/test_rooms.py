"""docs/architecture.md draws which file or folder may import which; this holds the drawing to the files.

A package has a block, and so has each of its folders. What two files have in common decides which block counts: files
of one folder are held to the folder's block, all others to the package's, where a folder is one name.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent.name.replace("-", "_") for path in ROOT.glob("packages/*/pyproject.toml"))


def blocks(package: str) -> dict[str, list[set[str]]]:
    """The lines of each block of the package, top first: {"": names of modules and folders, "runtime": ..}."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    found = re.findall(rf"^{package}(?:/(\w+))?\n((?:    .+\n)+)", text, re.MULTILINE)
    assert found, f"{package} has no block in docs/architecture.md"
    return {folder: [set(line.split("·")[0].split()) for line in block.splitlines()] for folder, block in found}


def imported(path: Path, here: tuple[str, ...], package: str) -> Iterator[tuple[str, ...]]:
    """Where the file imports from in its package when it is imported itself. `here`: its folder, () at the top."""
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.ImportFrom):
            above = tuple((node.module or "").split(".")) if node.module else ()
            if node.level:
                above = here[: len(here) - node.level + 1] + above
            elif above[:1] == (package,):
                above = above[1:]
            else:
                continue
            yield from ((*above, alias.name) for alias in node.names)
        waiting.extend(ast.iter_child_nodes(node))


def module_of(names: tuple[str, ...], modules: set[tuple[str, ...]]) -> tuple[str, ...] | None:
    """The module that `names` lead to: a file, a folder's `__init__`, or None for the package itself."""
    for module in (names, (*names, "__init__"), names[:-1], (*names[:-1], "__init__")):
        if module in modules and module != ("__init__",):
            return module
    return None


@pytest.mark.parametrize("package", PACKAGES)
def test_a_file_imports_only_from_lines_below_its_own(package):
    source = ROOT / "packages" / package.replace("_", "-") / "src" / package
    files = {path.relative_to(source).with_suffix("").parts: path for path in source.rglob("*.py")}
    del files[("__init__",)]
    line_of: dict[tuple[str, ...], int] = {}
    for folder, lines in blocks(package).items():
        names = [name for line in lines for name in line]
        below = {parts[1] for parts in files if len(parts) == 2 and parts[0] == folder} - {"__init__"}
        assert set(names) == (below if folder else {parts[0] for parts in files}) and len(names) == len(set(names))
        line_of |= {((folder,) if folder else ()) + (name,): at for at, line in enumerate(lines) for name in line}
        if folder:
            line_of[(folder, "__init__")] = -1  # above its files
    assert {parts for parts in files if len(parts) == 2} <= set(line_of)
    upwards = []
    for parts, path in files.items():
        for names in imported(path, parts[:-1], package):
            other = module_of(names, set(files))
            if other is None or other == parts:
                continue
            depth = 2 if parts[0] == other[0] and len(parts) == len(other) == 2 else 1
            if line_of[other[:depth]] <= line_of[parts[:depth]]:
                upwards.append(f"{'/'.join(parts)} imports {'/'.join(other)}")
    assert not upwards


def test_what_zero_offload_takes_from_zero_core_goes_through_one_module():
    source = ROOT / "packages" / "zero-offload" / "src" / "zero_offload"
    taking = (
        path for path in source.rglob("*.py") if re.search(r"^\s*(from|import) zero_core\b", path.read_text(), re.M)
    )
    assert {path.name for path in taking} == {"core.py"}
