"""Views over full copies: what is written into one is given back once, and what is old is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from zero_core.runtime.versions import Stamp, Version
from zero_core.runtime.views import REPLACING, FullCopy, View, call_with_copies


class Owner(Tensor):
    """What has no memory here."""


class Copy(FullCopy):
    def __init__(self, owner: Tensor) -> None:
        super().__init__(owner, HOME["values"].clone(), Stamp([HOME["version"]]))

    def check(self) -> None:
        if not self.stamp.current():
            raise RuntimeError("old")

    def write_back(self) -> None:
        HOME["version"].wrote()
        HOME["values"], HOME["writes"] = self.values.clone(), HOME["writes"] + 1
        self.stamp.renew()

    def refuse(self, func: Any) -> None:
        if func in REPLACING or func is torch.nn.Parameter:
            raise RuntimeError("refused")


HOME: dict[str, Any] = {}


@pytest.fixture
def owner() -> Tensor:
    HOME.update(values=torch.arange(6.0).view(2, 3), version=Version(), writes=0)
    return torch.zeros(2, 3).as_subclass(Owner)


def call(func: Any, *args: Any) -> Any:
    return call_with_copies(Owner, Copy, func, args, {})


def test_a_write_of_the_call_itself_is_given_back_and_returns_the_owner(owner):
    assert call(Tensor.add_, owner, 1.0) is owner
    assert HOME["writes"] == 1 and HOME["values"].tolist() == [[1, 2, 3], [4, 5, 6]]


def test_writes_into_views_and_views_of_views_are_given_back(owner):
    rows = call(Tensor.unbind, owner)
    rows[0].zero_()
    rows[1][1:].mul_(10)
    assert HOME["writes"] == 2 and HOME["values"].tolist() == [[0, 0, 0], [3, 40, 50]]


def test_a_call_that_writes_into_one_of_two_views_gives_back_once(owner):
    first, second = call(Tensor.unbind, owner)
    first.copy_(second)
    assert HOME["writes"] == 1 and HOME["values"].tolist() == [[3, 4, 5], [3, 4, 5]]


def test_a_view_is_refused_once_the_owner_has_changed_by_another_way(owner):
    view, other = call(Tensor.view, owner, 6), call(Tensor.view, owner, 6)
    other[0] = 7.0
    with pytest.raises(RuntimeError, match="old"):
        view.sum()
    assert float(other.sum()) == 22.0


def test_what_was_asked_for_to_be_kept_is_read_when_it_is_old_and_not_written(owner):
    view = call(Tensor.view, owner, 6)
    kept = view.cpu()
    HOME["version"].wrote()
    assert isinstance(kept, View) and kept.tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(RuntimeError, match="old"):
        kept.zero_()


def test_new_memory_and_a_parameter_over_a_view_are_refused(owner):
    view = call(Tensor.view, owner, 6)
    for use in (lambda: setattr(view, "data", torch.ones(6)), lambda: torch.nn.Parameter(view)):
        with pytest.raises(RuntimeError, match="refused"):
            use()


def test_a_view_is_a_leaf_with_a_gradient_of_its_own(owner):
    view = call(Tensor.view, owner, 6)
    assert not view.requires_grad_(False).requires_grad
    view.requires_grad_()
    (view * 2).sum().backward()
    assert view.is_leaf and view.grad.tolist() == [2.0] * 6
    with torch.no_grad():
        view.add_(1.0)
    assert HOME["writes"] == 1 and HOME["values"].tolist() == [[1, 2, 3], [4, 5, 6]]


def test_every_method_of_a_tensor_is_that_of_a_tensor(owner):
    """But for what a view answers itself. Fails if a field of ours hides one."""
    own = {name for name in (*vars(View), *View.__annotations__) if not name.startswith("__") and hasattr(Tensor, name)}
    assert own == {"as_subclass", "cpu", "data", "numpy", "share_memory_", "storage", "to", "tolist", "untyped_storage"}
    view = call(Tensor.view, owner, 6)
    assert float(view.inner(torch.ones(6))) == 15.0


def test_rows_that_one_call_writes_are_given_back_once(owner):
    rows = call(Tensor.unbind, owner)
    torch._foreach_add_([*rows], 1.0)
    assert HOME["writes"] == 1 and HOME["values"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert torch.mul(torch.ones(3), 2.0, out=rows[0]) is rows[0]
    assert HOME["writes"] == 2 and HOME["values"].tolist() == [[2, 2, 2], [4, 5, 6]]


def test_a_write_into_what_is_old_leaves_what_is_kept_as_it_was(owner):
    kept = call(Tensor.view, owner, 6).cpu()
    HOME["version"].wrote()
    with pytest.raises(RuntimeError, match="old"):
        kept.zero_()
    assert kept.tolist() == [0, 1, 2, 3, 4, 5]
