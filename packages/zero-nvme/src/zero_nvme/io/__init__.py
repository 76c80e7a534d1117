"""Queues reads and writes, on a backend that works on the path."""
