"""Reads, updates and writes tiles behind the next forward."""
