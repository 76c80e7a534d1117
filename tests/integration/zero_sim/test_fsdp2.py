"""FSDP2's own training step on two ranks: the CPU's results and no race; and its waits, each removed in turn."""

import collections
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.unit.zero_sim.two_ranks import SIZE, TwoRanks

zero_sim = pytest.importorskip("zero_sim", exc_type=ImportError)

BLOCKS = 4
Site = tuple[str, str, int]  # file, function and line of a wait


@pytest.fixture(scope="module")
def two() -> Iterator[TwoRanks]:
    ranks = TwoRanks()
    yield ranks
    ranks.close()


def train(rank: int, device: str, steps: int = 3, offload: bool = False) -> list[torch.Tensor]:
    """Trains blocks of two linears with FSDP2 and AdamW. Returns the losses and this rank's shards."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(BLOCKS)]
    model = nn.Sequential(*blocks).to("cpu" if offload else device)
    options: dict[str, Any] = {"mesh": dist.device_mesh.init_device_mesh(torch.device(device).type, (SIZE,))}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy()
    for block in model:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # On the device before the first step: a copy from pageable memory would order everything before it.
    inputs = torch.randn(steps, SIZE, 4, 32, generator=torch.Generator().manual_seed(1))[:, rank].to(device)
    losses = []
    for x in inputs:
        loss = model(x).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [t.cpu() for t in (*losses, *(p.to_local().detach() for p in model.parameters()))]


def beside_the_cpu(rank: int, offload: bool) -> tuple[float, list[str]]:
    zero_sim.configure(latency_us=100, jitter_us=300)
    expected = train(rank, "cpu")
    found = train(rank, f"sim:{rank}", offload=offload)
    zero_sim.races.synchronize()
    distance = max((a - b).abs().max().item() for a, b in zip(expected, found, strict=True))
    return distance, [str(race) for race in zero_sim.take_races()]


@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "CPUOffloadPolicy"])
def test_a_training_step_is_the_cpus_without_a_race(two: TwoRanks, offload: bool):
    """Fails if a collective, a copy or autograd is ordered in another way than FSDP2 expects of CUDA."""
    for distance, races in two.run(beside_the_cpu, offload):
        assert distance <= 1e-6 and not races


class Waits:
    """Counts the waits of torch's fully_shard by where they are, and leaves one of them out."""

    def __init__(self) -> None:
        self.counts: collections.Counter[Site] = collections.Counter()
        self.removed: Site | None = None
        for owner, name in ((torch.sim.Stream, "wait_event"), (torch.sim.Stream, "wait_stream")):
            setattr(owner, name, self._replaced(getattr(owner, name)))

    def _replaced(self, wait: Callable[..., None]) -> Callable[..., None]:
        def counted(*args: Any) -> None:
            code, line = sys._getframe(1).f_code, sys._getframe(1).f_lineno
            site = (Path(code.co_filename).name, code.co_name, line)
            if "_fully_shard" in code.co_filename:
                self.counts[site] += 1
            if site != self.removed:
                wait(*args)

        return counted


def each_wait_removed(rank: int) -> list[tuple[Site, int, bool]]:
    """Returns for each wait: where it is, the races without it, and whether the results are the same bits then."""
    warnings.simplefilter("ignore")
    zero_sim.configure(latency_us=100, jitter_us=200)
    waits, results = Waits(), []
    expected = train(rank, f"sim:{rank}", steps=2)
    assert not zero_sim.take_races()
    for site in sorted(waits.counts):
        waits.removed = site
        found = train(rank, f"sim:{rank}", steps=2)
        waits.removed = None
        zero_sim.races.synchronize()
        results.append((site, len(zero_sim.take_races()), all(map(torch.equal, expected, found))))
    return results


def test_each_removed_wait_is_reported_or_changes_nothing(two: TwoRanks):
    """Fails if the detector misses a wait that FSDP2 needs: one without which results differ and nothing is reported.

    FSDP2 makes some waits twice over, of which either alone may go.
    """
    found = two.run(each_wait_removed)
    for results in found:
        assert [site for site, races, same in results if not races and not same] == []
        reported = {function for (_, function, _), races, _ in results if races}
        assert {"foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce"} <= reported, results
