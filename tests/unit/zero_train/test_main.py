"""`python -m zero_train`: what a process decides about itself before torch is imported."""

import subprocess
import sys

import pytest

REPORT = """
import os, sys, types

def main():
    names = ("THP_MEM_ALLOC_ENABLE", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    print(*(os.environ.get(name, "-") for name in names), "torch" in sys.modules)

sys.modules["zero_train.cli.app"] = types.SimpleNamespace(main=main)
from zero_train.__main__ import console
console()
"""


@pytest.mark.promise("huge-pages")
@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "1 1000 -"),
        ({"THP_MEM_ALLOC_ENABLE": "0"}, "0 1000 -"),
        ({"GOMP_SPINCOUNT": "7"}, "1 7 -"),
        ({"OMP_WAIT_POLICY": "active"}, "1 - active"),
    ],
)
def test_huge_pages_and_short_waits_are_asked_for_before_torch_is_imported_unless_the_user_said_something(
    given, found, monkeypatch
):
    for name in ("THP_MEM_ALLOC_ENABLE", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    ended = subprocess.run([sys.executable, "-c", REPORT], capture_output=True, text=True, timeout=60)
    assert (ended.stdout.split(), ended.returncode) == ([*found.split(), "False"], 0), ended.stderr
