"""A small storm: one run goes through a fault of three kinds, and ends in the bits of an undisturbed one."""

import pytest

from tests.machines import storm, two


@pytest.mark.promise("machines-goes-on")
@pytest.mark.machines_full
def test_a_run_that_goes_through_faults_ends_in_the_bits_of_an_undisturbed_one(tmp_path):
    if reason := two.missing():
        pytest.skip(f"no two machines: {reason}")
    said: list[str] = []
    assert storm.main([str(tmp_path / "storm"), "--faults", "3", "--seed", "3"], said.append) == 0, "\n".join(said)
    assert said[-1] == "losses, parameters and optimizer states: the same bits"
