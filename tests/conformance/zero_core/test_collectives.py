"""The implementations that zero-core has keep the promises of Collectives."""

import pytest

from zero_core.comm import Collectives, MessageCollectives, TorchCollectives
from zero_core.testing import CollectivesSuite


class OnGloo(CollectivesSuite):
    @pytest.fixture(autouse=True)
    def _pools(self, group_of):
        self.pool = group_of


class TestMessages(OnGloo):
    collectives = MessageCollectives


class TestTorch(OnGloo):
    collectives, rows = TorchCollectives, False  # gloo has no rows of different sizes, and never runs these here


@pytest.mark.promise("collectives-protocol")
@pytest.mark.parametrize("kind", [MessageCollectives, TorchCollectives])
def test_they_satisfy_the_protocol(kind):
    assert issubclass(kind, Collectives)
