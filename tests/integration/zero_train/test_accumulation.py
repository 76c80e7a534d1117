"""Micro-batches on two ranks: one rank's numbers, with gradients reduced each time or held back by zero.no_sync.

What would have to break: a micro-batch's gradient that is lost, added twice or not averaged; a loop that holds back
what the plan has no room for, which a store refuses; or a default that holds back at stages 2 and 3.
"""

import pytest
import torch

import zero_core
from tests.integration.zero_train.helpers import COMMON
from zero_core.unit_memory.unit_memory import CAN_SWAP
from zero_train.run import assemble, planning, train
from zero_train.run.ranks import Ranks
from zero_train.settings import compose

STEPS = ("precision=fp32", "run.micro_batch=1", "run.steps=2", "run.sample_bytes=0", "run.evaluate_every=0")


def outcome(folder, *overrides):
    """(losses, norms, most bytes of zero-core's pool, bytes planned on the device) of a small run."""
    composed = compose.compose([*COMMON, *STEPS, f"run.dir={folder}", *overrides])
    pools = []

    def on_end(ready):
        pools.append(zero_core.handle(ready.model).engine.pool.peak_nbytes)

    steps = train.run(composed, on_end=on_end).history.steps
    drafted = assemble.draft(composed)
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    plan = planning.make(composed, drafted.model, Ranks(0, size, 0, size), drafted.step)
    planned = plan.bytes_of("device", "buffers") + plan.bytes_of("device", "parameters")
    return [step.loss for step in steps], [step.grad_norm for step in steps], pools[0], planned


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return outcome(tmp_path_factory.mktemp("alone"), "offload=none", "run.accumulate=6")


CASES = ("0", "0 zero.no_sync=false", "1", "2", "3", "3 zero.no_sync=true")


def all_outcomes(folder):
    return {
        case: outcome(folder / str(n), "offload=host", "run.accumulate=3", *f"zero.stage={case}".split())
        for n, case in enumerate(CASES)
    }


@pytest.mark.promise("train-accumulation")
def test_two_ranks_accumulate_to_what_one_rank_does_in_the_memory_that_was_planned(ranks, tmp_path, alone):
    for found in ranks(2).run(all_outcomes, tmp_path):
        for case, (losses, norms, pool, planned) in found.items():
            assert losses == pytest.approx(alone[0], rel=1e-5), case
            assert norms == pytest.approx(alone[1], rel=1e-4), case
            # Without swapping, units that are gathered have memory of their own, and not the pool's.
            assert pool == planned or (not CAN_SWAP and pool < planned), case
