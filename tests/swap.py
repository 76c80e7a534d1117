"""What needs a torch that can put memory under a storage."""

import pytest

from zero_core.unit_memory import unit_memory

needs_swap = pytest.mark.skipif(not unit_memory.CAN_SWAP, reason="torch before 2.12, or ZERO_CORE_SWAP=0")
