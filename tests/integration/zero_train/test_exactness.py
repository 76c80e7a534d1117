"""The same bits wherever the states lie, whatever moves and updates them: with the real slab and the real SIMD step.

A pairwise cover of the matrix, or with --all-exactness all of it, on 1 and 2 ranks. What would have to break: a tier, a
tile size, a thread or an I/O backend that a value's bits depend on; a read that overtakes its write; an update of
another step's gradient. Forward and backward run on one thread throughout, as their sums are torch's.
"""

import os
from typing import Any

import pytest
import torch
from torch import nn

import zero_core
import zero_nvme
import zero_offload
import zero_optim_cpu
from tests import kit
from tests.covers import everything, identifier, pairwise
from tests.integration.zero_offload.training import Model

HALF = {"host": 0.5, "nvme": 0.5}
PLACEMENTS: dict[str, Any] = {"host": "host", "nvme": "nvme", "half": HALF}
FACTORS: dict[str, tuple[Any, ...]] = {
    "placement": tuple(PLACEMENTS),
    "overlap": (True, False),
    "tile": (1, 2, 4),  # Mi elements; a unit has 2.1 Mi on one rank
    "threads": (1, 2, "cores"),  # of the update; on cores of their own tiles are under way in a row
    "backend": ("io_uring", "threads"),
    "accumulate": (1, 4),
}
WIDTH, LAYERS, VOCABULARY, STEPS = 512, 2, 64, 2


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = (everything if metafunc.config.getoption("--all-exactness") else pairwise)(FACTORS)
        metafunc.parametrize("case", cases, ids=identifier)


def step_of(threads: int | str) -> zero_optim_cpu.CpuStep:
    if threads == "cores":
        return zero_optim_cpu.CpuStep(cores=sorted(os.sched_getaffinity(0)))
    return zero_optim_cpu.CpuStep(threads=threads)


def outcome(folder: str, case: dict[str, Any]) -> dict[str, Any]:
    """What a run of `case` leaves: losses, norms, every master, moment and parameter. On every rank."""
    torch.manual_seed(0)
    model = Model(WIDTH, LAYERS, VOCABULARY)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    generator = torch.Generator().manual_seed(rank)
    placed = dict.fromkeys(("parameters", "gradients", "optimizer"), PLACEMENTS[case["placement"]])
    with zero_nvme.Slab([folder], backend=case["backend"], allow_memory=True) as slab:
        store = zero_offload.TieredStore(
            **placed,
            nvme=slab,
            step=step_of(case["threads"]),
            tile_numel=case["tile"] << 20,
            overlap=case["overlap"],
        )
        optimizer = zero_core.shard(
            model, torch.optim.AdamW(model.parameters(), lr=1e-2), store=store, param_dtype=torch.bfloat16,
            max_grad_norm=1.0,
        )  # fmt: skip
        losses, norms = [], []
        for _ in range(STEPS):
            for micro in range(case["accumulate"]):
                tokens = torch.randint(0, VOCABULARY, (2, 12), generator=generator)
                loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
                (loss / case["accumulate"]).backward()
                losses.append((micro, loss.item()))
            optimizer.step()
            optimizer.zero_grad()
            norms.append(float(optimizer.grad_norm))
        units = range(len(zero_core.units(model)))
        sizes = [unit.layout.shard_numel for unit in zero_core.handle(model).units]
        states = [store.read_state(i, name, 0, sizes[i]) for i in units for name in store.state_names()]
        parameters = kit.values(model)
        optimizer.close()
    return {"losses": losses, "norms": norms, "tensors": [*states, *parameters]}


@pytest.fixture(scope="module")
def reference(ranks, tmp_path_factory):
    """By ranks and accumulation: on host, one step after another, tiles larger than any unit, one thread."""
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}

    def run(size: int, accumulate: int) -> list[dict[str, Any]]:
        if (size, accumulate) not in found:
            plain = {name: levels[0] for name, levels in FACTORS.items()}
            case = plain | {"overlap": False, "tile": 4, "backend": "threads", "accumulate": accumulate}
            found[size, accumulate] = ranks(size).run(outcome, str(tmp_path_factory.mktemp("plain")), case)
        return found[size, accumulate]

    return run


@pytest.mark.promise("same-bits")
@pytest.mark.parametrize("size", [1, 2])
def test_same_bits(ranks, tmp_path, reference, case, size):
    try:
        zero_nvme.Slab([str(tmp_path)], backend=case["backend"], allow_memory=True).close()
    except zero_nvme.BackendUnavailable as error:
        pytest.skip(str(error))
    found = ranks(size).run(outcome, str(tmp_path), case)
    for mine, theirs in zip(found, reference(size, case["accumulate"]), strict=True):
        assert mine["losses"] == theirs["losses"]
        assert mine["norms"] == theirs["norms"]
        assert len(mine["tensors"]) == len(theirs["tensors"]) > 10
        assert all(torch.equal(a, b) for a, b in zip(mine["tensors"], theirs["tensors"], strict=True))


def test_the_reference_moved_and_ranks_differ_in_what_they_saw(reference):
    """Else equality would say little."""
    one, two = reference(1, 1)[0], reference(2, 1)
    assert one["losses"][0] != one["losses"][-1] and one["norms"][0] > 0
    assert two[0]["losses"] != two[1]["losses"] and two[0]["norms"] == two[1]["norms"]
