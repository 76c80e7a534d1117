"""Counts bytes before anything is allocated."""
