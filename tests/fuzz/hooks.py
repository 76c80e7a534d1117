"""Operations that put hooks of every kind on parameters, graphs and modules. A part of side.Side.

Most hooks change what they are given, so that one that does not run is seen in the weights. What they see is recorded
once after every operation, since torch promises no order between the hooks of two parameters.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from tests.fuzz.program import Op


class Hooks:
    """Methods of Side, whose attributes they use."""

    def __init__(self) -> None:
        self.handles: list[Any] = []
        self.nodes: list[Any] = []  # torch drops a node, and its hooks, that nobody holds
        self.seen: dict[str, list[float]] = defaultdict(list)

    def op_hook(self, op: Op) -> None:
        """Puts a hook of the kind `how` on a parameter, or on a block, of this index."""
        handle = getattr(self, f"_hook_{op.how or 'tensor'}")(op)
        if handle is not None:
            self.handles.append(handle)

    def op_unhook(self, op: Op) -> None:
        if self.handles:
            self.handles.pop().remove()

    def unhook(self) -> None:
        """Removes all of them: some are the whole process's."""
        while self.handles:
            self.handles.pop().remove()

    def see(self, op: Op, *tensors: Tensor | None) -> None:
        with torch.no_grad():
            norms = [0.0 if t is None else float(t.double().square().sum().sqrt()) for t in tensors]
        self.seen[f"{op.how} {op.index}"] += norms

    def told(self) -> dict[str, list[float]]:
        """What every hook saw since the last call: how many tensors, and the sum of their norms."""
        told = {name: [float(len(norms)), sum(norms)] for name, norms in sorted(self.seen.items())}
        self.seen.clear()
        return told

    def hooked(self, op: Op) -> nn.Parameter | None:
        found = [p for p in self.parameters if p.requires_grad]
        return found[op.index % len(found)] if found else None

    # -- on parameters

    def _hook_tensor(self, op: Op) -> Any:
        def halve(gradient: Tensor) -> Tensor:
            self.see(op, gradient)
            return gradient * 0.5

        return None if (p := self.hooked(op)) is None else p.register_hook(halve)

    def _hook_accumulated(self, op: Op) -> Any:
        def halve(p: Tensor) -> None:
            self.see(op, p.grad)
            if p.grad is not None:
                p.grad.mul_(0.5)

        return None if (p := self.hooked(op)) is None else p.register_post_accumulate_grad_hook(halve)

    def _hook_multi(self, op: Op) -> Any:
        """A hook that runs when the gradients of all these parameters are computed."""
        found = [p for p in self.parameters if p.requires_grad]
        found = found[op.index % len(found) :] if found else []
        return register_multi_grad_hook(found, lambda gradients: self.see(op, *gradients)) if found else None

    def _node(self, op: Op) -> Any:
        """The node that accumulates a parameter's gradient, as DistributedDataParallel finds it."""
        if (p := self.hooked(op)) is None:
            return None
        node = p.expand_as(p).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        self.nodes.append(node)
        return node

    def _hook_node(self, op: Op) -> Any:
        node = self._node(op)
        return None if node is None else node.register_hook(lambda before, after: self.see(op, None))

    def _hook_prehook(self, op: Op) -> Any:
        def halve(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            self.see(op, *gradients)
            return tuple(gradient * 0.5 for gradient in gradients)

        node = self._node(op)
        return None if node is None else node.register_prehook(halve)

    # -- on modules

    def _hook_forward(self, op: Op) -> Any:
        def scale(module: nn.Module, args: Any, output: Any) -> Any:
            return output * 0.9 if isinstance(output, Tensor) else None

        return self.piece(op).register_forward_hook(scale)

    def _hook_forward_pre(self, op: Op) -> Any:
        return self.piece(op).register_forward_pre_hook(lambda module, args: (args[0] * 0.9, *args[1:]), prepend=True)

    def _hook_backward(self, op: Op) -> Any:
        def scale(module: nn.Module, ours: Any, theirs: Any) -> Any:
            self.see(op, *theirs)
            return tuple(g * 0.9 if g is not None and g.is_floating_point() else g for g in ours)

        return self.piece(op).register_full_backward_hook(scale)

    def _hook_backward_pre(self, op: Op) -> Any:
        def scale(module: nn.Module, theirs: Any) -> Any:
            return tuple(None if g is None else g * 0.9 for g in theirs)

        return self.piece(op).register_full_backward_pre_hook(scale)

    # -- on steps

    def _hook_step_post(self, op: Op) -> Any:
        """Clamps the weights after each step, as projected gradients do."""

        @torch.no_grad()
        def clamp(optimizer: Any, args: Any, kwargs: Any) -> None:
            self.see(op, None)
            if (p := self.hooked(op)) is not None:
                p.clamp_(-0.3, 0.3)

        return self.optimizer.register_step_post_hook(clamp)
