"""TieredStore on several ranks, each with a device of its own: the same bits over every placement, whatever is asked.

Fails if a collective begins before a copy into its memory has ended, or if a gradient leaves the device before it is
reduced.
"""

from typing import Any

import pytest
import torch

from tests import kit
from tests.device.zero_core.runs import STEPS, batch, checkpointed, device_of_rank, differing, loss_of
from tests.device.zero_offload import runs

PLACEMENTS = ["nvme", "halves", "parameters on nvme", "classic", "classic nvme", "parameters in part"]
MIXED = ["half", "thirds"]  # some tiles are updated on the device
OPTIONS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "stage 2": {"stage": 2},
    "stage 1": {"stage": 1},
    "nothing ahead": {"prefetch_bytes": 0},
    "all ahead": {"prefetch_bytes": 1 << 30},
    "all resident": {"resident_bytes": 1 << 30},
    "fp32": {"param_dtype": None},
    "reduced in fp32": {"reduce_dtype": torch.float32},
    "activations on host": {"activations": "host"},
    "two micro-batches": {"accumulate": 2},
    "updates in backward": {"update_in_backward": True, "max_grad_norm": None},
}


def bits(kind: str, placements: list[str], options: dict[str, Any]) -> dict[str, list[int]]:
    """For each placement, where this rank's run has other bits than with all on the host and nothing overlapped."""
    device = device_of_rank(kind)
    sized = runs.sized(device, (512, 8, 64), (64, 6, 512) if "activations" in options else (64, 6, 64))
    with runs.small_tiles(device):
        first = runs.history(device, "host", sized, tiers={"overlap": False}, **options)
        return {
            placement: differing(runs.history(device, (runs.BELOW | runs.MIXED)[placement], sized, **options), first)
            for placement in placements
        }


@pytest.mark.promise("device-bits", "device-ranks")
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("option", OPTIONS)
def test_the_bits_of_host_memory(device, device_ranks, needs_device, option, placement):
    needs_device("a device for each rank")
    for found in device_ranks.run(bits, device.type, [placement], OPTIONS[option]):
        assert found == {placement: []}


def twice(kind: str, placement: str, options: dict[str, Any]) -> list[int]:
    device = device_of_rank(kind)
    with runs.small_tiles(device):
        sized = runs.sized(device, (512, 8, 64))
        first, second = (runs.history(device, runs.MIXED[placement], sized, **options) for _ in range(2))
    return differing(first, second)


@pytest.mark.parametrize("option", ["stage 3", "two micro-batches"])
@pytest.mark.parametrize("placement", MIXED)
def test_the_same_bits_twice_where_the_device_updates_some(device, device_ranks, needs_device, placement, option):
    needs_device("a device for each rank")
    assert device_ranks.run(twice, device.type, placement, OPTIONS[option]) == [[]] * device_ranks.size


def interrupted(kind: str) -> bool:
    """Every rank abandons a forward and a backward in the same place and goes on."""
    device = device_of_rank(kind)
    with runs.small_tiles(device):
        found = []
        for stops in (False, True):
            run = runs.Run(device, "host", runs.sized(device, (512, 8, 64)))
            for number in range(3):
                if stops:
                    handle = run.model.blocks[3].register_forward_pre_hook(_raise)
                    with pytest.raises(RuntimeError, match="stopped"):
                        run.backward(number)
                    handle.remove()
                    run.optimizer.zero_grad()
                run.step(number)
            found.append(run.masters())
            run.close()
    return not differing(*found)


def _raise(*_: Any) -> None:
    raise RuntimeError("stopped by the test")


def test_a_forward_that_raises_on_all_ranks_leaves_no_trace(device, device_ranks, needs_device):
    needs_device("a device for each rank")
    assert all(device_ranks.run(interrupted, device.type))


def reentrant(kind: str, placement: str) -> list[int]:
    """Recomputed activations: units are gathered again inside backward."""
    import zero_core

    device = device_of_rank(kind)
    rank = torch.distributed.get_rank()
    found = []
    with runs.small_tiles(device):
        for placed in ("host", placement):
            torch.manual_seed(1)
            model = checkpointed().to(device)
            store = runs.tiered((runs.BELOW | runs.MIXED)[placed])
            optimizer = zero_core.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), store=store)
            losses = []
            for step in range(STEPS):
                loss = loss_of(model, batch(step, rank, device, torch.float32))
                losses.append(kit.step(optimizer, loss))
            found.append([loss.cpu() for loss in losses])
            optimizer.close()
    return differing(*found)


@pytest.mark.parametrize("placement", ["nvme", "classic"])
def test_checkpointed_blocks_have_the_bits_of_host_memory(device, device_ranks, needs_device, placement):
    needs_device("a device for each rank")
    assert device_ranks.run(reentrant, device.type, placement) == [[]] * device_ranks.size
