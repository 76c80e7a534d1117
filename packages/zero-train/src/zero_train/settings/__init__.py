"""Composes, checks and completes the configuration."""
