"""The order of visits: reverse completion in backward, skipped ones included; guesses that mend themselves."""

import pytest

from zero_core.hooks.schedule import Forecast, Pass, Progress, Visit


def forward(names: str) -> tuple[Progress, dict[str, Visit]]:
    """A root (unit 9) around visits of one unit each."""
    made = Pass(True, Forecast())
    root = Visit(9, (9,))
    visits = {}
    for name in names:
        unit = ord(name) - ord("a")
        visits[name] = Visit(unit, (unit,), parent=root)
        made.visits.append(visits[name])
    visits["root"] = root
    made.visits.append(root)
    return Progress(made), visits


def walk(progress: Progress, targets: list[Visit]) -> list[str]:
    """Open the targets in turn, then drain; what was opened and closed, in order."""
    log = []
    for target in [*targets, None]:
        for visit in progress.path_to(target):
            closing = progress.leave_for(visit)
            log += [f"open {visit.units[0]}"] + [f"close {v.units[0]} {progress.close(v)}" for v in closing]
    log += [f"close {v.units[0]} {progress.close(v)}" for v in progress.leave_for(None)]
    return log


@pytest.mark.promise("skipped-units")
def test_skipped_visits_are_opened_and_closed_in_the_same_order():
    made, v = forward("abc")
    everything = walk(made, [v["root"], v["c"], v["b"], v["a"]])
    made, v = forward("abc")
    assert walk(made, [v["root"], v["a"]]) == everything
    made, v = forward("abc")
    assert walk(made, [v["b"]]) == everything
    assert everything[0] == "open 9" and everything[-1] == "close 9 [9]"
    assert everything[1:4] == ["open 2", "open 1", "close 2 [2]"]


@pytest.mark.promise("frozen-unused-tied")
def test_a_unit_is_reduced_when_the_first_of_its_calls_closes():
    """As a block that is called twice, or tied. Fails if it is reduced, and updated, before its other gradient."""
    closed = [each for each in walk(forward("aba")[0], []) if each.startswith("close")]
    assert closed == ["close 0 []", "close 1 [1]", "close 0 [0]", "close 9 [9]"]


@pytest.mark.promise("other-order")
def test_a_wrong_guess_is_mended():
    last: list[int] = []

    def run(order: list[int]) -> list[list[int]]:
        forecast, guesses = Forecast(last.copy()), []
        for unit in order:
            forecast.used(unit)
            guesses.append(forecast.upcoming()[:1])
        last[:] = forecast.order
        return guesses

    assert run([0, 1, 2, 3]) == [[], [], [], []]
    assert run([0, 1, 2, 3]) == [[1], [2], [3], []]
    assert run([0, 2, 3]) == [[1], [3], []]  # 1 was skipped, then right again
    assert run([0, 7, 2, 3]) == [[2], [2], [3], []]  # 7 is new: the guess behind it still stands
    assert run([0, 7, 2, 3]) == [[7], [2], [3], []]
    assert last == [0, 7, 2, 3]
