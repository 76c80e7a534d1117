"""Keeps and moves the tiles of each kind of value: parameters, gradients, optimizer states."""
