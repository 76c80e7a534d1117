"""Runs parts of a checkpointed module so that backward recomputes them one at a time, each from its own inputs.

Owns the source of those inputs: the surrounding checkpoint recomputes them. Knows no experts and no units.

[Note: parts inside of a checkpoint]
A checkpoint of torch runs its module's forward again in backward, up to the last saved tensor. Consecutive parts of the
module, such as groups of experts, would all run there before the backward of the last one begins, and their saved
tensors would all be held meanwhile. So each part is a checkpoint of its own, hidden from the surrounding one. The
surrounding checkpoint saves the inputs of all parts, before the first part runs:

    forward     code before; part 0; part 1; part 2
    backward    code before; part 2 again, its backward; part 1 again, its backward; part 0 again, its backward

A part's parameters are gathered twice, not three times, if no tensor is saved after the parts. If one is, as by a
product with a gate that follows, the recomputed forward runs past the parts to reach it, and a part would be computed
three times. The first backward notices this, and later forwards leave the parts to the surrounding checkpoint. Graphs
that exist by then must run as they were recorded, so this waits until they are gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ..errors import ZeroError


class Hooks(NamedTuple):
    """Autograd's pair of functions for saved tensors, from the innermost `saved_tensors_hooks`."""

    save: Callable[[Tensor], Any]
    load: Callable[[Any], Tensor]

    @property
    def of_checkpoint(self) -> bool:
        """Whether they are those of torch's checkpoint (use_reentrant=False), in its first run or a later one."""
        return "_checkpoint_hook" in self._name or self.again

    @property
    def again(self) -> bool:
        """Whether they are those of a checkpoint that runs its module again."""
        return "_recomputation_hook" in self._name

    @property
    def _name(self) -> str:
        return getattr(self.save, "__qualname__", "")


class Unseen(NamedTuple):
    """Marks hooks that `hooks_around` skips: those that `owner` put around others. It is the attribute `unseen` of
    their first function."""

    owner: Any
    around: tuple[Any, Any] | None


def hooks_around() -> Hooks | None:
    """Returns the hooks in force, or None. Skips hooks that are marked `Unseen`."""
    found: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    while found is not None and hasattr(found[0], "unseen"):
        found = found[0].unseen.around
    return None if found is None else Hooks(*found)


def hidden_from_hooks() -> saved_tensors_hooks:
    """Inside, the surrounding hooks do not see saved tensors."""
    return saved_tensors_hooks(_itself, _itself)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


class SavedAround:
    """A tensor that a checkpoint treats as saved by autograd, so that it is not kept until backward but recomputed
    there. changed: raised by `load` if the tensor was changed in place meanwhile."""

    def __init__(self, tensor: Tensor, hooks: Hooks, changed: Exception) -> None:
        given = tensor.detach()
        given.version_when_saved = given._version  # type: ignore[attr-defined]
        self._load, self._changed = hooks.load, changed
        self._saved = hooks.save(given)

    def load(self) -> Tensor:
        """Returns its values, without a gradient. Called once in a backward."""
        found = self._load(self._saved)
        if found._version != found.version_when_saved:  # type: ignore[attr-defined]
            raise self._changed
        return found.detach()


class Part:
    """One run of one part: `function` of the tensors `given`, which are released when it has run.

    trained: whether `function` has parameters that require gradients. True too if a tensor in `given` requires one.
    """

    def __init__(self, function: Callable[..., Tensor], given: Sequence[Tensor], trained: bool = False) -> None:
        self._function = function
        self.trained = trained or any(tensor.requires_grad for tensor in given)
        self._given: Any = given  # None: it has run
        self._wanted = [tensor.requires_grad for tensor in given]
        self._kept: list[SavedAround] = []
        self._anchor = given[0].detach().new_empty(0)  # tells the checkpoint which device's random numbers to replay

    def run(self, anchor: Tensor | None = None) -> Tensor:
        """Runs the part: the first time on the given tensors, later on the same values from the checkpoint."""
        given, self._given = self._given, None
        if given is None:
            pairs = zip(self._kept, self._wanted, strict=True)
            given = [kept.load().requires_grad_(wanted) for kept, wanted in pairs]
        return self._function(*given)

    def keep(self, hooks: Hooks) -> None:
        """Saves the inputs in the surrounding checkpoint. If it was waiting for the last of them, its run ends here."""
        changed = ZeroError("an input of recomputed experts was changed in place before backward: change a copy of it")
        self._kept = [SavedAround(tensor, hooks, changed) for tensor in self._given]

    def hidden(self) -> Tensor:
        """Runs it. The surrounding checkpoint does not see its saved tensors."""
        with hidden_from_hooks():
            return self.run()

    def alone(self) -> Tensor:
        """Runs it, and again in backward, where no surrounding checkpoint has its inputs."""
        given, self._given = self._given, None
        return checkpoint(self._function, *given, use_reentrant=False)

    def apart(self) -> Tensor:
        """Runs it, and again in backward from the inputs of the surrounding checkpoint."""
        with hidden_from_hooks():
            return checkpoint(self.run, self._anchor, use_reentrant=False)


class PartsAgain:
    """Decides how the parts of one module run: see the note at the top."""

    def __init__(self) -> None:
        self._apart = True
        self.passed = False  # a recomputed forward ran past the parts to reach tensors that are saved after them
        self._alive: weakref.WeakSet[Part] = weakref.WeakSet()  # those with a graph

    def ready(self, parts: Sequence[Part], *, kept: bool = True) -> Callable[[Part], Tensor]:
        """Returns the function that runs each of `parts`, which are all those of one forward, in their order.

        kept: without a surrounding checkpoint, autograd may keep a part's tensors. Else a part runs again in any case.
        """
        hooks = hooks_around()
        plain = Part.run if kept or not torch.is_grad_enabled() else Part.alone
        if hooks is None or not hooks.of_checkpoint or not torch.is_grad_enabled():
            return plain
        if not any(part.trained for part in parts):  # without a graph, they would not tell that the checkpoint has one
            return plain
        if self.passed and not hooks.again and not self._alive:
            self._apart = False
        if not self._apart:
            return plain
        for part in parts:
            part.keep(hooks)
        if hooks.again:
            self.passed = True
            return Part.hidden
        self._alive.update(parts)
        return Part.apart
