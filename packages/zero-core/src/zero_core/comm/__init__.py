"""Collectives between ranks: the protocol, and torch's and messages as its implementations."""

from .collectives import Axis, Collectives, CollectivesFactory, Work
from .native import TorchCollectives
from .peers import MessageCollectives

__all__ = ["Axis", "Collectives", "CollectivesFactory", "MessageCollectives", "TorchCollectives", "Work"]
