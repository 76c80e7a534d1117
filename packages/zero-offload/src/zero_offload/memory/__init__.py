"""Owns host memory: the arena, the slots that values pass through, and the transfers that use them."""
