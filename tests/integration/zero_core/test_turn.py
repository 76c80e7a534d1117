"""Where forward turns into backward, the units that forward used last are not gathered again."""

import pytest
import torch

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from tests.integration.zero_core.swapping import SwappingStore

pytestmark = pytest.mark.promise("turn-keeps-units")


def gathered(ahead: int, accumulate: int = 1, between: str = "", swaps: bool = False, resident: int = 0):
    """Names of units in the order in which each pass of a step brought them, and the most bytes unsharded at once.

    ahead: how many blocks' bytes may be gathered ahead. between: what is done between forward and backward.
    """
    store = SwappingStore() if swaps else None
    model, optimizer = kit.sharded(toys.Stack(6), toys.sgd, store=store, units=[toys.Block])
    handle = zero_core.handle(model)
    (block,) = {unit.nbytes for unit in handle.units if unit.name != "root"}
    uses = handle.engine.uses
    uses.turn.prefetch_bytes, uses._residents.budget_bytes = ahead * block, resident * block
    passes: list[list[str]] = []
    most = [0]
    for unit in handle.units:

        def take(unit=unit, begin=unit._begin):
            begin()
            passes[-1].append(unit.name)
            held = sum(each.nbytes for each in handle.units if each.residency.value != "sharded")
            most[0] = max(most[0], held)

        unit._begin = take
    for step in range(2):
        passes.clear()
        for micro in range(accumulate):
            passes.append([])
            loss = toys.loss_of(model, toys.data(step, micro))
            passes.append([])
            if between:
                with torch.set_grad_enabled(between == "forward"):
                    model(toys.data(9, 9))
                passes[-1].clear()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not any(unit.residency.value != "sharded" for unit in handle.units)
    result = [[name.rsplit(".", 1)[-1] for name in each] for each in passes], most[0] // block
    optimizer.close()
    return result


FORWARD = ["root", *"012345"]


@pytest.mark.parametrize(("world", "swaps"), [(1, True), (2, False), (2, True)])
def test_backward_gathers_only_what_forward_did_not_use_last(ranks, world, swaps):
    """Fails if backward begins with a unit that it has to wait for, or more is unsharded at once than before."""
    run = ranks(world).run
    for ahead, again in ((0, "543210"), (1, "43210"), (2, "3210"), (4, "10"), (9, "")):
        found, most = run(gathered, ahead, 2, "", swaps)[0]
        root = ["root"] if ahead == 0 else []
        assert found == [FORWARD, [*root, *again]] * 2, ahead
        assert most <= 1 + ahead + 1, ahead  # one in use, the model's own, which are smaller, and those ahead


def test_units_go_where_another_forward_comes_in_between(ranks):
    """Fails if what stays for a backward that does not come is kept beside what is gathered ahead."""
    for between in ("evaluation", "forward"):
        found, most = ranks(2).run(gathered, 2, 1, between)[0]
        assert found[0] == FORWARD and most <= 4
        assert set(found[1]) <= set(FORWARD)


def test_what_stays_between_uses_comes_on_top(ranks):
    found, _ = ranks(2).run(gathered, 1, 1, "", False, 2)[0]
    assert found[0] == FORWARD and "5" not in found[1] and "4" not in found[1] and "root" not in found[1]
