"""Counts lines of code and mutable fields: `python scripts/count.py [FOLDER] [--fields]`, FOLDER being a checkout.

A line of code has something on it other than a comment or a docstring. A field is mutable if code outside of
`__init__`, `__new__` and `__post_init__` assigns it, deletes it, or writes into the container that it holds. Fields are
told apart by class and name. A write through another object (`unit.users += 1`) counts for every class that declares
the name and is not frozen, because nothing is imported and no types are known; but not if the class is in another
package and the writer's package imports no sibling, nor if the object is the `ctx` that autograd hands to a function.
A method such as `update` or `clear` writes into a field that begins as a dict, list, set or the like, and into no
other. A module's global that a function rebinds or writes into counts as a field of the module.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

BUILDERS = {"__init__", "__new__", "__post_init__"}
WRITERS = {
    *("append", "appendleft", "add", "insert", "extend", "update", "setdefault", "subtract"),
    *("pop", "popleft", "popitem", "remove", "discard", "clear", "move_to_end", "sort", "reverse"),
}
CONTAINERS = {
    *("list", "dict", "set", "deque", "Counter", "defaultdict", "OrderedDict", "WeakSet", "bytearray"),
    *("WeakValueDictionary", "WeakKeyDictionary", "WeakTensorKeyDictionary", "WeakIdKeyDictionary"),
}
ALONE = ("zero_nvme", "zero_optim_cpu", "zero_sim")  # import no sibling, as the contracts in pyproject.toml have it
# From a module's hook to the disk and back, and from a gradient to the disk: what runs in every step. Not what runs the
# same in sizes, for a plan.
BESIDE = ("zero_core/estimate/pool_simulation.py",)
MAIN_PATH = (
    "zero_core/comm/ranks.py",
    "zero_core/gradients",
    "zero_core/hooks",
    "zero_core/pool.py",
    "zero_core/tensors",
    "zero_core/unit_memory",
    "zero_offload/device_link",
    "zero_offload/durable",
    "zero_offload/layout",
    "zero_offload/memory/arena.py",
    "zero_offload/memory/slots.py",
    "zero_offload/memory/transfers.py",
    "zero_offload/monitor.py",
    "zero_offload/store/attached_store.py",
    "zero_offload/store/paths.py",
    "zero_offload/store/tiered_store.py",
    "zero_offload/streams.py",
    "zero_offload/tier.py",
    "zero_offload/tiles",
    "zero_offload/update_thread",
)


def code_lines(text: str) -> int:
    """Lines with a token that is neither a comment nor part of a docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def holds_container(value: ast.AST | None) -> bool:
    """Whether an annotation or a first value says that it is a container."""
    if isinstance(value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)):
        return True
    if isinstance(value, ast.BinOp):
        return holds_container(value.left)
    named = value.func if isinstance(value, ast.Call) else value
    named = named.value if isinstance(named, ast.Subscript) else named
    name = named.attr if isinstance(named, ast.Attribute) else named.id if isinstance(named, ast.Name) else ""
    if name == "field" and isinstance(value, ast.Call):
        return any(keyword.arg == "default_factory" for keyword in value.keywords)
    return name in CONTAINERS


def written(node: ast.AST) -> Iterator[ast.expr]:
    """Expressions that a statement rebinds, deletes or writes into: `x.a` of `x.a = 1`, `x.a[k] = 1`."""
    targets: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        targets = list(node.targets)
    elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.AnnAssign) and node.value is not None):
        targets = [node.target]
    elif isinstance(node, (ast.For, ast.AsyncFor)):
        targets = [node.target]
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        targets = [node.optional_vars]
    while targets:
        target = targets.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            targets += target.elts
        elif isinstance(target, ast.Starred):
            targets.append(target.value)
        elif isinstance(target, (ast.Attribute, ast.Name)):
            yield target
        elif isinstance(target, ast.Subscript):
            value: ast.expr = target.value
            while isinstance(value, ast.Subscript):
                value = value.value
            yield value


