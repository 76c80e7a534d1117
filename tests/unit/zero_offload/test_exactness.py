"""The same bits whatever the placement, overlap, tile size, slots, threads or store: a pairwise cover, or all of it.

`--all-exactness` runs the whole matrix. What would have to break: any order of additions that depends on where a value
lives, a read that overtakes its write, a gradient of another step, a rounding that differs between layouts.
"""

import itertools
from functools import cache
from typing import Any

import pytest
import torch

from tests.covers import everything, identifier, pairwise
from zero_offload import MemoryByteStore, TorchStep

from .harness import LateStep, make, numels_of, same

MI = 1 << 20  # the true chunk: here, and nowhere else in this folder, units have millions of elements

HALF = {"host": 0.5, "nvme": 0.5}
MIXED = {"parameters": {"host": 0.3, "nvme": 0.7}, "gradients": {"host": 0.6, "nvme": 0.4}, "optimizer": HALF}
FACTORS: dict[str, tuple[Any, ...]] = {
    "placement": ("host", "nvme", "half", "mixed"),
    "overlap": (True, False),
    "tile": (1, 2, 4),
    "threads": (1, 2),
    "asynchronous": (True, False),
    "accumulate": (1, 4),
    "slots": (None, 3),
    "layout": ("split", "fp32"),
    "starts": (False, True),
}
PLACEMENTS = {"host": "host", "nvme": "nvme", "half": HALF, "mixed": MIXED}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" not in metafunc.fixturenames:
        return
    cases = (everything if metafunc.config.getoption("--all-exactness") else pairwise)(FACTORS)
    metafunc.parametrize("case", cases, ids=identifier)


def run(case: dict[str, Any], steps: int = 2) -> tuple[Any, ...]:
    before = torch.get_num_threads()
    torch.set_num_threads(case["threads"])
    driver = make(
        PLACEMENTS[case["placement"]],
        MemoryByteStore(asynchronous=case["asynchronous"]),
        tile_numel=case["tile"] * MI,
        overlap=case["overlap"],
        slots=case["slots"],
        step=(LateStep if case["starts"] else TorchStep)(case["layout"]),
        driver={"numels": numels_of(MI)},
    )
    try:
        for _ in range(steps):
            driver.step(case["accumulate"])
        return driver.losses, driver.norms, driver.everything()
    finally:
        driver.store.close()
        torch.set_num_threads(before)


@cache
def reference(accumulate: int) -> tuple[Any, ...]:
    plain = {name: levels[0] for name, levels in FACTORS.items()}
    return run(plain | {"overlap": False, "asynchronous": False, "tile": 4, "accumulate": accumulate})


@pytest.mark.promise("same-bits", "several-tiles")
def test_same_bits(case: dict[str, Any]) -> None:
    losses, norms, values = run(case)
    expected_losses, expected_norms, expected_values = reference(case["accumulate"])
    assert losses == expected_losses
    assert norms == expected_norms
    assert same(values, expected_values)


def test_the_cover_has_every_pair() -> None:
    chosen = pairwise(FACTORS)
    for (a, levels_a), (b, levels_b) in itertools.combinations(FACTORS.items(), 2):
        for pair in itertools.product(levels_a, levels_b):
            assert pair in {(case[a], case[b]) for case in chosen}
