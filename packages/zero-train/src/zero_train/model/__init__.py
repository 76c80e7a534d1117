"""Builds models, reads pretrained ones, and writes samples."""
