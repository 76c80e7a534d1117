"""Several machines: models train as on one, and secondary shards keep gathers inside a machine.

A rank's machine is told by GROUP_RANK here, as torchrun does it.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("zero_offload")

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from zero_core.comm import Axis
from zero_core.comm.ranks import machines_of as found_machines
from zero_core.comm.ranks import mesh_of_replicas
from zero_core.errors import CollectiveError, StageError
from zero_offload import MemoryByteStore

pytestmark = pytest.mark.promise("machines-recognised")


@contextmanager
def machines_of(beside: int) -> Iterator[None]:
    with mock.patch.dict(os.environ, {"GROUP_RANK": str(dist.get_rank() // beside)}):
        yield


@contextmanager
def counted(beside: int) -> Iterator[list[int]]:
    """Bytes of each message that this rank sends to another machine."""
    sent, send = list[int](), dist.isend

    def isend(values: torch.Tensor, *, group: Any, group_dst: int, tag: int) -> Any:
        if dist.get_global_rank(group, group_dst) // beside != dist.get_rank() // beside:
            sent.append(values.nbytes)
        return send(values, group=group, group_dst=group_dst, tag=tag)

    with mock.patch.object(dist, "isend", isend):
        yield sent


def told_apart(names: list[str]) -> list[list[int]] | None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with mock.patch.dict(os.environ, {"GROUP_RANK": names[rank]}):
        return found_machines(Axis(dist.group.WORLD, rank, size))


@pytest.mark.parametrize("names, found", [("0101", [[0, 2], [1, 3]]), ("0000", None), ("0123", None), ("0001", None)])
def test_machines_with_as_many_ranks_each_are_told_apart(ranks, names, found):
    assert ranks(4).run(told_apart, list(names)) == [found] * 4


def cast(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x.to(next(model.parameters()).dtype)).float().square().mean()


CASES = (
    {"stage": 3},
    {"prefetch_bytes": 1 << 20, "build": toys.adamw},
    {"param_dtype": torch.bfloat16, "tolerance": 0.02, "loss": cast},
    {"stage": 0, "update_in_backward": True, "micro": 1},
    {"secondary_shards": True},
    {"secondary_shards": True, "prefetch_bytes": 0, "update_in_backward": True, "micro": 1},
)


@pytest.mark.parametrize("size, beside", [(4, 2), (6, 3)])
@kit.on_ranks()
def test_models_train_like_the_dense_one(size, beside):
    for options in CASES:
        with machines_of(beside):
            toys.train(toys.Stack, **{"micro": 2, **options})


@pytest.mark.promise("secondary-shards")
@pytest.mark.parametrize("size, beside", [(4, 2), (6, 3)])
@kit.on_ranks()
def test_secondary_shards_keep_gathers_inside_the_machine(size, beside):
    """What is sent to other machines: by the first gather after a change, and by reductions."""
    with machines_of(beside):
        torch.manual_seed(0)
        model = toys.Stack()
        optimizer = zero_core.shard(model, toys.sgd(model.parameters()), secondary_shards=True, prefetch_bytes=0)
    x = toys.data(0, dist.get_rank())
    once = sum(unit.layout.shard_numel for unit in zero_core.units(model)) * 4 * (dist.get_world_size() - beside)

    def sent_by(call: Callable[[], Any]) -> int:
        with counted(beside) as sent:
            call()
        return sum(sent)

    def forward() -> torch.Tensor:
        return toys.loss_of(model, x)

    with torch.no_grad():
        assert [sent_by(forward), sent_by(forward)] == [once, 0]
    for unit in zero_core.units(model):
        assert unit.secondary.part().nbytes == unit.nbytes // beside
    for after_a_step in (0, once):
        backwards = [sent_by(lambda: forward().backward()) for _ in range(2)]
        assert backwards == [after_a_step + once, once]  # gathers, and each time the reduction
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        assert sent_by(forward) == once
        with zero_core.gathered(model):
            model.head.weight.add_(1.0)
        assert [sent_by(forward), sent_by(forward)] == [once, 0]
        zero_core.sleep(model, to=MemoryByteStore())
        zero_core.wake(model)
        assert [sent_by(forward), sent_by(forward)] == [once, 0], "sleep() leaves no copies"


@pytest.mark.advice("keeps gathers inside of its shard groups by itself")
@pytest.mark.promise("secondary-shards")
@pytest.mark.parametrize("beside", [1, 4])
@kit.on_ranks(4)
def test_secondary_shards_need_machines_of_several_ranks(beside):
    """With the way out: to leave it out, or to make shard groups of a mesh."""
    made = [toys.Stack() for _ in range(4)]
    with machines_of(beside):
        with pytest.raises(StageError, match="which needs several machines"):
            zero_core.shard(made[0], secondary_shards=True)
        with pytest.raises(StageError, match="gathers a unit once a step: leave it out"):
            zero_core.shard(made[1], secondary_shards=True, stage=2)
        zero_core.shard(made[2])
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2))
        zero_core.shard(made[3], mesh=mesh)
        with counted(2) as sent, torch.no_grad():
            made[3](toys.data(0, 0))
        assert not sent


class Asking(torch.nn.Module):
    """Layers named as those of another sharded model, which it asks in the middle of its forward."""

    def __init__(self, teacher: Callable[[torch.Tensor], Any] = torch.zeros_like) -> None:
        super().__init__()
        torch.manual_seed(2 if teacher is torch.zeros_like else 3)
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(1600, 1600, bias=False) for _ in range(4)))
        self.others = [teacher]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers[0](x)
        return self.layers[1:](y + self.others[0](x))


@kit.on_ranks(4)
def test_gathers_of_two_models_with_the_same_names_do_not_mix():
    teacher, plain = Asking(), Asking()
    student, wanted = Asking(teacher), Asking(plain)
    options = {"units": [torch.nn.Linear], "prefetch_bytes": 1 << 30}
    with machines_of(2):
        zero_core.shard(teacher, **options)
        zero_core.shard(student, toys.sgd(student.parameters()), **options)
    x = torch.ones(2, 1600)
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(student(x), wanted(x))


@kit.on_ranks(4)
def test_groups_of_some_ranks_have_the_time_out_of_all():
    """torch gives them 30 minutes."""
    with machines_of(2):
        optimizer = zero_core.shard(toys.Stack(), None, secondary_shards=True)
        inside = optimizer.ranks.inside.group
    mesh = mesh_of_replicas(2)
    groups = [dist.group.WORLD, inside, mesh.get_group(0), mesh.get_group(1)]
    found = {group._get_backend(torch.device("cpu")).options._timeout for group in groups}
    assert len(found) == 1 and found != {timedelta(minutes=30)}


@pytest.mark.promise("machines-alone")
def test_a_rank_that_does_not_reach_the_others_as_it_begins_raises_an_error_of_ours(monkeypatch):
    """Fails if gloo's own RuntimeError escapes from shard."""

    def fails(*given, **named):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr("torch.distributed.all_gather_object", fails)
    with pytest.raises(CollectiveError, match="rank 1 of 4 did not reach the others: Connection closed by peer"):
        found_machines(Axis(None, 1, 4))
