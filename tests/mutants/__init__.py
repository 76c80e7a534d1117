"""Mutants of the main path, and the first test that catches each: `nox -s mutants`."""
