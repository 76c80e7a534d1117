"""What one of 512 ranks sends and holds equals the closed formulas, at every stage; see counting.py."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def test_elements_sent_and_bytes_held_by_one_of_512_ranks_equal_the_formulas():
    """In a process of its own: a process group is process-wide, and this one computes nothing."""
    pytest.importorskip("transformers")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.zero_core.counting"],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    assert done.stdout.strip() == "counted", done.stderr[-3000:]
