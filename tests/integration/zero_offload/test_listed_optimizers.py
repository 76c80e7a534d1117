"""Optimizers of other packages that the list knows, without a word of the user's: the bits of plain torch.

`nox -s optimizers` compares all of them, and writes the list; these are spread over it.
"""

import json
from functools import partial
from importlib import metadata, util

import pytest
import torch
from torch import nn

import zero_core
from tests import kit
from tests.integration.zero_offload.training import tiered
from tests.optimizers.compare import Net, make, trained
from tests.reference import Reference
from tests.tiers import kept_cases
from zero_core import checkpoint
from zero_core.optim import contracts

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


@pytest.mark.parametrize(("module", "name"), COVER)
def test_a_listed_optimizer_accumulates_clips_and_keeps_its_states(module, name, tmp_path):
    """In shards on NVMe. The states of a checkpoint and of a state dict are those that were."""
    there(module)

    def begun():
        torch.manual_seed(0)
        model = Net()
        options = {"store": tiered("nvme", accumulate=2), "max_grad_norm": 0.5}
        return model, zero_core.shard(model, make(module, name, model), units=[nn.Sequential], **options)

    def loss_of(model, tokens):
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    torch.manual_seed(0)
    parts = torch.randint(0, 11, (4, 2, 3, 5))
    torch.manual_seed(0)
    reference = Reference(Net(), lambda masters: make(module, name, nn.ParameterList(masters)), max_grad_norm=0.5)
    model, optimizer = begun()
    for two in parts:
        reference.step(list(two), loss_of)
        for tokens in two:
            (loss_of(model, tokens) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(kit.values(model), [p.detach() for p in reference.masters], rtol=1e-5, atol=1e-6)
    full = optimizer.full_state_dict()
    checkpoint.save(tmp_path, model, optimizer)
    optimizer.close()
    for load in (lambda model, mine: mine.load_state_dict(full), partial(checkpoint.load, tmp_path)):
        again, resumed = begun()
        load(again, resumed)
        found = resumed.full_state_dict()["state"]
        assert all(same(found[number][key], each[key]) for number, each in full["state"].items() for key in each)
        resumed.close()


def same(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


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
    assert str(contracts.apart(listed)).startswith(
        "optimizer Lamb has no optimizer_contract with pre_norm=True (compared: False), so its"
    )


def test_the_list_holds_for_versions_that_were_compared(monkeypatch):
    there("pytorch_optimizer")
    listed = make("pytorch_optimizer", "Adan", torch.nn.Linear(2, 2))
    monkeypatch.setattr(metadata, "version", lambda distribution: "99.0")
    contracts._entry.cache_clear()
    assert contracts.contract_of(listed) == contracts.TOGETHER
    monkeypatch.undo()
    contracts._entry.cache_clear()
    assert contracts.contract_of(listed) == contracts.BY_ITSELF
