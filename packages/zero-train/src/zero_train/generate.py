"""Exports `Speaker` of cli.generate under its public path."""

from zero_train.cli.generate import Speaker as Speaker
