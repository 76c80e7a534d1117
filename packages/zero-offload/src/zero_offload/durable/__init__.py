"""Keeps each step of a run on disk, so that another process continues after a kill."""
