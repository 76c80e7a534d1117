"""A device that updates a share of the tiles whose states are elsewhere: the bits, the memory, and what is refused.

Fails if a tile outside of the share is updated on the device or one inside on the host, if a copy is used before it
came, or if the plan does not count the memory that tiles come into. The step is the slow reference on both sides, so
that device and host round alike; with `CpuStep` on the host the share decides about bits.
"""

import gc
from typing import Any

import pytest
import torch

from tests.device.zero_core.runs import Wide, differing
from tests.device.zero_core.test_memory import allocated, warm_up
from tests.device.zero_offload import runs
from tests.device.zero_offload.test_muon import options
from zero_offload import Hardware, TieredStore, TorchStep, plan, step_for
from zero_offload.errors import PlacementError

pytestmark = pytest.mark.promise("update-share")
GPU = (1024, 6, 64)


@pytest.fixture
def stepped(monkeypatch) -> list[str]:
    """The device of each tile that the reference updates."""
    step, found = TorchStep.update, list[str]()

    def watched(self: Any, tile: Any, *rest: Any) -> None:
        found.append(tile.parameter.device.type)
        step(self, tile, *rest)

    monkeypatch.setattr(TorchStep, "update", watched)
    return found


@pytest.mark.parametrize(
    "placement, share, more",
    [
        ("host", 0.3, {}),
        ("host", 1.0, {"step": "split"}),
        ("nvme", 0.3, {"param_dtype": None}),
        ("classic", 0.3, {"step": "split"}),
        ("halves", 1.0, {"update_in_backward": True, "max_grad_norm": None}),
        ("thirds", 1 / 3, {"accumulate": 2}),
    ],
    ids=str,
)
def test_the_bits_do_not_depend_on_the_share_where_host_and_device_round_alike(device, stepped, placement, share, more):
    sized, where, more = runs.sized(device, GPU), (runs.BELOW | runs.MIXED)[placement], dict(more)
    tiers = {"step": TorchStep(more.pop("step", "fp32"))}
    with runs.small_tiles(device):
        expected = runs.history(device, where, sized, tiers={**tiers, "overlap": False}, **more)
        alone = len(stepped)
        found = runs.history(device, where, sized, tiers={**tiers, "update_share": share}, **more)
    assert not differing(found, expected)
    with_share = stepped[alone:]
    assert len(with_share) == alone > 0
    visits = with_share.count(device.type) if device.type != "cpu" else None  # a CPU that plays a device is one
    assert visits is None or abs(visits - share * alone) <= 0.1 * alone


def test_beside_matrices_that_are_updated_whole(device):
    given = options("muon", torch.bfloat16)
    with runs.small_tiles(device):
        expected = runs.history(device, "host", (64, 3, 16), tiers={"overlap": False}, **given)
        found = runs.history(device, "nvme", (64, 3, 16), tiers={"update_share": 1.0}, **given)
    assert not differing(found, expected)


def test_the_device_holds_what_was_planned_and_keeps_none_of_it(device, needs_device):
    needs_device("bytes allocated")
    width, blocks, rows = runs.sized(device, (1024, 4, 8), (256, 2, 8))
    warm_up(width, torch.randn(rows, width, device=device, dtype=torch.bfloat16))
    kinds = dict.fromkeys(runs.KINDS, "host")
    hardware = Hardware(device=device.type, device_gib=60, host_gib=60, nvme_gib=60, update_share=0.5)
    with runs.small_tiles(device):
        model = Wide(width, blocks)
        step = step_for(torch.optim.AdamW(model.parameters()), TorchStep())
        how = {"tile_numel": runs.tile_numel(), "parameter_dtype": torch.bfloat16, "step": step, "prefetch_bytes": 1}
        figures = plan(model, hardware, **kinds, **how)
        none = plan(model, hardware, **kinds, **how, update_share=0.0)
        store = TieredStore(plan=figures, step=TorchStep(), streams=runs.streams())
        run = runs.Run(device, store, (width, blocks, rows), prefetch_bytes=1)
        run.step()
        store.wait()
        between = allocated(device)

        def update() -> None:
            run.optimizer.step()
            store.wait()

        run.backward(1)
        held, peak = runs.stats_of(device, update)
        gc.collect()
        assert allocated(device) <= between + 4096
        run.close()
    scratch = figures.store.device_scratch_bytes
    assert none.store.device_scratch_bytes == 0 == none.account.visits[0]
    elements = sum(p.numel() for p in model.parameters())
    assert figures.account.visits[0] == pytest.approx(0.5 * (10 + 2 + 2) * elements, rel=0.2)
    assert 0.6 * scratch <= peak - held <= scratch


def test_a_share_that_cannot_be_is_refused(device):
    for share in (1.5, -0.1, True, float("nan"), "half"):
        with pytest.raises(PlacementError, match="is not a number from 0 to 1: .*Leave it out for 0"):
            TieredStore(update_share=share)
        with pytest.raises(ValueError, match="is not a number from 0 to 1"):
            Hardware(update_share=share)
    with pytest.raises(ValueError, match=r"update_share=0.3 needs a device .* leave it out"):
        plan([1 << 20], Hardware(host_gib=8), update_share=0.3)
    step = TorchStep()
    step.layout_name = "int8"
    with runs.discrete(device), pytest.raises(PlacementError, match="with states in fp32 .*'int8'.*: leave it out"):
        runs.Run(device, runs.tiered("host", update_share=0.3, step=step), (64, 2, 8))
    model = torch.nn.Linear(8, 8)
    with pytest.raises(PlacementError, match=r"update_share=0.3 needs a device .* leave it out"):
        runs.zero_core.shard(model, torch.optim.SGD(model.parameters()), store=TieredStore(update_share=0.3))
