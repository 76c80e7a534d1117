"""Runs the command line: the run, sweeps, answers of an exported model, unused keys."""
