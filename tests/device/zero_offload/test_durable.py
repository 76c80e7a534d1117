"""Durable steps of a run on a device: parameters whose home is there are on disk after each step, and come home again.

Fails if a parameter is written to disk before its update has ended, or is read from its home before it came there.
"""

import random
from dataclasses import replace

import pytest

import zero_core
from tests.device.zero_core.runs import differing
from tests.device.zero_offload import runs
from zero_offload.planning.traffic import Shape, account
from zero_offload.testing import CrashByteStore

pytestmark = pytest.mark.promise("durable")

GPU = (512, 8, 64)


def run_of(device, store, disk):
    run = runs.Run(device, runs.placed(device, store), runs.sized(device, GPU), tiers={"nvme": disk, "durable": True})
    return run, zero_core.resume(run.model, run.optimizer).step


def steps(run, numbers):
    return [loss.cpu() for number in numbers for loss in run.step(number)]


@pytest.mark.parametrize("store", ["nvme", "classic", "classic nvme", "parameters in part"])
def test_a_run_that_crashed_goes_on_with_the_same_bits(device, tmp_path, store):
    with runs.discrete(device):
        disk = CrashByteStore()
        run, _ = run_of(device, store, disk)
        losses = steps(run, range(3))
        run.store.committed()
        found = disk.crashed(random.Random(0))
        saving = zero_core.checkpoint.save(tmp_path / "here", run.model, run.optimizer, blocking=False)
        losses += steps(run, range(3, 5))
        expected = losses + run.masters()
        saving.wait()
        run.close()
        again, step = run_of(device, store, found)
        assert step == 2
        assert not differing(losses[:step] + steps(again, range(step, 5)) + again.masters(), expected)
        zero_core.checkpoint.load(tmp_path / "here", again.model, again.optimizer)
        assert not differing(losses[:3] + steps(again, range(3, 5)) + again.masters(), expected)
        again.close()


def test_the_bytes_that_a_step_writes_are_the_planned_ones(device):
    """Each tile that is stored, also where it stays in its slot; what lies in memory comes on top."""
    shape = Shape(durable=True, discrete=True)
    for store in ("nvme", "classic"):
        with runs.discrete(device):
            run, _ = run_of(device, store, CrashByteStore())
            steps(run, range(1))
            zero_core.commit(run.model)
            before = run.store.stats()["nvme_write_bytes"]
            steps(run, range(1, 3))
            zero_core.commit(run.model)
            written = (run.store.stats()["nvme_write_bytes"] - before) / 2
            copied = run.store.describe().copied_bytes
            planned = account(replace(run.store.describe(), durable_on=None), shape).write_bytes("nvme")
            run.close()
        manifests = 2 * (1 << 16) + 3 * 4096
        assert 0 <= written - planned - copied <= manifests < written
