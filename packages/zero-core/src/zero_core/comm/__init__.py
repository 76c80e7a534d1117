"""Collectives between ranks: the protocol, with torch's collectives and messages as its implementations."""

from .collectives import Axis, Collectives, CollectivesFactory, RowCollectives, Work
from .native import TorchCollectives
from .peers import MessageCollectives

__all__ = [
    "Axis",
    "Collectives",
    "CollectivesFactory",
    "MessageCollectives",
    "RowCollectives",
    "TorchCollectives",
    "Work",
]
