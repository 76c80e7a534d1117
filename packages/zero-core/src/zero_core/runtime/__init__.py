"""Runs forward and backward: a unit's memory, the hooks, the order of gathers and reductions."""
