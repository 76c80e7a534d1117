"""Optimizers of other packages that the list knows, without a word of the user's: the bits of plain torch.

`nox -s optimizers` compares all of them, and writes the list; these are spread over it.
"""

import copy
import json
from importlib import metadata, util

import pytest
import torch
from torch import nn

import zero_core
from tests.optimizers.compare import Net, make, trained
from tests.tiers import kept_cases
from zero_core import checkpoint
from zero_core.optim import contracts
from zero_core.optim.optimizer import ShardedOptimizer
from zero_offload import MemoryByteStore, TieredStore

LIST = json.loads(contracts._LIST.read_text(encoding="utf-8"))
NAMES = [(module, name) for module in ("pytorch_optimizer", "optimi") for name in LIST[module]["optimizers"]]
BY_ITSELF = [each for each in NAMES if LIST[each[0]]["optimizers"][each[1]][0] == contracts.BY_ITSELF]
COVER = [BY_ITSELF[n] for n in sorted(kept_cases(len(BY_ITSELF), 12))]


TOGETHER = [each for each in NAMES if LIST[each[0]]["optimizers"][each[1]][0] == contracts.TOGETHER]


def there(module):
    if util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")


@pytest.mark.promise("by-itself")
@pytest.mark.parametrize(("module", "name"), COVER)
def test_a_listed_optimizer_has_plain_torchs_bits(ranks, module, name):
    there(module)
    wanted = trained(module, name, None)
    (found,) = ranks(1).run(trained, module, name, "nvme", None)
    one, other = ranks(2).run(trained, module, name, "two ranks", None)
    for key, value in wanted.items():
        assert all(torch.equal(each[key], value) for each in (found, one, other)), key


def begun(module, name, on_tier):
    """A model and its optimizer: the plain one, or in shards on NVMe that clip gradients of two micro-batches."""
    torch.manual_seed(0)
    model = Net()
    optimizer = make(module, name, model)
    if on_tier:
        store = TieredStore("nvme", "nvme", "nvme", nvme=MemoryByteStore(), accumulate=2)
        optimizer = zero_core.shard(model, optimizer, units=[nn.Sequential], store=store, max_grad_norm=0.5)
    return model, optimizer


def steps(model, optimizer, first, last):
    """Clipped as the sharded optimizer clips: by the norm in double precision."""
    for step in range(first, last):
        for micro in range(2):
            generator = torch.Generator().manual_seed(2 * step + micro)
            tokens = torch.randint(0, 11, (3, 5), generator=generator)
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        if not isinstance(optimizer, ShardedOptimizer):
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norm = float(sum(g.double().square().sum() for g in gradients).sqrt())
            for gradient in gradients:
                gradient.mul_(min(1.0, 0.5 / (norm + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def farthest(found, wanted):
    return max(float((value - wanted[key]).abs().max()) for key, value in found.items())


@pytest.mark.parametrize(("module", "name"), COVER)
def test_a_listed_optimizer_accumulates_clips_and_goes_on_as_plain_torch(module, name, tmp_path):
    """From its state dict, and from a checkpoint. A plain run goes on from a state dict, too, as attributes of the
    optimizer are in none."""
    there(module)
    torch.manual_seed(0)
    start = {key: value.clone() for key, value in Net().state_dict().items()}
    model, optimizer = begun(module, name, False)
    weights = steps(model, optimizer, 0, 4)
    again, resumed = begun(module, name, False)
    again.load_state_dict(weights)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    wanted = steps(again, resumed, 4, 8)
    close = 1e-6 * farthest(wanted, start)  # a norm's last bit

    model, optimizer = begun(module, name, True)
    found = steps(model, optimizer, 0, 4)
    assert farthest(found, weights) <= close
    full = optimizer.full_state_dict()
    checkpoint.save(tmp_path / "saved", model, optimizer)
    optimizer.close()
    again, resumed = begun(module, name, True)
    again.load_state_dict(found)
    resumed.load_state_dict(full)
    assert farthest(steps(again, resumed, 4, 8), wanted) <= close
    resumed.close()
    again, resumed = begun(module, name, True)
    checkpoint.load(tmp_path / "saved", again, resumed)
    assert farthest(steps(again, resumed, 4, 8), wanted) <= close
    resumed.close()


@pytest.mark.promise("together")
@pytest.mark.parametrize(("module", "name"), TOGETHER)
def test_one_that_is_listed_as_together_has_plain_torchs_bits_on_one_device(module, name):
    there(module)
    threads = torch.get_num_threads()
    try:
        wanted, found = trained(module, name, None), trained(module, name, "device", None)
    finally:
        torch.set_num_threads(threads)
    assert [key for key, value in wanted.items() if not torch.equal(found[key], value)] == []


def test_the_list_holds_for_options_that_are_on_or_off_as_they_were_compared():
    there("pytorch_optimizer")
    model = torch.nn.Linear(2, 2)
    listed = make("pytorch_optimizer", "Lamb", model)
    assert contracts.contract_of(listed) == contracts.BY_ITSELF
    listed.param_groups[1]["pre_norm"] = True  # a norm over all gradients
    assert contracts.contract_of(listed) == contracts.TOGETHER
    assert str(contracts.apart(listed)).startswith("Lamb has no contract with pre_norm=True (compared: False), so its")


def test_the_list_holds_for_versions_that_were_compared(monkeypatch):
    there("pytorch_optimizer")
    listed = make("pytorch_optimizer", "Adan", torch.nn.Linear(2, 2))
    monkeypatch.setattr(metadata, "version", lambda distribution: "99.0")
    contracts._entry.cache_clear()
    assert contracts.contract_of(listed) == contracts.TOGETHER
    monkeypatch.undo()
    contracts._entry.cache_clear()
    assert contracts.contract_of(listed) == contracts.BY_ITSELF
