"""Runs a mixture's stacked experts group by group."""
