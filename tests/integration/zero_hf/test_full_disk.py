"""A disk that is full while a Trainer saves, and what resuming from there does. The disk is a small ext4."""

import os
import re

import pytest

import zero_hf
from tests.integration.zero_hf.trainers import Sharded, train
from tests.integration.zero_nvme.faults import small_ext4
from zero_core import ZeroError

pytestmark = pytest.mark.promise("trainer-full-disk")

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
FULL = "0 bytes are free|No space left"


def test_after_a_full_disk_in_a_later_checkpoint_it_goes_on_from_the_one_before(tmp_path):
    _, whole = train(Sharded, tmp_path / "whole", **SAVING)
    pages = sum(-(-file.stat().st_size // 4096) for file in (tmp_path / "whole" / "checkpoint-2").rglob("*"))
    with small_ext4(tmp_path, 32 << 20) as folder:
        room = 6144 * pages  # one and a half of them
        (folder / "others").write_bytes(bytes(os.statvfs(folder).f_bavail * 4096 - room))
        with pytest.raises(ZeroError, match=FULL):
            train(Sharded, folder / "run", **SAVING)
        (folder / "others").unlink()
        with pytest.raises(zero_hf.ConfigError, match="checkpoint-4 has no trainer_state.json") as refused:
            train(Sharded, folder / "run", resume=str(folder / "run" / "checkpoint-4"), **SAVING)
        named = re.search(r"Delete this folder, and resume from (\S+), which is complete", str(refused.value)).group(1)
        for given in (named, True):
            _, later = train(Sharded, folder / "run", resume=given, save_strategy="no", max_steps=6)
            assert later.losses == whole.losses[2:]
