"""What is assembled: a store where the plan needs one, none where everything stays on a device of its own."""

import dataclasses

import pytest

pytest.importorskip("transformers")
pytest.importorskip("zero_optim_cpu")
pytest.importorskip("zero_offload")

from zero_train import config, engine, planning
from zero_train.ranks import Ranks


@pytest.fixture
def auto():
    """A run with offload=auto on a GPU of `device_gib` that is only described."""

    def make(device_gib):
        composed = config.compose(
            ["recipe=tiny", "precision=bf16", "run.dir=unused", "offload=auto", "offload.nvme_paths=[/]",
             "hardware.device=cuda", f"hardware.device_gib={device_gib}", "hardware.host_gib=8", "hardware.nvme_gib=8"]
        )  # fmt: skip
        draft = engine.draft(composed)
        return composed, draft, planning.make(composed, draft.model, Ranks(), draft.step)

    return make


def test_what_fits_on_a_gpu_is_given_no_store(auto):
    composed, draft, plan = auto(8)
    assert dict(plan.placements) == dict.fromkeys(("parameters", "gradients", "optimizer"), "device")
    assert not plan.needs_store
    assert engine.make_store(composed, draft, plan, None) is None


def test_assembled_without_a_store_the_device_store_runs_the_optimizer(auto):
    """On the CPU here, by the plan of the GPU: what matters is that nobody hands the shards to a tiered store."""
    composed, draft, plan = auto(8)
    with engine.assembled(draft, plan, composed, Ranks()) as ready:
        assert ready.store is None
        assert ready.usage().device_bytes == ready.resident_bytes >= plan.total("device")
        assert ready.usage().host_bytes == 0


def test_what_does_not_fit_gets_one(auto):
    composed, draft, plan = auto(1)  # all of it reserved: nothing is left for states
    composed = dataclasses.replace(composed)
    assert plan.needs_store
    assert all("device" not in str(placement) for placement in plan.placements.values())
    with_store = engine.make_store(composed, draft, plan, None) if not plan.total("nvme") else object()
    assert with_store is not None
