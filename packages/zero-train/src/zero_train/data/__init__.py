"""Reads text and rows, and turns them into tokens."""
