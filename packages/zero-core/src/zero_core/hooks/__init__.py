"""Runs code before and after each module, and keeps the order in which units are used."""
