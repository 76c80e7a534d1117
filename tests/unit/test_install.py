"""docs/install.md names every package and what has to be installed with it, as each pyproject.toml says."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
PROJECTS = {path.parent.name: path.read_text(encoding="utf-8") for path in ROOT.glob("packages/*/pyproject.toml")}
NOXFILE = (ROOT / "noxfile.py").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| (zero-[a-z-]+).*? \| `([a-z,-]+)` \|$", PAGE, re.MULTILINE))


def together(package: str) -> set[str]:
    """The package and each of ours that it requires, or that it has an extra for, and what these require."""
    found: set[str] = set()
    waiting = {package}
    while waiting:
        found |= waiting
        asked = {name for each in waiting for name in re.findall(r'"(zero-[a-z-]+)[\[><=]', PROJECTS[each])}
        waiting = asked - found
    return found


@pytest.mark.promise("install-page")
@pytest.mark.parametrize("package", sorted(PROJECTS))
def test_the_braces_name_what_the_package_needs_of_ours(package):
    # A requirement that is not in the line would be looked for in a registry that does not have it.
    assert {f"zero-{name}" for name in ROWS[package].split(",")} == together(package)


@pytest.mark.promise("install-page")
def test_the_line_for_everything_is_that_of_zero_train():
    lines = re.findall(r'^\$ pip install "git\+https://HOST/REPOSITORY#(.*)"\{(.*)\}$', PAGE, re.MULTILINE)
    assert lines == [("subdirectory=packages/zero-", ROWS["zero-train"])]


def test_its_versions_extras_and_packages_are_those_of_the_projects():
    pythons = {name: re.findall('requires-python = ">=(.*)"', project) for name, project in PROJECTS.items()}
    assert pythons == {name: ["3.11" if name == "zero-hf" else "3.10"] for name in PROJECTS}
    assert "| Python | 3.11 or later; 3.10 without zero-hf," in PAGE
    assert "| torch | 2.8 or later, for zero-sim 2.9;" in PAGE
    named = re.findall(r"(zero-[a-z-]+)\[([\w,]+)\]", PAGE)
    assert named
    for package, extras in named:
        assert all(re.search(rf"^{extra} = \[", PROJECTS[package], re.MULTILINE) for extra in extras.split(","))
    first, *_, last = re.findall(r"[\d.]+", re.findall(r"^WHEELS_FOR = \((.*?)\)", NOXFILE, re.MULTILINE)[0])
    assert f"from\n{first} to {last} whose command" in PAGE
    (line,) = re.findall(r"^\$ pip uninstall (.*)$", PAGE, re.MULTILINE)
    assert sorted(line.split()) == sorted(PROJECTS)


def test_the_oldest_versions_are_those_of_the_projects_and_of_minimums():
    """What builds and tests need has no row."""
    lines = [line for text in PROJECTS.values() for line in text.splitlines() if not re.match("test|requires", line)]
    asked = {found for line in lines for found in re.findall(r'"((?!zero-)[a-z-]+)>=([\d.]+)', line)}
    rows = re.findall(r"^\| ([a-z, -]+) \| ([\d.]+)(.*?) \|", PAGE, re.MULTILINE)
    shown = {(name, low): rest for names, low, rest in rows for name in names.split(", ")}
    assert asked == {*shown, ("torch", "2.9")}  # zero-sim's, which `minimums` leaves out
    for (name, low), rest in shown.items():
        assert "untried" in rest or re.search(rf'"{name}=={re.escape(low)}(\.\d+)*"', NOXFILE), name
