"""Every public name has a docstring, and the examples in docstrings run.

Public is what a module of MODULES exports, and the public methods and properties of its classes. A method that fills a
protocol of ours is documented in the protocol, and what overrides a method of a base class in that class. The methods
of conformance suites say what they check by their names.
"""

import doctest
import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.promise("docstrings")

MODULES = {
    "zero_core": ("", "checkpoint", "comm", "layout", "memory", "precision", "store", "testing"),
    "zero_offload": ("", "protocols", "streams", "testing"),
    "zero_nvme": ("",),
    "zero_optim_cpu": ("", "cores"),
    "zero_deepspeed": ("", "checkpoint"),
    "zero_hf": ("",),
    "zero_train": ("", "schema"),
}
EXAMPLES = {  # modules whose docstrings have examples
    "zero_core": ("api.full_values", "layout", "memory", "api.shard"),
    "zero_offload": ("memory_store", "layout.tile", "planning.planner", "store.tiered_store"),
    "zero_nvme": ("buffers", "file", "slab"),
    "zero_optim_cpu": ("algorithms",),
    "zero_hf": ("config",),
}


def modules(package: str, names: tuple[str, ...]) -> list[ModuleType]:
    pytest.importorskip(package)
    return [importlib.import_module(f"{package}.{name}" if name else package) for name in names]


def exported(module: ModuleType) -> dict[str, Any]:
    names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    found = {name: getattr(module, name) for name in names}
    kept = {name: value for name, value in found.items() if inspect.isclass(value) or inspect.isroutine(value)}
    return {name: value for name, value in kept.items() if (value.__module__ or "").startswith("zero_")}


def members(owner: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that our packages define, with those of base classes of ours."""
    for base in owner.__mro__:
        if base.__module__.startswith("zero_"):
            for name, value in vars(base).items():
                function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                hidden = name.startswith(("_", "test_"))
                if inspect.isfunction(function) and not hidden and function.__name__ != "<lambda>":
                    yield name, getattr(owner, name) if not isinstance(value, property) else value


def protocol_methods() -> set[str]:
    """The names of methods that protocols of ours describe."""
    found = (pair for package, names in MODULES.items() for pair in all_of(package, names))
    return {name for _, value in found if getattr(value, "_is_protocol", False) for name in vars(value)}


def all_of(package: str, names: tuple[str, ...]) -> list[tuple[str, Any]]:
    return [pair for module in modules(package, names) for pair in exported(module).items()]


@pytest.mark.parametrize("package", MODULES)
def test_every_public_name_has_a_docstring(package: str) -> None:
    assert all(module.__doc__ for module in modules(package, MODULES[package]))
    elsewhere, lacking, seen = protocol_methods(), set(), 0
    for name, value in all_of(package, MODULES[package]):
        generated = inspect.isclass(value) and (value.__doc__ or "").startswith(f"{value.__name__}(")  # by dataclass
        seen += 1
        if not value.__doc__ or generated:
            lacking.add(name)
        for member, function in members(value) if inspect.isclass(value) else ():
            described = member in elsewhere and not getattr(value, "_is_protocol", False)
            if not described and not inspect.getdoc(function):
                lacking.add(f"{name}.{member}")
    assert not lacking and seen > 0, sorted(lacking)


@pytest.mark.parametrize("package", EXAMPLES)
def test_examples_in_docstrings_run(package: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for module in modules(package, EXAMPLES[package]):
        done = doctest.testmod(module)
        assert done.failed == 0 and done.attempted > 0, module.__name__
