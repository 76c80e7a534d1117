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


def test_a_call_that_writes_into_one_of_two_views_gives_back_once(owner):
    first, second = call(Tensor.unbind, owner)
    first.copy_(second)
    assert HOME["writes"] == 1 and HOME["values"].tolist() == [[3, 4, 5], [3, 4, 5]]


def test_what_was_asked_for_to_be_kept_is_read_when_it_is_old_and_not_written(owner):
    view = call(Tensor.view, owner, 6)
    kept = view.cpu()
    HOME["version"].wrote()
    assert isinstance(kept, View) and kept.tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(RuntimeError, match="old"):
        kept.zero_()


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
