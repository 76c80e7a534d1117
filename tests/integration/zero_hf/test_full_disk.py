"""A disk that is full while a Trainer saves, and what resuming from there does. The disk is a small tmpfs."""

import os
import re
import subprocess

import pytest

import zero_hf
from tests.integration.zero_hf.trainers import Sharded, train
from zero_core import ZeroError

pytestmark = pytest.mark.promise("trainer-full-disk")

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
FULL = "0 bytes are free|No space left"


@pytest.fixture
def small(tmp_path):
    """Returns a function that gives a folder on a filesystem of so many KiB; called again, it changes the size."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small filesystem needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = []

    def of(kib):
        how = f"remount,size={kib}k" if mounted else f"size={kib}k"
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", how, "tmpfs", folder], capture_output=True)
        if made.returncode != 0:
            pytest.skip(f"cannot mount here: {made.stderr.decode().strip()}")
        mounted.append(kib)
        return folder

    yield of
    if mounted:
        subprocess.run(["umount", "-l", folder], check=True)


def test_after_a_full_disk_in_a_later_checkpoint_it_goes_on_from_the_one_before(small, tmp_path):
    _, whole = train(Sharded, tmp_path / "whole", **SAVING)
    pages = sum(-(-file.stat().st_size // 4096) for file in (tmp_path / "whole" / "checkpoint-2").rglob("*"))
    folder = small(6 * pages)  # one and a half of them
    with pytest.raises(ZeroError, match=FULL):
        train(Sharded, folder / "run", **SAVING)
    small(10_000)
    with pytest.raises(zero_hf.ConfigError, match="checkpoint-4 has no trainer_state.json") as refused:
        train(Sharded, folder / "run", resume=str(folder / "run" / "checkpoint-4"), **SAVING)
    named = re.search(r"Delete this folder, and resume from (\S+), which is complete", str(refused.value)).group(1)
    for given in (named, True):
        _, later = train(Sharded, folder / "run", resume=given, save_strategy="no", max_steps=6)
        assert later.losses == whole.losses[2:]
