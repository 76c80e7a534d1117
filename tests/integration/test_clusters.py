"""Every file of examples/clusters does what it says, where its tool is installed. docs/clusters.md says when it did.

Two machines are one here: two torchruns, or two nodes of a Slurm that somebody has set up.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integration.zero_train.helpers import COMMON
from zero_train.report import picture
from zero_train.settings import compose

pytestmark = pytest.mark.promise("clusters-examples")

ROOT = Path(__file__).parents[2]
CLUSTERS = ROOT / "examples" / "clusters"
RUNNERS = {  # file: its test
    "torchrun.sh": "test_two_torchruns_run_zero_train",
    "slurm.sbatch": "test_slurm_runs_a_job_on_two_nodes",
    "submitit.sh": "test_submitit_runs_a_sweep_side_by_side",
    "ray_train.py": "test_ray_train_runs_two_workers_and_goes_on",
    "kubernetes.yaml": "test_the_keys_of_the_untried_file_are_zero_trains",
}
HERE = {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "RANKS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def started(*command: object, **options: object) -> subprocess.Popen[str]:
    environment = os.environ | HERE | {str(key): str(value) for key, value in options.items()}
    words = [str(word) for word in command]
    return subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )


def printed(process: subprocess.Popen[str], seconds: float = 240) -> str:
    try:
        said, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
    assert process.returncode == 0, said[-3000:]
    return said


def port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_every_file_has_a_test_and_is_in_the_list() -> None:
    names = {path.name for path in CLUSTERS.iterdir()} - {"__pycache__"}
    assert names == set(RUNNERS) and set(RUNNERS.values()) <= set(globals())
    listed = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    for name in names:
        assert f"clusters/{name}" in listed and f"clusters/{name}" in page


def test_two_torchruns_run_zero_train(tmp_path: Path) -> None:
    words = ["-m", "zero_train", *COMMON, "offload=host", "run.steps=2", f"run.dir={tmp_path / 'run'}"]
    at = port()
    first, second = (
        started(CLUSTERS / "torchrun.sh", number, "127.0.0.1", *words, PORT=at, RESTARTS=0) for number in range(2)
    )
    assert "step 2/2" in printed(first) and "step 2/2" not in printed(second)
    assert [step.step for step in picture.read_steps(tmp_path / "run")] == [1, 2]


def _nodes() -> int:
    if shutil.which("sbatch") is None:
        return 0
    asked = subprocess.run(["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"], capture_output=True, text=True)
    return len(set(asked.stdout.split()))


def test_slurm_runs_a_job_on_two_nodes(tmp_path: Path) -> None:
    if _nodes() < 2:
        pytest.skip("needs a Slurm with two nodes that are idle")
    keys = [*COMMON, "offload=host", "run.steps=2", f"run.dir={tmp_path / 'run'}"]
    sbatch = ("sbatch", "--wait", "--gpus-per-node=0", f"--output={tmp_path}/%j.out", CLUSTERS / "slurm.sbatch")
    printed(started(*sbatch, *keys))
    said = "".join(path.read_text() for path in tmp_path.glob("*.out"))
    assert "stage 3 on 2 ranks" in said and "step 2/2" in said
    again = started(*sbatch, *keys, "run.seed=1")  # is another run than the one in the folder
    again.communicate(timeout=240)
    assert again.returncode != 0


def test_submitit_runs_a_sweep_side_by_side(tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="needs hydra-submitit-launcher")
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs hydra-submitit-launcher")
    keys = [*COMMON, "offload=none", "run.steps=1", f"run.dir={tmp_path / 'sweep'}"]
    printed(started(CLUSTERS / "submitit.sh", *keys, "zero.stage=2,3"))
    for job in range(2):
        assert [step.step for step in picture.read_steps(tmp_path / "sweep" / str(job))] == [1]
    failing = started(CLUSTERS / "submitit.sh", *keys[:-1], f"run.dir={tmp_path / 'other'}", "run.micro_batch=0,1")
    said, _ = failing.communicate(timeout=240)
    assert failing.returncode == 2 and re.search(r"run\.micro_batch=0 +2\n", said)


def test_ray_train_runs_two_workers_and_goes_on(tmp_path: Path) -> None:
    if find_spec("ray") is None:
        pytest.skip("needs Ray Train: pip install 'ray[train]'")
    for steps, first in ((40, 1), (60, 41)):
        process = started(sys.executable, CLUSTERS / "ray_train.py", "--storage", tmp_path, "--steps", steps)
        assert f"began at step {first}" in printed(process)
    assert (tmp_path / "checkpoint" / ".metadata").is_file()


def test_the_keys_of_the_untried_file_are_zero_trains() -> None:
    yaml = pytest.importorskip("yaml")
    text = (CLUSTERS / "kubernetes.yaml").read_text(encoding="utf-8")
    assert text.startswith("# NOT TRIED")
    pods = yaml.safe_load(text)["spec"]["pytorchReplicaSpecs"]
    for kind in ("Master", "Worker"):
        (container,) = pods[kind]["template"]["spec"]["containers"]
        (command,) = container["args"]
        keys = command.partition("-m zero_train ")[2].split()
        composed = compose.compose(keys)
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert composed.run.resume == "auto" and composed.run.dir.startswith(f"{mounts[0]}/")
        assert composed.offload.nvme_paths == [mounts[1]]
