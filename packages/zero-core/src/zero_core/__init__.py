"""ZeRO stages 0-3 for any PyTorch module."""

__version__ = "0.1.0"
