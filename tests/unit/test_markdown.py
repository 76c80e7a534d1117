"""The Markdown that people read: its lines are short, its links lead somewhere, and its glossary stays small."""

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "packages/*/README.md", "packages/*/CHANGELOG.md")
    for path in ROOT.glob(pattern)
)


def anchors(text: str) -> set[str]:
    """Returns what GitHub calls the headings of a page in links."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.promise("links")
@pytest.mark.parametrize("page", PAGES)
def test_lines_are_short_links_lead_somewhere_and_pictures_have_words(page):
    """A hand-drawn picture also says in itself what it shows, and has colours for the dark mode."""
    text = (ROOT / page).read_text(encoding="utf-8")
    # Rows of tables are exempt: Markdown cannot break them.
    assert not [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")]
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page} links to {target}"
        assert not anchor or anchor in anchors(path.read_text(encoding="utf-8")), f"{page} links to {target}"
    for words, target in re.findall(r"!\[([^\]]*)\]\(([^)\s]+)\)", text):
        assert len(words.split()) >= 5, f"{page} shows {target} without saying what is to be seen"
        if target.endswith(".svg"):
            drawn = ((ROOT / page).parent / target).read_text(encoding="utf-8")
            assert all(part in drawn for part in ("<title", "<desc", "prefers-color-scheme: dark"))


def test_the_root_readme_fits_on_a_screen_and_a_half():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 75


def test_the_glossary_has_at_most_25_words_each_explained_once():
    words = re.findall(r"^- \*\*(.+?)\*\*", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert 15 <= len(words) == len(set(words)) <= 25


@pytest.mark.parametrize("page", ["README.md", "packages/zero-nvme/README.md", "packages/zero-optim-cpu/README.md"])
def test_the_program_in_a_readme_runs(page, tmp_path, monkeypatch):
    for needed in ("transformers", "zero_nvme", "zero_optim_cpu", "zero_offload", "numpy"):
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    program = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(program, names)
    if "nvme" in page:
        assert (tmp_path / "arrays.bin").stat().st_size == 16 << 23
    elif "optim" in page:
        states = list(names["optimizer"].state.values())
        assert len(states) == 2 and all(each["step"] == 1 and each["exp_avg"].count_nonzero() > 0 for each in states)
    else:
        assert len([line for line in program.splitlines() if line]) <= 10
        assert names["optimizer"].grad_norm > 0
        names["optimizer"].close()
        names["tiers"]["nvme"].close()
