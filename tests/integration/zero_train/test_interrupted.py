"""Ctrl-C and SIGTERM end a run after the step under way, with its plots, and the process says which signal it was.

Ctrl-C while the commands import torch: exit code 130 and one line, even where a library catches everything.
"""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.zero_train.helpers import COMMON, begun, killed, left, printed, stopped_after, trained
from zero_train.report import picture

LEFT = ["config.yaml", "metrics.jsonl", "report.png", "timeline.json", "validation.jsonl"]


def test_a_real_process_whose_parent_ignores_ctrl_c(tmp_path):
    words = (*COMMON, f"run.dir={tmp_path / 'run'}")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the child inherits it
    try:
        process = begun(tmp_path, *words, "offload=nvme", "run.steps=1000000", "run.plots=true")
    finally:
        signal.signal(signal.SIGINT, before)
    text = printed(process, "step 3/")
    assert process.returncode == 130 and "stopped after step" in text, text
    assert left(tmp_path / "run") == LEFT
    assert [path.name for path in Path(tmp_path).iterdir()] == ["run"]


@pytest.mark.promise("start-sigterm")
def test_a_rank_that_waits_for_others_to_start_ends_on_sigterm(tmp_path):
    """torchrun ends what is left of a job with SIGTERM, and waits 30 seconds before it kills."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with begun(tmp_path, *COMMON, f"run.dir={tmp_path / 'run'}", "offload=host", **alone) as process:
        try:
            until = time.monotonic() + 120
            while not listens(port):
                assert time.monotonic() < until and process.poll() is None
                time.sleep(0.05)
            time.sleep(1)  # it waits for the other one by now
            process.terminate()
            assert process.wait(timeout=30) == -signal.SIGTERM
        finally:
            process.kill()
    assert list(tmp_path.iterdir()) == []


def listens(port):
    """Whether some process listens on the port, by Linux's tables."""
    tables = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    return any(line[1].endswith(f":{port:04X}") and line[3] == "0A" for line in lines)


FINDER = """
import os, runpy, signal, sys

class Pressing:
    def find_spec(self, name, *_):
        if name == "torch":
            sys.meta_path.remove(self)
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except BaseException:
                pass  # as a library does that tries whether another one is there

sys.meta_path.insert(0, Pressing())
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv[1:] = {words}
runpy.run_module("{module}", run_name="__main__")
"""


@pytest.mark.promise("ctrl-c-import")
@pytest.mark.parametrize(("module", "words"), [("zero_train", ["recipe=tiny", "run.dry=true"]), ("zero_hf", ["merge"])])
def test_ctrl_c_while_torch_is_imported_ends_the_command_with_one_line(tmp_path, module, words):
    """Fails if torch is imported before the command answers Ctrl-C, or if the command goes on or prints more."""
    pytest.importorskip(module)
    program = FINDER.format(module=module, words=words)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "interrupted\n", "")


STEPS = 8


RUN = (f"run.steps={STEPS}", "run.checkpoint_every=3")


def numbers(folder):
    return [step.step for step in picture.read_steps(folder)]


@pytest.mark.promise("resume-placements")
@pytest.mark.parametrize("place", ["none", "host", "nvme"])
def test_after_ctrl_c_the_rest_is_the_same(tmp_path, place):
    whole = trained(tmp_path / "whole", f"offload={place}", *RUN)
    with stopped_after(4):
        stopped = trained(tmp_path / "run", f"offload={place}", *RUN)
    assert stopped.exit_code == 130 and len(stopped.losses) == 4
    rest = trained(tmp_path / "run", f"offload={place}", *RUN, "run.resume=auto")
    assert stopped.losses + rest.losses == whole.losses
    assert rest.digest == whole.digest
    assert numbers(tmp_path / "run") == list(range(1, STEPS + 1))


@pytest.mark.promise("resume-killed")
def test_after_kill_9_the_rest_is_the_same(tmp_path, interpreter):
    whole = trained(tmp_path / "whole", "offload=nvme", *RUN)
    killed(interpreter, tmp_path / "run", 5, "offload=nvme", *RUN)
    assert numbers(tmp_path / "run") == [1, 2, 3, 4, 5]
    rest = trained(tmp_path / "run", "offload=nvme", *RUN, "run.resume=auto")
    assert [step.step for step in rest.steps] == [4, 5, 6, 7, 8]  # from the checkpoint after step 3
    assert rest.losses == whole.losses[3:]
    assert rest.digest == whole.digest
    assert numbers(tmp_path / "run") == list(range(1, STEPS + 1))
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step_0000006", "step_0000008"]


def test_an_exported_model_streams_back_in(tmp_path):
    words = ("offload=nvme", "run.evaluate_every=5")
    first = trained(tmp_path / "first", *words, "run.export=true")
    again = trained(tmp_path / "again", *words, f"model.path={tmp_path / 'first' / 'pretrained'}", "run.steps=1")
    assert again.validation[0][1] == pytest.approx(first.validation[-1][1], abs=1e-3)
    assert first.validation[-1][1] < first.validation[0][1] - 0.1
