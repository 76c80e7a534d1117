"""Collectives between ranks, as torch's or as messages, and what is said when ranks leave the common order."""
