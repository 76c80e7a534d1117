"""What stays from a forward to its backward, within the bytes that nothing is gathered into."""

from __future__ import annotations

from typing import Any

from zero_core.runtime.residents import Turn


class Named:
    """As much of a unit as Turn asks for."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.name, self.nbytes, self.users = name, nbytes, 0


def admitted(turn: Turn, unit: Any, *, spare: int, outermost: bool = False) -> list[str]:
    turn.spare_bytes = spare
    return [each.name for each in turn.admit(unit, outermost=outermost)]


def test_units_stay_as_far_as_those_gathered_ahead_leave_room():
    a, b, c, root = (Named(name, nbytes) for name, nbytes in (("a", 40), ("b", 40), ("c", 40), ("root", 500)))
    turn: Any = Turn(100)
    assert admitted(turn, a, spare=20) == ["a"] and a not in turn
    assert admitted(turn, b, spare=60) == [] and admitted(turn, c, spare=100) == []
    assert admitted(turn, root, spare=100, outermost=True) == []
    assert [turn.ahead_bytes(unit) for unit in (a, b, c, root)] == [0, 40, 40, 0]
    c.users = 1
    assert turn.ahead_bytes(c) == 0  # it is used, so it is not ahead of its use
    turn.pop(c)
    assert c not in turn and b in turn
    turn.clear()
    assert b not in turn and root not in turn


def test_what_was_used_longest_ago_goes_first_and_the_last_one_stays_however_large():
    a, b, large = Named("a", 60), Named("b", 60), Named("large", 300)
    turn: Any = Turn(100)
    assert admitted(turn, a, spare=100) == []
    assert admitted(turn, b, spare=100) == ["a"]
    assert admitted(turn, large, spare=100) == ["b"] and large in turn
    assert admitted(turn, a, spare=100) == ["large"] and a in turn
    assert admitted(turn, large, spare=99) == ["a", "large"]  # a unit is gathered ahead
    assert admitted(Turn(0), a, spare=0, outermost=True) == ["a"]
