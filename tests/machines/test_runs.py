"""Ranks on two machines train as one rank does, and what they send goes over the link."""

import re

import pytest

from tests.machines import training, two

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
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_run_over_a_link_with_rate_and_delay(far_machines, stage):
    trains_as_one(far_machines, stage, 2)


@pytest.mark.promise("machines-train")
@full
def test_a_run_over_a_link_that_loses_packets(tmp_path):
    if reason := two.missing():
        pytest.skip(f"no two machines: {reason}")
    with two.Machines(rate=1e9, delay=1000, loss=1, folder=tmp_path / "logs") as machines:
        trains_as_one(machines, 2, 1)


@full
def test_the_command_says_how_each_machine_ended(tmp_path):
    if reason := two.missing():
        pytest.skip(f"no two machines: {reason}")
    said: list[str] = []
    assert two.main(["1gbit", "1ms", "1", "-m", "tests.machines.training", "3", "60", "1"], said.append) == 0
    assert [re.search(r"machine\d: exit code (-?\d+)", text)[1] for text in said[:2]] == ["0", "0"]
    said.clear()
    fails = tmp_path / "fails.py"
    fails.write_text("raise SystemExit(3)")
    assert two.main(["0", "0", "1", str(fails)], said.append) == 1  # torchrun's own
    assert "machine0: exit code 1" in said[0] and re.search(r"exitcode\s*: 3", said[0]), said[0]
