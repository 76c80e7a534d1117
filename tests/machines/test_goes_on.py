"""A run of zero-train goes through a killed rank, a stopped rank and a link that is cut, and ends in the same bits.

Two machines with two ranks each keep every step on a disk of their own, at one path and under host names of their own.
Each machine's torchrun starts its ranks again.
"""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import keystr, tree_flatten_with_path

from tests.machines.two import ADDRESSES, PORT
from tests.unit.zero_optim_cpu.tiles import same

STEPS = 40
TIMEOUT = 60  # run.timeout: torchrun ends a stopped rank after 30 s, and only then starts its ranks again
CUT = 5  # seconds without a link
LIMIT = 600  # seconds without a finished step: longer is a hang
KEYS = (
    *("recipe=tiny", "data=synthetic", "precision=bf16", "zero.stage=3", "offload=nvme", "offload.slots=3"),
    *("run.threads=1", "io.allow_memory=true", "run.plots=false", "run.bar=false", "run.resume=auto"),
    *("run.durable=process", "run.checkpoint_every=25", f"run.timeout={TIMEOUT}", f"run.steps={STEPS}"),
)
OWN = 'hostname "$1" && mount --bind "$2" "$3" && shift 3 && exec "$@"'


def begun(machines, folder):
    """The two torchruns of a run in this folder."""
    (folder / "local").mkdir(parents=True)
    keys = [*KEYS, f"run.dir={folder / 'run'}", f"offload.nvme_paths=['{folder / 'local'}']"]
    torchruns = []
    for machine in range(2):
        (folder / f"disk{machine}").mkdir()
        own = [f"machine{machine}", str(folder / f"disk{machine}"), str(folder / "local")]
        words = ["unshare", "--mount", "--uts", "sh", "-c", OWN, "sh", *own, sys.executable]
        words += ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(machine)]
        words += ["--master-addr", ADDRESSES[0], "--master-port", str(PORT), "--max-restarts", "9", "-m", "zero_train"]
        torchruns.append(machines.start(machine, [*words, *keys], f"{folder.name}-{machine}"))
    return torchruns


def losses(folder):
    """(step, loss) of the steps that are finished."""
    with suppress(OSError, ValueError):  # there are none yet, or one is being written
        lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [(line["step"], line["loss"]) for line in map(json.loads, lines)]
    return []


def process_of(machines, rank):
    """On the second machine; its own children have its environment, too."""
    for pid in sorted(machines.pids(1)):
        with suppress(OSError):
            if f"RANK={rank}" in Path(f"/proc/{pid}/environ").read_text().split("\0"):
                return pid
    raise AssertionError(f"rank {rank} is not there")


def until(condition, torchruns, folder, what):
    finished, deadline = 0, time.monotonic() + LIMIT
    while not condition():
        if (now := len(losses(folder))) > finished:
            finished, deadline = now, time.monotonic() + LIMIT
        ended = [torchrun.popen.poll() for torchrun in torchruns]
        assert not any(ended) and time.monotonic() < deadline, "\n".join([what, *(each.printed for each in torchruns)])
        time.sleep(0.1)


def values(folder):
    """Parameters and optimizer states, by their paths in the last checkpoint."""
    dcp_to_torch_save(folder / "run" / "checkpoints" / f"step_{STEPS:07d}", folder / "whole.pt")
    leaves, _ = tree_flatten_with_path(torch.load(folder / "whole.pt", weights_only=False))
    return {keystr(path): leaf.flatten() for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


def run(machines, folder, faults=()):
    """To its end, with faults four steps apart, so that one step at least begins after each."""
    torchruns, last = begun(machines, folder), 0
    for number, fault in enumerate(faults, start=1):
        until(lambda wanted=last + 4: len(losses(folder)) >= wanted, torchruns, folder, f"steps before fault {number}")
        last = len(losses(folder))
        if fault == "link":
            machines.cut()
            time.sleep(CUT)
            machines.mend()
        else:
            os.kill(process_of(machines, 3), fault)
    until(lambda: [each.popen.poll() for each in torchruns] == [0, 0], torchruns, folder, "the end")
    assert last + 4 <= STEPS and not any("terminate called" in each.printed for each in torchruns)
    return losses(folder), values(folder)


@pytest.mark.promise("machines-goes-on")
@pytest.mark.machines_full
@pytest.mark.timeout(3600)
def test_a_run_that_goes_through_faults_ends_in_the_bits_of_an_undisturbed_one(machines, tmp_path):
    found, parameters = run(machines, tmp_path / "faults", [signal.SIGKILL, signal.SIGSTOP, "link"])
    wanted, undisturbed = run(machines, tmp_path / "plain")
    assert found == wanted and len(wanted) == STEPS
    assert any("exp_avg" in path for path in undisturbed), list(undisturbed)
    assert parameters.keys() == undisturbed.keys()
    assert [path for path, value in parameters.items() if not same(value, undisturbed[path])] == []
