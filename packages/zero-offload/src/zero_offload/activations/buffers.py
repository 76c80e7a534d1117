"""Buffers that a unit's forward writes into, such as the running statistics of BatchNorm.

[Note: a forward that writes, run twice]
Recomputation runs a unit's forward a second time. The second run has to find each buffer as the first run found it, or
gradients are of another function than the loss; and it must not leave its own writes behind, or a running mean moves
twice a step. torch's checkpointing leaves both to the user. Here, what the first run writes into is copied before it
begins, and the second run is given copies instead of the buffers. Which buffers these are is found out in the unit's
first call, in training and in evaluation each; those of BatchNorm always are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .spill import ActivationError

__all__ = ["Buffers", "Found", "differ"]

Found = dict[int, tuple[Tensor, int]]  # by position: a buffer, or a copy of it, and its version


class Buffers:
    """The buffers of one unit. A dict `found` has what one call found in them, by their positions here."""

    def __init__(self, unit: str, module: nn.Module) -> None:
        self._unit, self._module = unit, module
        self._places = [(owner, name) for owner in module.modules() for name in owner._buffers]
        batch_norm = nn.modules.batchnorm._BatchNorm
        self._written = {k for k, (owner, _) in enumerate(self._places) if isinstance(owner, batch_norm)}
        self._seen: set[bool] = set()  # module.training of the calls that were watched

    @contextmanager
    def first_run(self, found: Found) -> Iterator[None]:
        """The forward runs inside of this, for the first time. Fills `found`.

        Raises ActivationError for a write that cannot be undone, because no earlier call did the like.
        """
        new = self._module.training not in self._seen
        before = self._values()
        kept = {k: b.detach().clone() for k, b in before.items() if new or k in self._written}
        versions = {k: _version(b) for k, b in before.items()}
        yield
        after = self._values()
        for k, buffer in before.items():
            if after.get(k) is not buffer:
                self._written.add(k)
            elif versions[k] != _version(buffer) or (new and differ(kept[k], buffer)):
                self._written.add(k)
                if k not in kept:
                    raise ActivationError(
                        f"unit {self._unit} has written into its buffer {self._places[k][1]} in forward, and did not "
                        "in its first call, so there is no copy to compute again from: give it the policy 'keep'"
                    )
        self._seen.add(self._module.training)
        for k, buffer in before.items():
            values = kept[k] if k in self._written and k in kept else buffer
            found[k] = values, versions[k] if values is buffer else _version(values)

    @contextmanager
    def second_run(self, found: Found) -> Iterator[None]:
        """The forward runs inside of this again, on what the first run found, and leaves no trace."""
        before = self._values()
        try:
            for k, (values, version) in found.items():
                if _version(values) != version:
                    raise ActivationError(
                        f"buffer {self._places[k][1]} of unit {self._unit} was written after the unit's forward, which "
                        "backward has to compute again: write it after backward, or give the unit the policy 'keep'"
                    )
                self._put(k, values.clone() if k in self._written else values)
            yield
        finally:
            for k, buffer in before.items():
                self._put(k, buffer)

    def _put(self, k: int, buffer: Tensor) -> None:
        owner, name = self._places[k]
        owner._buffers[name] = buffer

    def _values(self) -> dict[int, Tensor]:
        now = ((k, owner._buffers.get(name)) for k, (owner, name) in enumerate(self._places))
        return {k: buffer for k, buffer in now if buffer is not None}


def differ(before: Tensor, after: Tensor) -> bool:
    """Whether values differ, though the version may be the same: batch_norm's kernels do not count their writes."""
    try:
        return not torch.equal(before, after)
    except (RuntimeError, NotImplementedError):  # of a layout or dtype that has no equal, such as sparse: counted
        return False


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version
