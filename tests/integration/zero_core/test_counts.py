"""What one of 512 ranks sends and holds equals the closed formulas, at every stage; see counting.py."""

import pytest


@pytest.mark.promise("counts-of-512-ranks", "estimate-table-1", "same-count")
def test_elements_sent_and_bytes_held_by_one_of_512_ranks_equal_the_formulas(interpreter):
    """In a process of its own: a process group is process-wide, and this one computes nothing."""
    pytest.importorskip("transformers")
    done = interpreter("from tests.integration.zero_core import counting\ncounting.main()", timeout_seconds=280)
    assert done.stdout.strip() == "counted", done.stderr[-3000:]
