"""What one step of a small Llama asks of the device, through each way in: where the host waits, and how often.

Fails if a wait is added, or if a step takes more copies than the table in docs/results/plans.md says, or 2 % more
launches.
"""

import re
from collections import Counter

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.device import census
from tests.integration.zero_hf.trainers import rows
from zero_core.unit_memory import unit_memory

NORM = "gradients/reducer.py in _told"
MASKS = "transformers/masking_utils.py in find_packed_sequence_indices"
PADDED = "transformers/masking_utils.py in _ignore_causal_mask_sdpa"
LOSSES = "transformers/trainer.py in _run_epoch"  # twice for each: is it nan, is it infinite
LOGS = "transformers/trainer.py in _maybe_log_save_evaluate"
# The norm, which decides how much is clipped; the factor that torch computed from it; and in step() the norm once more,
# by then without anything that is still queued before it.
CLIPPED = {NORM: 2, "gradients/gradient_access.py in multiply": 1}


@pytest.fixture(autouse=True)
def simulated(device):
    """Without latency: nothing here depends on what has ended when."""
    if device.type != "sim":
        pytest.skip(f"only the simulated device counts, and this is {device}")
    import zero_sim

    before = zero_sim.build.native.options()
    zero_sim.configure(latency_us=0, jitter_us=0)
    yield
    torch.get_device_module(device).synchronize()
    zero_sim.configure(latency_us=before.latency_us, jitter_us=before.jitter_us)


def check(found: census.Census, waits: dict[str, int], launches: int, up: int, down: int) -> None:
    """The waits exactly; at most so many copies to and from the device, and launches, to which a few may be added."""
    assert _places(found.waits) == waits
    assert not found.unlike_cuda
    if unit_memory.CAN_SWAP:  # otherwise units have memory of their own, and values are copied into it
        ups, downs, _ = found.copies.values()
        assert found.launches <= 1.02 * launches and ups <= up and downs <= down, found


def _places(waits: Counter[str]) -> dict[str, int]:
    """Files by their folder and name, wherever they are installed, without numbers of lines."""
    found: Counter[str] = Counter()
    for place, times in waits.items():
        found[re.sub(r"^(?:.*/)?([^/]+/[^/:]+):\d+", r"\1", place)] += times
    return dict(found)


@pytest.mark.promise("device-waits-listed")
def test_through_zero_core(tmp_path):
    pytest.importorskip("zero_offload")
    check(census.through_zero_core("none", tmp_path), {NORM: 1}, 678, 2, 1)
    check(census.through_zero_core("host", tmp_path), {NORM: 1}, 592, 13, 11)


@pytest.mark.promise("device-waits-listed")
def test_through_zero_train(tmp_path):
    """The loss is read when the step has ended. The copy of it came before the norm, so it has arrived."""
    for name in ("hydra", "omegaconf", "zero_nvme", "zero_optim_cpu"):
        pytest.importorskip(name)
    waits = {NORM: 1, "zero_core/device.py in read": 1}
    check(census.through_zero_train("none", tmp_path / "none"), waits, 627, 4, 2)
    check(census.through_zero_train("host", tmp_path / "host"), waits, 567, 15, 12)


@pytest.mark.promise("device-clipping-reads", "device-waits-listed")
def test_through_a_trainer(tmp_path):
    waits = {**CLIPPED, MASKS: 2, LOSSES: 4}
    check(census.through_trainer("none", tmp_path), waits, 677, 5, 9)
    check(census.through_trainer("host", tmp_path), waits, 617, 16, 19)


@pytest.mark.promise("device-waits-listed")
def test_each_wait_of_transformers_can_be_avoided(tmp_path):
    """As zero-hf's README says it."""

    def waits(**arguments):
        return _places(census.through_trainer("none", tmp_path, **arguments).waits)

    assert waits(logging_nan_inf_filter=False) == {**CLIPPED, MASKS: 2}
    assert waits(model=census.without_masks()) == {**CLIPPED, LOSSES: 4}
    assert waits(use_cache=True) == {**CLIPPED, LOSSES: 4}
    check(census.as_advised("none", tmp_path), CLIPPED, 657, 5, 3)
    masked = [row | {"attention_mask": torch.ones(12, dtype=torch.long)} for row in rows(16)]
    assert waits(train_dataset=masked) == {**CLIPPED, PADDED: 2, LOSSES: 4}
    assert waits(logging_steps=1) == {**CLIPPED, MASKS: 2, LOSSES: 4, LOGS: 2}
