"""Draws mutants: one small change each, in the functions of an area. The same source gives the same mutants.

A change of Python removes a statement, negates a condition, moves a bound, or exchanges an operator or a number. One
of C++ does the same to a line. cosmic-ray and mutmut were tried (8.7.0, 3.8.1): neither removes statements, the first
changes annotations, and the second sees no test that runs in another process.
"""

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["AREAS", "Mutant", "draw"]

SEED = "60"
AREAS: dict[str, tuple[int, tuple[str, ...]]] = {  # number of mutants, and the folders or files below packages/*/src
    "hook to disk": (
        54,
        (
            *("zero_core/hooks", "zero_core/unit_memory", "zero_core/tensors", "zero_offload/store"),
            *("zero_offload/tiles/parameters.py", "zero_offload/memory", "zero_nvme/io", "zero_nvme/slab.py"),
            *("zero_nvme/buffers.py", "zero_nvme/extents.py"),
        ),
    ),
    "gradient to disk": (
        54,
        (
            *("zero_core/gradients", "zero_core/optim", "zero_offload/tiles", "zero_offload/update_thread"),
            *("zero_offload/uncut_step.py", "zero_offload/device_link.py", "zero_optim_cpu"),
        ),
    ),
    "collectives": (40, ("zero_core/comm",)),
    "checkpoints": (45, ("zero_core/checkpoint", "zero_offload/durable")),
    "planner": (45, ("zero_offload/planning", "zero_offload/layout", "zero_core/estimate")),
    "Trainer": (45, ("zero_hf/trainer", "zero_hf/sharding.py", "zero_hf/pretrained.py")),
    "C++": (30, ("zero-nvme/cpp", "zero-optim-cpu/cpp")),
}
SUFFIXES = (".py", ".cpp", ".hpp")
NOT_DRAWN = ("selftest.cpp", "vec_neon.hpp", "isa_neon.cpp", "roofline_body.hpp", "uring_abi.hpp")
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "*"}
BOUNDS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
CPP = (  # what is found in a line of C++, and what takes its place
    *((re.compile(rf" {re.escape(a)} "), f" {b} ") for a, b in (("<", "<="), (">", ">="), ("==", "!="), ("!=", "=="))),
    *((re.compile(rf" {re.escape(a)} "), f" {b} ") for a, b in (("+", "-"), ("-", "+"), ("&&", "||"), ("||", "&&"))),
    *((re.compile(rf" {re.escape(a)} "), f" {b} ") for a, b in (("<=", "<"), (">=", ">"), ("*", "+"))),
    (re.compile(r"^( +)[\w.:>-]+\([^;{}]*\);$"), r"\1;"),
    (re.compile(r"^( +)[\w.>\[\]-]+ [+-]?= [^;{}]*;$"), r"\1;"),
)


@dataclass(frozen=True)
class Mutant:
    """A change: characters `start` to `end` of the file at `path`, below the repository, become `after`."""

    area: str
    path: str
    function: str
    line: int
    start: int
    end: int
    before: str
    after: str
    key: str

    @property
    def change(self) -> str:
        return " ".join(f"{self.before} → {self.after}".split())

    def apply(self, text: str) -> str:
        return text[: self.start] + self.after + text[self.end :]


