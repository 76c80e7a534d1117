"""Gives a unit its unsharded memory, decides how long it stays, and keeps its gradient until it is reduced."""
