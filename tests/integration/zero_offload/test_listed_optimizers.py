"""Optimizers of other packages that the list knows, without a word of the user's: the bits of plain torch.

`nox -s optimizers` compares all of them, and writes the list; these are spread over it.
"""

from __future__ import annotations

import json
from importlib import metadata, util

import pytest
import torch

from tests.optimizers.compare import make, trained
from tests.tiers import kept_cases
from zero_core.optim import contracts

LIST = json.loads(contracts._LIST.read_text(encoding="utf-8"))
NAMES = [(module, name) for module in ("pytorch_optimizer", "optimi") for name in LIST[module]["optimizers"]]
BY_ITSELF = [each for each in NAMES if LIST[each[0]]["optimizers"][each[1]][0] == contracts.BY_ITSELF]
COVER = [BY_ITSELF[n] for n in sorted(kept_cases(len(BY_ITSELF), 25))]


TOGETHER = [each for each in NAMES if LIST[each[0]]["optimizers"][each[1]][0] == contracts.TOGETHER]


def there(module):
    if util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")


@pytest.mark.parametrize(("module", "name"), COVER)
def test_a_listed_optimizer_has_plain_torchs_bits(ranks, module, name):
    there(module)
    wanted = trained(module, name, None)
    (found,) = ranks(1).run(trained, module, name, "nvme", None)
    one, other = ranks(2).run(trained, module, name, "two ranks", None)
    for key, value in wanted.items():
        assert all(torch.equal(each[key], value) for each in (found, one, other)), key


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


def test_the_list_holds_for_versions_that_were_compared(monkeypatch):
    there("pytorch_optimizer")
    listed = make("pytorch_optimizer", "Adan", torch.nn.Linear(2, 2))
    monkeypatch.setattr(metadata, "version", lambda distribution: "99.0")
    contracts._entry.cache_clear()
    assert contracts.contract_of(listed) == contracts.TOGETHER
    monkeypatch.undo()
    contracts._entry.cache_clear()
    assert contracts.contract_of(listed) == contracts.BY_ITSELF
