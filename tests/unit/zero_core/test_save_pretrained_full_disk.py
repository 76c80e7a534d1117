"""`save_pretrained` on a disk that is full."""

import errno
import os

import pytest
import torch

import zero_core
from zero_core.errors import PretrainedError


@pytest.mark.advice("make room, or name another folder")
@pytest.mark.promise("save-full-disk")
def test_a_full_disk_is_told_with_figures_and_leaves_what_was_there(tmp_path, monkeypatch):
    """Fails if a half-written file stays, or if an earlier save is lost."""
    model = torch.nn.Linear(64, 64)
    zero_core.save_pretrained(model, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(PretrainedError, match=r"No space left.* take 16,640 bytes, where [\d,]+ bytes are free"):
        zero_core.save_pretrained(model, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
