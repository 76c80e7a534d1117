"""Collectives between ranks: the protocol, and torch's, messages and messages over machines as its implementations."""

from .collectives import Axis, Collectives, CollectivesFactory, RowCollectives, Work
from .machines import MachineCollectives
from .native import TorchCollectives
from .peers import MessageCollectives

__all__ = [
    "Axis",
    "Collectives",
    "CollectivesFactory",
    "MachineCollectives",
    "MessageCollectives",
    "RowCollectives",
    "TorchCollectives",
    "Work",
]
