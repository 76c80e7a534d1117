"""docs/compared_with_fsdp2.md leads to code: our functions exist, and FSDP2's are at the lines that it gives."""

import re
from pathlib import Path

import pytest

from .test_one_tile import ROOT, named, source_of

PAGE = ROOT / "docs" / "compared_with_fsdp2.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_each_link_to_code_leads_to_the_function_that_it_names() -> None:
    links = re.findall(r"\[`([\w.]+)`\]\((\S+\.py)\)", TEXT)
    assert len(links) > 20
    for name, link in links:
        source_of((PAGE.parent / link).resolve(), name)


def test_the_lines_of_fsdp2_are_those_of_the_torch_that_the_page_names() -> None:
    torch = pytest.importorskip("torch")
    if torch.__version__.partition("+")[0] != "2.13.0":
        pytest.skip("the page gives lines of torch 2.13.0")
    folder = Path(torch.__file__).parent / "distributed/fsdp/_fully_shard"
    given = re.findall(r"`([\w.]+)` \(`(\w+\.py)`:(\d+)\)", TEXT)
    assert len(given) > 20
    for name, file, line in given:
        assert named(folder / file, name).lineno == int(line), f"{name} is not at {file}:{line}"