class _Changes(ast.NodeVisitor):
    """Collects (function, start, end, after) of a module; messages, annotations and `__repr__` stay as they are."""

    def __init__(self, text: str) -> None:
        self._lines = [0]
        for line in text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._text, self._within = text, [""]
        self.found: list[tuple[str, int, int, str]] = []

    def _at(self, line: int, byte: int) -> int:
        start = self._lines[line - 1]
        return start + len(self._text[start : self._lines[line]].encode()[:byte].decode())

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _change(self, node: ast.expr | ast.stmt, after: str) -> None:
        if self._within[-1]:
            self.found.append((self._within[-1], *self._span(node), after))

    def _between(self, left: ast.expr, right: ast.expr, after: str) -> None:
        start, end = self._span(left)[1], self._span(right)[0]
        operator = self._text[start:end]
        if self._within[-1] and not set(operator) & set("()#\n"):
            self.found.append((self._within[-1], start, end, f" {after} "))

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        if node.name in ("__repr__", "__str__"):
            return
        outer = self._within[-1]
        if isinstance(node, ast.ClassDef):
            prefix = f"{outer}.{node.name}"
            for child in node.body:
                if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    self._within.append(prefix)
                    self._function(child)
                    self._within.pop()
            return
        self._within.append(f"{outer}.{node.name}".lstrip("."))
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        for child in node.body:
            self.visit(child)
        self._within.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _function  # type: ignore[assignment]

    def visit_Raise(self, node: ast.Raise) -> None:
        self._change(node, "pass")

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, (ast.Call, ast.Await)):
            self._change(node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets):
            self._change(node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._change(node, "pass")
        self.visit(node.value)

    def _condition(self, node: ast.If | ast.While | ast.IfExp) -> None:
        start, end = self._span(node.test)
        if not self._text[start:end].endswith("TYPE_CHECKING"):
            self._change(node.test, f"(not ({self._text[start:end]}))")
        self.generic_visit(node)

    visit_If = visit_While = visit_IfExp = _condition  # type: ignore[assignment]

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1 and (after := BOUNDS.get(type(node.ops[0]))):
            self._between(node.left, node.comparators[0], after)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._between(node.values[0], node.values[1], "or" if isinstance(node.op, ast.And) else "and")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if after := ARITHMETIC.get(type(node.op)):
            self._between(node.left, node.right, after)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, (bool, int)):
            self._change(node, str(not node.value) if isinstance(node.value, bool) else str(node.value + 1))


def _python(text: str) -> Iterator[tuple[str, int, int, str]]:
    changes = _Changes(text)
    for statement in ast.parse(text).body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            changes.visit(statement)
    yield from changes.found


def _cpp(text: str) -> Iterator[tuple[str, int, int, str]]:
    start = 0
    for line in text.splitlines(keepends=True):
        code, bare = line.split("//")[0].rstrip("\n"), line.strip()
        if code.strip() and not bare.startswith(("#", "*", "/*", "template", "//", "using")) and '"' not in code:
            for pattern, after in CPP:
                for match in pattern.finditer(code):
                    yield "", start + match.start(), start + match.end(), match.expand(after)
        start += len(line)


def _of_file(area: str, root: Path, path: Path) -> Iterator[Mutant]:
    text, name = path.read_text(encoding="utf-8"), str(path.relative_to(root))
    seen: dict[str, int] = {}
    for function, start, end, after in (_python if path.suffix == ".py" else _cpp)(text):
        before = text[start:end]
        about = f"{SEED} {name} {function} {before} {after}"
        seen[about] = seen.get(about, 0) + 1
        key = hashlib.sha256(f"{about} {seen[about]}".encode()).hexdigest()[:10]
        yield Mutant(area, name, function, text.count("\n", 0, start) + 1, start, end, before, after, key)


def draw(root: Path) -> list[Mutant]:
    """The mutants of each area: those whose keys, which are hashes, come first. An edit elsewhere changes none."""
    drawn: dict[str, Mutant] = {}
    for area, (number, places) in AREAS.items():
        files: set[Path] = set()
        for place in places:
            found = [*root.glob(f"packages/*/src/{place}"), *root.glob(f"packages/{place}")]
            assert found, f"{place}: no such folder or file"
            files.update(file for each in found for file in [each, *each.rglob("*")] if file.suffix in SUFFIXES)
        mutants = [
            mutant for file in sorted(files) if file.name not in NOT_DRAWN for mutant in _of_file(area, root, file)
        ]
        new = sorted((mutant for mutant in mutants if mutant.key not in drawn), key=lambda mutant: mutant.key)
        drawn |= {mutant.key: mutant for mutant in new[:number]}
    return list(drawn.values())
