"""Fixtures of the tests of fine-tuning, for which TRL is installed."""

import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A folder with a model of 0.1 M parameters and a tokenizer of bytes, whose chat template marks no answers."""
    import torch

    from examples.sft import tiny

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    for part in tiny():
        part.save_pretrained(folder)
    return folder


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Nothing is found that another test has converted, and accelerate begins anew."""
    from accelerate.state import AcceleratorState, GradientState

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
