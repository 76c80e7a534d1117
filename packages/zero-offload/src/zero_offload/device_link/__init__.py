"""Copies units to a discrete device, and gradients from it."""
