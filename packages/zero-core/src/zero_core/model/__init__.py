"""Turns a model into units: first values, names, shared memory, and which modules are units."""
