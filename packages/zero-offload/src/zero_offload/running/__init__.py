"""Runs beside the training loop: the update thread, and copies to and from a device."""
