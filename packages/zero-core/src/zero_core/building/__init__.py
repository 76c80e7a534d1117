"""Turns a model into units: first values, names, tiling, and which modules are wrapped."""
