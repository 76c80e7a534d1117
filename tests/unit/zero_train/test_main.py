"""`python -m zero_train`: what a process decides about itself before torch is imported."""

import subprocess
import sys

import pytest

REPORT = """
import os, sys, types

def main():
    print(os.environ["THP_MEM_ALLOC_ENABLE"], "torch" in sys.modules)

sys.modules["zero_train.app"] = types.SimpleNamespace(main=main)
from zero_train.__main__ import console
console()
"""


@pytest.mark.parametrize(("given", "found"), [(None, "1"), ("0", "0")])
def test_torch_is_asked_for_huge_pages_before_it_is_imported_unless_the_user_said_something(given, found, monkeypatch):
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    if given is not None:
        monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", given)
    ended = subprocess.run([sys.executable, "-c", REPORT], capture_output=True, text=True, timeout=60)
    assert (ended.stdout.split(), ended.returncode) == ([found, "False"], 0), ended.stderr
