"""A real filesystem on a loop device that fills up or loses blocks under a run.

Fails if what is preallocated is hit by a full disk, if activations that find no room take the states with them, or if a
lost block is trained on.
"""

import contextlib
import os
import re

import pytest

import zero_core
import zero_nvme
import zero_offload
from tests.integration.zero_nvme.faults import small_ext4
from tests.integration.zero_train.helpers import after_step, trained
from tests.integration.zero_train.test_faults import advance, sharded
from zero_train.errors import RunError

MIB = 1 << 20


def fill(folder):
    """Leave no free block in the filesystem."""
    with open(folder / "full", "wb", buffering=0) as file:
        for block in (MIB, 4096):
            try:
                while True:
                    file.write(bytes(block))
            except OSError as error:
                assert error.errno == 28
        os.fsync(file.fileno())


@contextlib.contextmanager
def closing(folder):
    """A model with everything in a slab in `folder`, whatever happens closed before its filesystem goes."""
    with zero_nvme.Slab([str(folder)]) as slab:
        model, store, optimizer = sharded(folder, 256, slab)
        try:
            yield model, store, optimizer
        finally:
            optimizer.close()


@pytest.mark.promise("full-activations")
def test_activations_that_find_no_room_stop_the_forward_and_leave_the_states(tmp_path):
    with small_ext4(tmp_path, 64 * MIB) as mount:
        with closing(mount) as (model, store, optimizer):
            plain = [advance(model, optimizer, n) for n in range(4)]
        with (
            closing(mount) as (model, store, optimizer),
            zero_offload.offload_activations(model, store, "nvme", slots=2, piece_bytes=MIB) as offloaded,
        ):
            found = [advance(model, optimizer, n) for n in range(2)]
            fill(mount)
            before = offloaded.stats()["nvme_bytes"]
            with pytest.raises(zero_offload.BudgetError, match=f"of layers.0. .*recompute.*{mount} has .* bytes free"):
                advance(model, optimizer, 2, rows=8192)  # a larger batch wants larger extents
            found.append(advance(model, optimizer, 2))  # the update before went on, and this size has room as before
            assert offloaded.stats()["nvme_bytes"] == before
            zero_core.checkpoint.save(tmp_path / "checkpoint", model, optimizer)
            found.append(advance(model, optimizer, 3))
    assert found == plain


LIMITED = """
import resource, sys
from tests.integration.zero_train.helpers import trained
from zero_train.errors import RunError

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1200 << 20), -1))
try:
    trained(FOLDER, "offload=nvme", "run.steps=3", "run.micro_batch=256", "data.sequence_length=1024")
except RunError as error:
    print("RunError:", error, file=sys.stderr)
"""


@pytest.mark.promise("device-full")
def test_memory_that_runs_out_in_a_forward_ends_the_run_with_a_way_out(tmp_path, interpreter):
    """The device is the CPU here; a process that may not have more address space is refused memory by the kernel."""
    done = interpreter(f"FOLDER = {str(tmp_path / 'run')!r}\n{LIMITED}")
    assert done.returncode == 0, done.stderr
    said = r"RunError: the run stopped: out of memory on the host tier: .* asked for; zero_offload.plan expected "
    assert re.search(said + r".*run\.micro_batch", done.stderr), done.stderr


RUN = ("run.steps=6", "run.checkpoint_every=2")


@pytest.mark.promise("full-training")
def test_a_disk_that_fills_up_under_every_state_changes_nothing(tmp_path):
    whole = trained(tmp_path / "whole", "offload=nvme", *RUN)
    with small_ext4(tmp_path, 64 * MIB) as mount:
        on = ("offload=nvme", f"offload.nvme_paths=[{mount}]", "io.allow_memory=false")
        with after_step(3, lambda: fill(mount)):
            run = trained(tmp_path / "run", *on, *RUN)
    assert (run.losses, run.digest) == (whole.losses, whole.digest)


@pytest.mark.promise("full-checkpoint")
def test_a_checkpoint_that_finds_the_disk_full_leaves_the_one_before(tmp_path):
    options = ("offload=host", *RUN)
    whole = trained(tmp_path / "whole", *options)
    with small_ext4(tmp_path, 64 * MIB) as mount:
        full = pytest.raises((RunError, RuntimeError), match="No space left")
        with full, after_step(3, lambda: fill(mount)):
            trained(mount / "run", *options)
        (mount / "full").unlink()
        rest = trained(mount / "run", *options, "run.resume=auto")
    assert [step.step for step in rest.steps] == [3, 4, 5, 6] and rest.digest == whole.digest


@pytest.mark.promise("io-error-states")
def test_blocks_that_are_lost_under_a_run_stop_it_and_the_last_checkpoint_stands(tmp_path):
    options = ("offload=nvme", "offload.overlap=false", *RUN)
    whole = trained(tmp_path / "whole", *options)
    with small_ext4(tmp_path, 64 * MIB) as mount:
        # No update is in flight after a step, so that what comes next is a read of blocks that are gone.
        lost = pytest.raises(RunError, match=rf"reading .*: {mount}, offset \d+.*Input/output error.*checkpoint")
        with lost, after_step(5, lambda: os.truncate(tmp_path / "image", MIB)):
            trained(tmp_path / "run", f"offload.nvme_paths=[{mount}]", "io.allow_memory=false", *options)
    rest = trained(tmp_path / "run", *options, "run.resume=auto")
    assert [step.step for step in rest.steps] == [5, 6]
    assert rest.digest == whole.digest
