"""Finds the values of a sharded parameter, and makes full copies of them that write back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from ..errors import ChangedParameterError, ShardedParameterError
from .version_counters import Stamp, Version
from .writeback_views import REPLACING, FullCopy


class Home(Protocol):
    """The object that keeps a sharded parameter's values. The defaults fit a parameter that is never trained."""

    name: str  # of the parameter, as in model.named_parameters()

    def __deepcopy__(self, memo: Any) -> None:
        """Returns None: a copy of the parameter, made while it has memory, is not sharded and has no home."""
        return None

    def full_copy(self, parameter: Tensor) -> Tensor:
        """A plain tensor with the parameter's full values. Collective."""

    def write_back(self, parameter: Tensor, values: Tensor, uncounted: Tensor | None) -> None:
        """Keep `values` (the parameter's shape) as the parameter's new ones. uncounted: see `Version.wrote`."""

    def overwrite(self, parameter: Tensor, values: Tensor) -> bool:
        """As `write_back`, without a gather before; autograd does not count it. Collective. False: gather first."""
        return False

    def take_values(self, parameter: Tensor, values: Tensor) -> None:
        """`p.data = values` was asked: keep a copy, and raise as soon as torch would show one as the other changes."""

    def versions(self, parameter: Tensor) -> Sequence[Version]:
        """The versions that change with the parameter's values."""

    def note_external_use(self, parameter: Tensor) -> None:
        """The parameter takes part in a graph outside its unit."""
        return None

    def refuse_hook(self, parameter: Tensor) -> None:
        """A hook is about to be put on the parameter. Raises GradientError where it would see no gradient."""
        return None

    def inputs(self, parameter: Tensor) -> list[Any]:
        """Tensors that autograd differentiates by: the parameter, and its stand-ins in graphs of its unit."""
        return [parameter]

    def joined(self, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """The parameter's gradient, of those of its `inputs`."""
        return gradients[0]

    def held_gradient(self, parameter: Tensor) -> Home | None:
        """Where a gradient of this parameter waits for step(), as far as this rank knows."""
        return None

    def drop_gradient(self, parameter: Tensor) -> None:
        """`p.grad = None` was asked."""
        return None


def home_of(parameter: Tensor) -> Home:
    return parameter.__dict__["_zero_home"]


def set_home(parameter: Tensor, home: Home | None) -> None:
    """Sets the home of a parameter. None: it is a plain parameter again."""
    if home is None:
        parameter.__dict__.pop("_zero_home", None)
    else:
        parameter.__dict__["_zero_home"] = home


class ParameterCopy(FullCopy):
    """The full values of a parameter. counts: a write into them is one that autograd counts."""

    def __init__(self, parameter: Tensor, values: Tensor, counts: bool = True) -> None:
        super().__init__(parameter, values, Stamp(home_of(parameter).versions(parameter)))
        self._counts = counts

    def write_back(self) -> None:
        uncounted = self.owner if self._counts else None
        home_of(self.owner).write_back(self.owner, self.values.detach(), uncounted)
        self.stamp.renew()

    def check(self) -> None:
        if not self.stamp.current():
            raise ChangedParameterError(
                f"a view (p.data, p.detach(), p[i] ...) of {home_of(self.owner).name} is used after a step() or a "
                "write has changed the parameter: it holds the old values. Take a new view, or call view.clone() "
                "before the change"
            )

    def refuse(self, func: Any) -> None:
        if func is nn.Parameter:
            refuse_another(self.owner)
        if func is Tensor.__dlpack__:
            raise ShardedParameterError(
                f"from_dlpack of {home_of(self.owner).name} would share memory with a copy, and a write there would be "
                "lost. Pass a clone, from_dlpack(p.detach().clone()), and write back with p.copy_()"
            )
        if func in REPLACING:
            raise ChangedParameterError(
                f"the memory of a view of {home_of(self.owner).name} cannot be replaced or shared (by .data = tensor, "
                "resize_(), set_(), share_memory_() or a collective). Use a clone, and write it back with copy_(tensor)"
            )


def refuse_another(parameter: Tensor) -> None:
    raise ShardedParameterError(
        f"nn.Parameter(p) of {home_of(parameter).name}, which is sharded: the new parameter would be neither sharded "
        "nor trained. Apply weight_norm and parametrizations before zero_core.shard. To copy the values, write "
        "nn.Parameter(p.detach().clone())"
    )
