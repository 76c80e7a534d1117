"""The change test: a new backend is one C++ file and one YAML file. Builds a copy of zero-nvme with one, and tests it.

    python -m tests.conformance.zero_nvme.toy_backend

From the root of a checkout, with cmake, pybind11, pytest and the package's dependencies installed.
examples/own_backend.cpp is added to a temporary copy of the package, in which nothing else is changed. The conformance
suites then run on the new backend alone, the tools list it, and with zero-train installed a run may name it. Further
arguments go to pytest.
"""

import importlib.util
import os
import pathlib
import runpy
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[3]
LISTED = """
import tempfile, zero_nvme
from zero_nvme.tools import doctor
assert zero_nvme.BACKENDS[-2:] == ("sync", "aiofiles"), zero_nvme.BACKENDS
with tempfile.TemporaryDirectory() as folder:
    verdicts = {subject: verdict for verdict, subject, _ in doctor.examine(folder)}
assert verdicts["sync"] == verdicts["threads"], verdicts
"""
NAMED = """
from zero_train.settings import checks, compose as config
checks.values(compose.compose(["recipe=tiny", "offload=nvme", "io=sync"]))
"""


def main(*pytest_arguments: str) -> int:
    with tempfile.TemporaryDirectory(prefix="zero-nvme-change-") as name:
        copy = pathlib.Path(name)
        for part in ("conf", "packages/zero-nvme", "packages/zero-train"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        package = copy / "packages" / "zero-nvme"
        shutil.copy(ROOT / "examples" / "own_backend.cpp", package / "cpp" / "src" / "sync_backend.cpp")
        (copy / "conf" / "io" / "sync.yaml").write_text("backend: sync\n")

        site = runpy.run_path(str(package / "scripts" / "sanitize.py"))["build"]("", copy)
        sources = [str(site), str(copy / "packages" / "zero-train" / "src"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sources))}
        suites = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/conformance/zero_nvme", "-k", "sync"]
        commands = [["-c", LISTED], [*suites, *pytest_arguments]]
        if importlib.util.find_spec("zero_train") is not None:
            commands.append(["-c", NAMED])
        statuses = (subprocess.run([sys.executable, *each], cwd=ROOT, env=environment).returncode for each in commands)
        return next(filter(None, statuses), 0)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
