"""Every script of examples/ runs as it stands. Those of fine-tuning have tests in the folders of their packages."""

import contextlib
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from examples.own_tier import TIER, Shelf
from tests.conformance.zero_offload.test_new_tier import trained
from zero_offload import ByteStore
from zero_offload.testing import ByteStoreSuite
from zero_train.cli import app

pytestmark = pytest.mark.promise("examples-run")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ALONE = {  # script: what it prints
    "cpu_optimizer.py": r"fp32, torch: 0\.9900 +bf16, zero_optim_cpu: 0\.9883 +bf16, torch: 1\.0000",
    "numpy_arrays.py": r"8 arrays of 4 MiB came back, through two buffers",
    "own_step.py": r"step 1: loss \d.*\nstep 60: loss 0\.",
    "own_tier.py": r"step 60: loss 0\..*\nwritten to the shelf: [1-9]\d+ bytes",
    "soap.py": r"step 60: loss 0\..*\n.*has shape \(64, 64\)\nthe bits of plain torch: True",
    "plain.py": r"step 30: loss 1\..*\nread \d+ MB, wrote \d+ MB",
}
ON_RANKS = {
    "own_collective.py": r"step 1: loss [2-9].*\nstep 60: loss 0\.",
    "ranks.py": r"step 40: mean loss [12]\..*\n66177 parameters; a rank keeps the states of 33\d\d\d of them",
}
ELSEWHERE = {  # what runs the others
    "__init__.py": None,
    "accelerate_loop.py": "tests/integration/zero_hf/test_examples.py",
    "clusters": "tests/integration/test_clusters.py",
    "deepspeed": "tests/integration/zero_deepspeed/test_loop.py",
    "finetune.py": "tests/integration/zero_train/test_finetune.py",
    "own_backend.cpp": "tests/conformance/zero_nvme/toy_backend.py",
    "sft.py": "tests/integration/zero_hf/test_examples.py",
    "two_stages.py": "tests/integration/zero_hf/test_two_stages.py",
    "trainer.py": "tests/integration/zero_hf/test_examples.py",
}


@pytest.mark.parametrize("name", ALONE)
def test_it_runs_and_prints(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert re.search(ALONE[name], capsys.readouterr().out)


def printed(name: str) -> str:
    """What the script prints on this rank of a pool, which has joined a process group already."""
    out = io.StringIO()
    here = (mock.patch(f"torch.distributed.{call}_process_group") for call in ("init", "destroy"))
    with mock.patch.object(sys, "argv", [name]), contextlib.redirect_stdout(out), next(here), next(here):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return out.getvalue()


@pytest.mark.parametrize("name", ON_RANKS)
def test_it_runs_on_two_ranks_and_the_first_one_prints(ranks: Any, name: str) -> None:
    first, second = ranks(2).run(printed, name)
    assert re.search(ON_RANKS[name], first) and not second


def test_torchrun_runs_one(tmp_path: Path) -> None:
    """Fails if the process group that a script makes is not like the one of the test above."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLES / "ranks.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(ON_RANKS["ranks.py"], done.stdout), done.stdout


def test_every_example_is_run_by_a_test_and_in_the_list() -> None:
    names = {path.name for path in EXAMPLES.iterdir()} - {"README.md", "__pycache__"}
    assert names == {*ALONE, *ON_RANKS, *ELSEWHERE}
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for name, runner in ELSEWHERE.items():
        assert runner is None or Path(name).stem in (ROOT / runner).read_text(encoding="utf-8"), runner
    assert names - {"__init__.py"} == set(re.findall(r"^\| \[([\w.]+)", listed, re.MULTILINE))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_backend_compiles_against_todays_headers() -> None:
    """`nox -s change` builds it into a copy of zero-nvme and runs the conformance suites on it, which takes longer."""
    headers = ROOT / "packages" / "zero-nvme" / "cpp" / "include"
    command = ["g++", "-std=c++17", "-fsyntax-only", "-Wall", "-Werror", f"-I{headers}", EXAMPLES / "own_backend.cpp"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class TestShelf(ByteStoreSuite):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_store(self) -> ByteStore:
        return Shelf(str(self.folder))


def test_a_model_on_the_shelf_has_the_bits_of_host_memory(tmp_path: Path) -> None:
    shelf = Shelf(str(tmp_path))
    losses, parameters = trained("shelf", tiers={"shelf": shelf})
    expected, on_host = trained("host")
    assert losses == expected and losses[-1] < losses[0]
    assert all((ours == theirs).all() for ours, theirs in zip(parameters, on_host, strict=True))
    assert not shelf._open  # every extent was given back
    shelf.close()


def test_the_file_that_it_shows_lets_zero_train_use_it(tmp_path: Path, capsys: pytest.CaptureFixture[Any]) -> None:
    (tmp_path / "conf" / "tier").mkdir(parents=True)
    (tmp_path / "conf" / "tier" / "shelf.yaml").write_text(TIER.replace("/mnt/network/zero", str(tmp_path / "shelf")))
    words = ["recipe=tiny", "offload=host", "tier=shelf", "offload.optimizer=shelf", "run.dry=true"]
    code = app.main([f"--config-dir={tmp_path / 'conf'}", *words, f"run.dir={tmp_path / 'run'}"])
    assert code == 0 and re.search(r"^shelf ", capsys.readouterr().out, re.MULTILINE)
