"""Offers the functions that users call, and builds a sharded model for them."""
