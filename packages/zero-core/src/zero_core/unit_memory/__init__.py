"""Gives a unit its unsharded memory, decides how long it stays, and collects its gradient until backward is over."""
