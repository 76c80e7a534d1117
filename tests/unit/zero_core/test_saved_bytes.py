"""SavedBytes: every byte comes back, a few pieces are under way at once, and nothing is under way after an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zero_core.util import freed_memory
from zero_core.util.freed_memory import HostMemory, SavedBytes, give_memory, take_memory


class Ticket:
    """Moves its bytes when it is waited for."""

    def __init__(self, keeper: Late, move: Any) -> None:
        self._keeper, self._move = keeper, move

    def wait(self) -> None:
        self._keeper.under_way.remove(self)
        self._move()


class Late(HostMemory):
    """`under_way`: requests that nobody has waited for. `fails`: the request that raises."""

    def __init__(self) -> None:
        self.under_way: list[Ticket] = []
        self.most, self.extents, self.fails = 0, 0, -1

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.extents += 1
        return super().allocate(nbytes)

    def free(self, extent: torch.Tensor) -> None:
        assert not self.under_way
        self.extents -= 1

    def _later(self, move: Any) -> Any:
        self.fails -= 1
        if self.fails == 0:
            raise OSError("no such block")
        self.under_way.append(Ticket(self, move))
        self.most = max(self.most, len(self.under_way))
        return self.under_way[-1]

    def read(self, extent: torch.Tensor, buffer: torch.Tensor, offset: int = 0) -> Any:
        return self._later(lambda: HostMemory.read(self, extent, buffer, offset))

    def write(self, extent: torch.Tensor, buffer: torch.Tensor, offset: int = 0) -> Any:
        return self._later(lambda: HostMemory.write(self, extent, buffer, offset))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory, "PART_BYTES", 128)


def tensors() -> list[torch.Tensor]:
    return [torch.randn(200), torch.arange(33, dtype=torch.bfloat16), torch.empty(0), torch.ones(1, dtype=torch.uint8)]


def test_bytes_come_back_into_tensors_whose_memory_was_gone() -> None:
    values, keeper, kept = tensors(), Late(), SavedBytes()
    expected, view = [value.clone() for value in values], values[0][3:7]
    kept.put(keeper, values)
    assert keeper.most == freed_memory.PARTS and not keeper.under_way
    give_memory(values)
    assert not any(value.untyped_storage().nbytes() for value in values)
    take_memory(values)
    for _ in range(2):  # they are kept until free()
        values[0].zero_()
        kept.take(values)
        assert all(map(torch.equal, values, expected)) and torch.equal(view, expected[0][3:7])
    kept.free()
    kept.free()
    assert keeper.extents == 0 and kept.nbytes == 0
    kept.put(keeper, [torch.empty(0)])
    kept.take([torch.empty(0)])
    assert keeper.extents == 0, "nothing takes no room"


@pytest.mark.parametrize("fails", [1, 3, 8])
def test_after_an_error_nothing_is_under_way_and_nothing_is_kept(fails: int) -> None:
    keeper, kept = Late(), SavedBytes()
    keeper.fails = fails
    with pytest.raises(OSError, match="no such block"):
        kept.put(keeper, tensors())
    assert keeper.extents == 0 and not keeper.under_way
    kept.put(keeper, tensors())
    keeper.fails = fails
    with pytest.raises(OSError, match="no such block"):
        kept.take(tensors())
    assert keeper.extents == 1 and not keeper.under_way
    kept.free()
