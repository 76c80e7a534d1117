"""Which transformers zero-hf runs with, and what it says of others."""

from pathlib import Path

import pytest

import zero_hf

PROJECT = Path(__file__).parents[3] / "packages" / "zero-hf" / "pyproject.toml"


def test_the_versions_that_are_checked_are_those_that_are_required() -> None:
    assert '"transformers>=5.23,<6"' in PROJECT.read_text()


@pytest.mark.promise("hf-versions")
@pytest.mark.parametrize(
    ("version", "fits"), [("5.22.2", False), ("4.57.6", False), ("6.0.0", False), ("5.24.0", True)]
)
def test_another_transformers_is_named_with_what_to_install(monkeypatch, version: str, fits: bool) -> None:
    monkeypatch.setattr(zero_hf.metadata, "version", lambda name: version)
    monkeypatch.delitem(vars(zero_hf), "ZeroConfig", raising=False)
    if fits:
        assert zero_hf.ZeroConfig
        return
    with pytest.raises(ImportError, match=f"needs transformers>=5.23,<6, and {version} is installed: pip install 'tr"):
        _ = zero_hf.ZeroConfig
