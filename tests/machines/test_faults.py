"""A rank that is killed or stopped, or a link that is cut, ends every other rank: it raises, and exits with code 1.

Fails if one waits for ever, or much longer than its time-out, or if it dies of a signal as it exits.
"""

import signal
import time

import pytest

from zero_core.comm.watchdog import ANSWER

TIMEOUT = 10  # of the process group, in seconds
SLACK = 60  # from the error to the exit, where other work runs beside. torch's own time-out is 30 minutes
full = pytest.mark.machines_full


def training(machines, stage, counts=(1, 1)):
    """The ranks, in the middle of a run."""
    ranks = machines.ranks(["-m", "tests.machines.training", str(stage), str(TIMEOUT)], counts)
    for rank in ranks:
        rank.has_printed("step 2:")
    return ranks


def all_raise(ranks, error="zero_core.errors.CollectiveError"):
    deadline = time.monotonic() + TIMEOUT + ANSWER + SLACK
    codes = [rank.exit_code(deadline - time.monotonic()) for rank in ranks]
    assert codes == [1] * len(ranks), "\n".join([str(codes), *(rank.printed for rank in ranks)])
    for rank in ranks:
        assert error in rank.printed, rank.printed
        assert "terminate called" not in rank.printed, rank.printed


@pytest.mark.promise("machines-killed")
@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=full) for stage in (0, 2))])
@pytest.mark.parametrize(
    ("counts", "killed"), [((1, 1), 1), *(pytest.param(*each, marks=full) for each in (((1, 1), 0), ((2, 2), 3)))]
)
def test_a_rank_that_is_killed_ends_the_others(machines, stage, counts, killed):
    """Rank 0 has the process group's store."""
    ranks = training(machines, stage, counts)
    ranks.pop(killed).popen.send_signal(signal.SIGKILL)
    all_raise(ranks)


@pytest.mark.promise("machines-stopped")
@full
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("stopped", [0, 2])
def test_a_rank_that_is_stopped_ends_the_others_at_their_time_out(machines, stage, stopped):
    ranks = training(machines, stage, (2, 1))
    ranks.pop(stopped).popen.send_signal(signal.SIGSTOP)
    all_raise(ranks)


@pytest.mark.promise("machines-link-cut")
@full
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_link_that_is_cut_ends_the_ranks_on_both_sides(machines, stage):
    ranks = training(machines, stage, (2, 1))
    machines.cut()
    all_raise(ranks)


@pytest.mark.promise("machines-exit")
@full
@pytest.mark.parametrize("fault", ["killed", "cut", "stopped"])
def test_a_run_of_zero_train_ends_with_one_line(machines, fault, tmp_path):
    """Exit code 1, after run.timeout."""
    pytest.importorskip("zero_train")
    run = ["recipe=tiny", "run.steps=1000000", f"run.timeout={TIMEOUT}", f"run.dir={tmp_path / 'run'}"]
    ranks = machines.ranks(["-m", "zero_train", *run])
    ranks[0].has_printed("step 3")
    if fault == "cut":
        machines.cut()
    else:
        ranks.pop().popen.send_signal(signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
    all_raise(ranks, "")
    assert "Traceback" not in ranks[0].printed, ranks[0].printed