class Fields(ast.NodeVisitor):
    """What one module declares, and what it writes."""

    def __init__(self, module: str, tree: ast.Module) -> None:
        self.module = module
        self.declared: dict[str, set[str]] = defaultdict(set)  # class: names of its fields
        self.by_self: set[tuple[str, str]] = set()  # (class, name) written through self outside of a builder
        self.containers: dict[str, set[str]] = defaultdict(set)  # class: those that begin as containers
        self.frozen: set[str] = set()
        self.by_others: set[str] = set()  # names rebound through another object
        self.into_others: set[str] = set()  # names whose container is written into through another object
        self.globals: set[str] = set()
        self._names = {
            name.id
            for statement in tree.body
            if isinstance(statement, (ast.Assign, ast.AnnAssign))
            for name in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
            if isinstance(name, ast.Name)
        }
        self._class: list[str] = []
        self._functions: list[str] = []
        self._rebound: list[set[str]] = []
        self._local: list[set[str]] = []
        self.visit(tree)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if self._functions:
            return self.generic_visit(node)
        self._class.append(node.name)
        if any("frozen=True" in ast.unparse(decorator) for decorator in node.decorator_list):
            self.frozen.add(node.name)
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                self.declared[node.name].add(statement.target.id)
                if holds_container(statement.annotation):
                    self.containers[node.name].add(statement.target.id)
            built = isinstance(statement, ast.FunctionDef) and statement.name in BUILDERS
            for inner in ast.walk(statement) if built else ():
                if isinstance(inner, (ast.Assign, ast.AnnAssign)):
                    self._note_first(inner)
        for statement in node.body:
            self.visit(statement)
        self._class.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._functions.append(node.name)
        self._rebound.append({n for s in ast.walk(node) if isinstance(s, ast.Global) for n in s.names})
        self._local.append({a.arg for a in [*node.args.args, *node.args.kwonlyargs, *node.args.posonlyargs]})
        self._local[-1] |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        for statement in node.body:
            self.visit(statement)
        self._functions.pop()
        self._rebound.pop()
        self._local.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def _note_first(self, statement: ast.Assign | ast.AnnAssign) -> None:
        """What a constructor gives the fields of `self`."""
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        annotation = statement.annotation if isinstance(statement, ast.AnnAssign) else None
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self":
                    self.declared[self._class[-1]].add(each.attr)
                    if holds_container(statement.value) or holds_container(annotation):
                        self.containers[self._class[-1]].add(each.attr)

    def generic_visit(self, node: ast.AST) -> None:
        if self._functions:
            for target in written(node):
                self._note(target)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WRITERS:
                self._note(node.func.value, into=True)
        super().generic_visit(node)

    def _note(self, target: ast.expr, *, into: bool = False) -> None:
        while isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, ast.Attribute):
            through = target.value.id if isinstance(target.value, ast.Name) else ""
            of_self = through == "self" and bool(self._class)
            if through == "ctx":
                return
            if not of_self:
                (self.into_others if into else self.by_others).add(target.attr)
            elif self._functions[0] not in BUILDERS:
                self.declared[self._class[-1]].add(target.attr)
                if not into or target.attr in self.containers[self._class[-1]]:
                    self.by_self.add((self._class[-1], target.attr))
        elif isinstance(target, ast.Name) and target.id in self._names:
            if target.id in self._rebound[-1] or target.id not in self._local[-1]:
                self.globals.add(target.id)


def modules(root: Path) -> dict[str, str]:
    """Text of each module of the packages, by its path under `src`."""
    found = sorted(root.glob("packages/*/src/**/*.py"))
    return {path.as_posix().split("/src/", 1)[1]: path.read_text() for path in found}


def shared_package(one: str, other: str) -> bool:
    return one.split("/")[0] == other.split("/")[0]


def mutable_fields(texts: dict[str, str]) -> dict[str, set[str]]:
    """Class or module: its mutable fields. Writes are looked for in all packages."""
    found = {name: Fields(name, ast.parse(text)) for name, text in texts.items()}
    result: dict[str, set[str]] = {}
    for name, fields in found.items():
        writers = [each for of, each in found.items() if not of.startswith(ALONE) or shared_package(of, name)]
        rebound = {written for each in writers for written in each.by_others}
        into = {written for each in writers for written in each.into_others}
        for owner, declared in fields.declared.items():
            of_self = {field for kind, field in fields.by_self if kind == owner}
            mutable = of_self | (set() if owner in fields.frozen else declared & rebound)
            mutable |= fields.containers[owner] & into
            if mutable:
                result[f"{name}:{owner}"] = mutable
        if fields.globals:
            result[f"{name}:(module)"] = fields.globals
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--fields", action="store_true", help="name each mutable field")
    given = parser.parse_args()
    texts = modules(given.folder)
    lines: Counter[str] = Counter()
    for name, text in texts.items():
        lines[name.split("/")[0]] += code_lines(text)
    for package, count in sorted(lines.items()):
        print(f"{package:<16}{count:>8,} lines of code")
    print(f"{'in all':<16}{sum(lines.values()):>8,}")
    everywhere = mutable_fields(texts)
    fields = {of: names for of, names in everywhere.items() if of.startswith(MAIN_PATH) and not of.startswith(BESIDE)}
    most = sorted(fields, key=lambda owner: -len(fields[owner]))
    for package in ("zero_core", "zero_offload"):  # what leaves the main path for another module is seen here
        count = sum(len(names) for of, names in everywhere.items() if of.startswith(package))
        print(f"{package:<16}{count:>8,} mutable fields")
    print(f"{'main path':<16}{sum(map(len, fields.values())):>8,} mutable fields on {len(fields)} classes and modules")
    for owner in most if given.fields else most[:5]:
        print(f"  {len(fields[owner]):>3}  {owner}" + (f": {', '.join(sorted(fields[owner]))}" if given.fields else ""))


if __name__ == "__main__":
    main()
