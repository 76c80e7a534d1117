"""The implementations that zero-core has keep the promises of Collectives."""

from __future__ import annotations

import pytest

from zero_core.comm import Axis, Collectives, MachineCollectives, MessageCollectives, TorchCollectives
from zero_core.comm.machines import over_gloo
from zero_core.comm.ranks import BY_BACKEND
from zero_core.pool import Pool
from zero_core.testing import CollectivesSuite


class OnGloo(CollectivesSuite):
    @pytest.fixture(autouse=True)
    def _pools(self, group_of):
        self.pool = group_of


class TestMessages(OnGloo):
    collectives = MessageCollectives


class TestTorch(OnGloo):
    collectives, rows = TorchCollectives, False  # gloo has no rows of different sizes, and never runs these here


def in_pairs(axis: Axis, pool: Pool) -> MachineCollectives:
    """Machines of two ranks that are not neighbours."""
    half = axis.size // 2
    return MachineCollectives(axis, pool, [[rank, rank + half] for rank in range(half)])


def on_two_machines(axis: Axis, pool: Pool) -> MachineCollectives:
    """Of three ranks each, where 16-bit gradients are added up in fp32 before they leave the machine."""
    half = axis.size // 2
    return MachineCollectives(axis, pool, [range(half), range(half, axis.size)])


class TestMachinesOfTwo(OnGloo):
    collectives, ranks = in_pairs, (4,)


class TestMachinesOfThree(OnGloo):
    collectives, ranks = on_two_machines, (6,)


def test_gloo_has_messages_and_machines():
    assert BY_BACKEND == {"gloo": over_gloo}


@pytest.mark.parametrize("kind", [MachineCollectives, MessageCollectives, TorchCollectives])
def test_they_satisfy_the_protocol(kind):
    assert issubclass(kind, Collectives)
