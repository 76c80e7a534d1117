"""Ranks on two machines train as one rank does, and what they send goes over the link."""

import re

import pytest

from tests.machines import training

STEPS = 3
full = pytest.mark.machines_full


def trains_as_one(machines, stage, count):
    both = machines.torchrun(["-m", "tests.machines.training", str(stage), "60", str(STEPS)], count)
    assert [process.exit_code(240) for process in both] == [0, 0], "\n".join(process.printed for process in both)
    printed = "".join(process.printed for process in both)
    for number, expected in training.losses(0, STEPS):
        found = [float(loss) for loss in re.findall(rf"step {number}: ([\d.]+)", printed)]
        assert len(found) == 2 * count  # each of its rows
        assert sum(found) / len(found) == pytest.approx(expected, abs=2e-6)  # six digits are printed
    # One machine has half of the parameters, and the other one needs them in each step, or their gradients.
    half = 4 * training.WIDTH * (training.WIDTH + 1) * 4 // 2
    assert min(machines.sent()) > STEPS * half


@pytest.mark.promise("machines-train")
def test_a_run_on_two_machines(machines):
    trains_as_one(machines, 3, 1)


@pytest.mark.promise("machines-train")
@full
@pytest.mark.parametrize("machines", [{"rate": 1e9, "delay": 2000}], indirect=True)  # a round trip of 4 ms
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_run_over_a_link_with_rate_and_delay(machines, stage):
    trains_as_one(machines, stage, 2)


@pytest.mark.promise("machines-train")
@full
@pytest.mark.parametrize("machines", [{"rate": 1e9, "delay": 1000, "loss": 1}], indirect=True)
def test_a_run_over_a_link_that_loses_packets(machines):
    trains_as_one(machines, 2, 1)
