"""A Trainer that is given torch.optim.Muon and AdamW as one optimizer: planned, on tiers, as a plain Trainer has it."""

import pytest
import torch
from transformers import Trainer

import zero_core
import zero_optim_cpu
from tests.integration.zero_hf.trainers import Sharded, llama, train

pytestmark = pytest.mark.promise("hf-muon")


def both(model):
    inside = {id(p) for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name}
    matrices = [p for p in model.parameters() if id(p) in inside]
    others = [p for p in model.parameters() if id(p) not in inside]
    return zero_core.JointOptimizer(torch.optim.Muon(matrices, lr=0.02), zero_optim_cpu.AdamW(others, lr=3e-3))


def run(kind, folder, **options):
    model = llama()
    return train(kind, folder, model=model, optimizers=(both(model), None), learning_rate=1.0, **options)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")
def test_a_trainer_is_given_muon_and_adamw(tmp_path):
    _, expected = run(Trainer, tmp_path / "plain")
    for number, zero in enumerate(({"stage": 3}, {"offload": "host"}, {"offload": "host", "param_dtype": "bf16"})):
        made, logs = run(Sharded, tmp_path / str(number), zero=zero)
        assert logs.losses == pytest.approx(expected.losses, rel=1e-3 if "param_dtype" not in zero else 0.05)
        if zero.get("offload"):
            plan, store = made.zero_run.plan, made.zero_run.store
            assert plan.store.held == store.describe().held
            tiles = (tile.uncut for unit in store.describe().units for tile in unit.tiles)
            uncut = {each.name for each in tiles if each is not None}
            assert len(uncut) == 14 and all("layers" in name for name in uncut), "seven matrices of each layer"
            assert plan.held["host", "buffers"] >= plan.store.scratch_bytes > 0
        made.end()
