"""Keeps the path by which programs for 0.2 import `Speaker`."""

from zero_train.cli.generate import Speaker as Speaker
