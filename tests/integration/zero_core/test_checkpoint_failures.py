"""Faults during a collective save or load: every rank learns of them, and the folder keeps what it had."""

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests import kit
from tests.integration.zero_core import checkpoint_runs as runs
from tests.integration.zero_core import toys
from zero_core import checkpoint
from zero_core.errors import CheckpointError


@kit.on_ranks(2)
def test_a_rank_that_cannot_write_fails_the_save_on_all(tmp_path: Path) -> None:
    model, optimizer = runs.make("llama", 3, seed=0)
    checkpoint.save(tmp_path, model, optimizer, extra="first")
    full = mock.patch("torch.save", side_effect=OSError(28, "No space left on device"))
    with full if runs.world()[0] == 1 else nullcontext(), pytest.raises(CheckpointError) as told:
        checkpoint.save(tmp_path, model, optimizer, extra="second")
    assert "__1_" in str(told.value) and "No space left on device" in str(told.value)
    assert checkpoint.load(tmp_path, model, optimizer).extra == "first"
    optimizer.close()


def stack() -> tuple[nn.Module, Any]:
    """A sharded model that is built in no time, for processes which live shortly."""
    return kit.sharded(toys.Stack, toys.adamw, stage=3)


@kit.on_ranks(2)
def test_a_file_cut_short_fails_the_load_on_all(tmp_path: Path) -> None:
    model, optimizer = stack()
    checkpoint.save(tmp_path, model, optimizer)
    path = max(tmp_path.glob("__1_*.distcp"))
    torch.distributed.barrier()
    if kit.world()[0] == 0:
        os.truncate(path, path.stat().st_size - 1)
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match=f"{path.name} is cut short"):
        checkpoint.load(tmp_path, model, optimizer)
    optimizer.close()


SAVE_FOR_EVER = """
import sys
from tests.integration.zero_core.test_checkpoint_failures import stack
from zero_core import checkpoint
model, optimizer = stack()
for count in range(1, 1 << 30):
    checkpoint.save(sys.argv[1], model, optimizer, extra=count, tile_numel=200)
    print(count, flush=True)
"""


@pytest.mark.promise("checkpoint-complete")
def test_kill_9_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """The killed save is the one after the last that was reported, or that one had been renamed already."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])}
    program = [sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path)]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, env=environment, start_new_session=True)
    try:
        assert process.stdout is not None
        reported = int(process.stdout.readline() or 0)
        assert reported == 1
        time.sleep(0.03)  # where in the next save it dies does not matter to what must hold
    finally:
        process.send_signal(signal.SIGKILL)
        rest = process.communicate()[0].split()
    reported = int(rest[-1]) if rest else reported
    model, optimizer = stack()
    extra = checkpoint.load(tmp_path, model, optimizer).extra
    assert extra in (reported, reported + 1)
    checkpoint.save(tmp_path, model, optimizer)
    assert len(list(tmp_path.glob("*.distcp"))) == 1
    optimizer.close()


@pytest.mark.promise("checkpoint-shared-folder")
@kit.on_ranks(2)
def test_a_folder_that_machines_do_not_share_is_told_when_it_is_saved(tmp_path: Path) -> None:
    """Fails if each machine keeps a part of a checkpoint that calls itself complete."""
    model, optimizer = stack()
    checkpoint.save(tmp_path, model, optimizer, extra="first")
    own = tmp_path / f"machine{kit.world()[0]}"
    with pytest.raises(CheckpointError, match=r"is not one folder for all ranks: 1 of 2 files .* all machines share"):
        checkpoint.save(own, model, optimizer)
    assert not (own / checkpoint.files.MANIFEST).exists()
    checkpoint.save(tmp_path, model, optimizer, extra="second")
    assert checkpoint.load(tmp_path, model, optimizer).extra == "second"
    optimizer.close()
