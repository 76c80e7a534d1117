"""Ways into a model besides its call: losses of what it kept, leaves over its parameters, transforms.

A part of side.Side.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from tests.fuzz.models import Piece, first_tensor
from tests.fuzz.program import Op


class Ways:
    """Methods of Side, whose attributes they use."""

    # -- gradients that enter inside

    def _kept(self, op: Op) -> list[Tensor]:
        """The tensors that a block of the program keeps, the last one last."""
        keeping = [piece for piece in self.model.pieces() if piece.spec.keep]
        if not keeping:
            return []
        kept = keeping[op.index % len(keeping)].kept
        return [kept] if isinstance(kept, Tensor) else list(kept.values() if isinstance(kept, dict) else kept or [])

    def _backward_kept(self, op: Op) -> Tensor:
        """A loss of a kept tensor alone, without the model's output."""
        return self._backward_of(self.forward(), self._kept(op)[-1:], 0.0)

    def _backward_kept_too(self, op: Op) -> Tensor:
        return self._backward_of(self.forward(), self._kept(op)[-1:], 1.0)

    def _backward_kept_after(self, op: Op) -> Tensor:
        """A backward from the output, and then one from the kept tensor."""
        loss = self.forward()
        kept = self._kept(op)[-1:]
        self.backward(loss, retain_graph=True)
        return self._backward_of(loss, kept, 0.0)

    def _backward_kept_earlier(self, op: Op) -> Tensor:
        """A loss of a tensor that an earlier forward kept, and of another forward's output."""
        self.forward()
        return self._backward_of(self.forward(), self._kept(op)[:1], 1.0)

    def _backward_inner(self, op: Op) -> Tensor:
        """A loss of what a hook took from a module inside of a block."""
        return self._hooked_loss(op, 0.0)

    def _backward_inner_too(self, op: Op) -> Tensor:
        return self._hooked_loss(op, 1.0)

    def _backward_intermediate(self, op: Op) -> Tensor:
        """A loss of a block's output."""
        return self._hooked_loss(op, 0.0, self.piece(op))

    def _hooked_loss(self, op: Op, share: float, module: Any = None) -> Tensor:
        inside = [m for piece in self.model.pieces() for m in piece.modules() if not isinstance(m, Piece)]
        taken: list[Tensor] = []
        handle = (module or inside[op.index % len(inside)]).register_forward_hook(
            lambda module, args, output: taken.append(first_tensor(output))
        )
        try:
            loss = self.forward()
        finally:
            handle.remove()
        return self._backward_of(loss, taken[-1:], share)

    def _backward_of(self, loss: Tensor, taken: list[Tensor], share: float) -> Tensor:
        """The backward of the tensors' size, and of this share of the loss."""
        for tensor in taken:
            loss = loss * share + tensor.square().mean() if share else tensor.square().mean()
        self.backward(loss)
        return loss

    # -- parameters outside of the model

    def op_leaf(self, op: Op) -> None:
        """Makes a leaf over a parameter, with a hook and a gradient of its own."""
        p = self.parameter(op)
        if not p.is_floating_point():
            return
        name = next(name for name, q in self.model.named_parameters() if q is p)
        made: dict[str, Callable[[], Tensor]] = {
            "detach": p.detach,
            "data": lambda: p.data,
            "state_dict": lambda: self.model.state_dict(keep_vars=False)[name],
        }
        leaf, seen = made[op.how or "detach"]().requires_grad_(), []
        leaf.register_hook(lambda gradient: seen.append(float(gradient.sum())))
        (leaf.square().sum() + (leaf * 0.3).tanh().sum()).backward()
        self.record(f"leaf at {self.at}", torch.zeros(()) if leaf.grad is None else leaf.grad)
        flags = [leaf.is_leaf, leaf.requires_grad, leaf.grad is None, isinstance(leaf.shape, torch.Size)]
        self.record(f"what the leaf is at {self.at}", [*map(float, flags), *seen])

    def op_transform(self, op: Op) -> None:
        """Gradients of a loss as a function of the parameters, by torch.func and torch.autograd.functional."""
        x, tokens, target = self.batch()
        names = {name: p for name, p in self.model.named_parameters() if p.is_floating_point()}

        def loss(values: dict[str, Tensor]) -> Tensor:
            y = functional_call(self.model, values, (x, tokens, self.batches, -1))
            return self.loss(first_tensor(y), target)

        found = getattr(self, f"_transform_{op.how or 'grad'}")(op, loss, names)
        self.record(f"gradients at {self.at}", torch.cat([each.detach().flatten() for each in found]))

    def _transform_grad(self, op: Op, loss: Any, names: dict[str, Any]) -> list[Tensor]:
        return list(torch.func.grad(loss)(names).values())

    def _transform_leaves(self, op: Op, loss: Any, names: dict[str, Any]) -> list[Tensor]:
        leaves = {name: p.detach().requires_grad_() for name, p in names.items()}
        loss(leaves).backward()
        return [leaf.new_zeros(leaf.shape) if leaf.grad is None else leaf.grad for leaf in leaves.values()]

    def _transform_hvp(self, op: Op, loss: Any, names: dict[str, Any]) -> list[Tensor]:
        name = list(names)[op.index % len(names)]
        leaf = names[name].data
        direction = torch.ones(leaf.shape, dtype=leaf.dtype)
        return [torch.autograd.functional.hvp(lambda value: loss({name: value}), leaf, direction)[1]]
