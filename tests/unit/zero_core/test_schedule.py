"""The order of visits: reverse completion in backward, skipped ones included; guesses that mend themselves."""

from __future__ import annotations

from zero_core.runtime.schedule import Forecast, Pass, Visit


def forward(names: str) -> tuple[Pass, dict[str, Visit]]:
    """A root (unit 9) around visits of one unit each."""
    made = Pass(True)
    root = Visit(9, (9,))
    visits = {}
    for name in names:
        unit = ord(name) - ord("a")
        visits[name] = Visit(unit, (unit,), parent=root)
        made.complete(visits[name])
    visits["root"] = root
    made.complete(root)
    made.begin_backward()
    return made, visits


def walk(made: Pass, targets: list[Visit]) -> list[str]:
    """Open the targets in turn, then drain; what was opened and closed, in order."""
    log = []
    for target in [*targets, None]:
        for visit in made.path_to(target):
            closing = made.leave_for(visit)
            made.open.append(visit)
            log += [f"open {visit.units[0]}"] + [f"close {v.units[0]} {made.closed(v)}" for v in closing]
    log += [f"close {v.units[0]} {made.closed(v)}" for v in made.leave_for(None)]
    return log


def test_skipped_visits_are_opened_and_closed_in_the_same_order():
    made, v = forward("abc")
    everything = walk(made, [v["root"], v["c"], v["b"], v["a"]])
    made, v = forward("abc")
    assert walk(made, [v["root"], v["a"]]) == everything
    made, v = forward("abc")
    assert walk(made, [v["b"]]) == everything
    assert everything[0] == "open 9" and everything[-1] == "close 9 [9]"
    assert everything[1:4] == ["open 2", "open 1", "close 2 [2]"]


def test_a_unit_visited_twice_is_done_at_its_last_closing():
    made, v = forward("aba")
    log = walk(made, [])
    assert [line for line in log if line.startswith("close 0")] == ["close 0 []", "close 0 [0]"]


def test_the_visit_that_backward_reaches_next():
    made, v = forward("aba")
    assert made.pending(0, -1) is made.visits[2]
    made.path_to(made.visits[1])
    assert made.pending(0, -1) is made.visits[0]
    made.path_to(None)
    assert made.pending(0, -1) is None


def test_a_visit_from_before_a_node_was_not_made_by_it():
    made, v = forward("ab")
    made.visits[0].sequence, made.visits[1].sequence = 4, 6
    assert made.pending(1, 5) is made.visits[1]
    assert made.pending(0, 5) is None


def test_a_wrong_guess_is_mended():
    forecast = Forecast()

    def run(order: list[int]) -> list[list[int]]:
        forecast.begin()
        guesses = []
        for unit in order:
            forecast.used(unit)
            guesses.append(forecast.upcoming()[:1])
        forecast.learn(order)
        return guesses

    assert run([0, 1, 2, 3]) == [[], [], [], []]
    assert run([0, 1, 2, 3]) == [[1], [2], [3], []]
    assert run([0, 2, 3]) == [[1], [3], []]  # 1 was skipped: one miss, then right again
    assert forecast.misses == 1
    assert run([0, 7, 2, 3]) == [[2], [2], [3], []]  # 7 is new: the guess behind it still stands
    assert run([0, 7, 2, 3]) == [[7], [2], [3], []]
    assert forecast.order == (0, 7, 2, 3)
