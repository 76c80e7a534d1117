"""The README's program runs as it stands there."""

import pathlib
import re
import subprocess
import sys

import pytest

import zero_nvme
from tests.integration.zero_nvme.faults import environment

README = pathlib.Path(__file__).parents[3] / "packages" / "zero-nvme" / "README.md"


def test_the_program_in_the_readme(tmp_path):
    pytest.importorskip("numpy")
    program = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[0] in zero_nvme.BACKENDS
    assert (tmp_path / "arrays.bin").stat().st_size == 16 << 23
