"""Cuts shards into tiles, gives each a tier, and counts the bytes. Moves nothing."""
