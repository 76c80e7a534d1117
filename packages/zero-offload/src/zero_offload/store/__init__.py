"""Implements zero-core's ShardStore over tiers: attach, updates, sleep, and runs left on disk."""
