"""Modules called inside backward, by activation checkpointing: whose memory lingers, and until when.

[Note: forward inside backward]
Checkpointing runs a module's forward again during backward, and its hooks with it. Such a call is no new visit: it only
needs the memory, which stays ("lingers") until the next unit is wanted. Being inside backward is asked of autograd, not
remembered, because a backward that raised would leave a wrong memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from .unit import Unit

__all__ = ["Recomputations"]


@dataclass
class _Call:
    """One such call. `sequence`: autograd's counter at its start; `entered`: units that it unsharded."""

    node: int
    sequence: int
    entered: list[Unit]
    done: bool = False


class Recomputations:
    """The calls whose units still linger."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    def begin(self, node: int, sequence: int, entered: list[Unit]) -> None:
        self._calls.append(_Call(node, sequence, entered))

    def end(self, node: int) -> int | None:
        """The innermost unfinished call of the module is done, by return or by exception; its sequence number."""
        for call in reversed(self._calls):
            if call.node == node and not call.done:
                call.done = True
                return call.sequence
        return None

    def stop(self, everything: bool) -> list[Unit]:
        """Units of the calls that are done (or of all), which linger no longer."""
        stopped = [call for call in self._calls if call.done or everything]
        self._calls = [call for call in self._calls if call not in stopped]
        return [unit for call in stopped for unit in call.entered]
