"""Moves values between ranks: the protocol of collectives, implemented by torch's collectives and by messages."""

from .collectives import Axis, Collectives, CollectivesFactory, RowCollectives, TorchCollectives, Work
from .gloo import MessageCollectives

__all__ = [
    "Axis",
    "Collectives",
    "CollectivesFactory",
    "MessageCollectives",
    "RowCollectives",
    "TorchCollectives",
    "Work",
]
