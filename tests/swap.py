"""What needs a torch that can put memory under a storage."""

import pytest

from zero_core.runtime import residency

needs_swap = pytest.mark.skipif(not residency.CAN_SWAP, reason="torch before 2.12, or ZERO_CORE_SWAP=0")
