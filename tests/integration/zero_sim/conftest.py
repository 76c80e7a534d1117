"""Skips this folder, with the reason, where zero-sim cannot be built."""

from tests.unit.zero_sim.conftest import in_order

__all__ = ["in_order"]
