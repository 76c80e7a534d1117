"""Operations of a loop that read and write parameters, or that may be refused. A part of side.Side."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from tests.fuzz.program import Op


class Values:
    """Methods of Side, whose attributes they use."""

    def op_read(self, op: Op) -> None:
        p, how = self.parameter(op), op.how
        if how == "grad":
            if self.program.config.ranks == 1:  # on several ranks p.grad also tells of other ranks' gradients
                self.record(f"grad is None at {self.at}", [float(q.grad is None) for q in self.parameters])
            return
        read: dict[str, Callable[[], Any]] = {
            "": lambda: p.norm().item(),
            "norm": lambda: p.norm().item(),
            "mean": lambda: (p.float().sum() / max(1, p.numel())).item(),
            "first": lambda: p[0].tolist() if p.ndim and p.numel() else 0.0,
            "tolist": p.tolist,
            "numpy": lambda: p.detach().cpu().numpy(),
            "clone": lambda: p.detach().clone(),
            "data": lambda: p.data.sum(),
            "detach": lambda: p.detach().abs().sum(),
            "state_dict": lambda: torch.cat([v.double().flatten() for v in self.model.state_dict().values()]),
            "vector": lambda: nn.utils.parameters_to_vector(self.model.parameters()),
        }
        self.record(f"read at {self.at}", read[how]())

    def op_write(self, op: Op) -> None:
        p, how = self.parameter(op), op.how
        if not p.is_floating_point():
            return
        if self.waiting and self.outside and how in ("data", "data_row", "gathered"):
            how = "detach"  # torch would mix old and new values where the parameter was used outside of its module
        if how == "detach":
            p.detach().mul_(0.9)
        elif how == "data":
            p.data.mul_(0.9)
        elif how == "data_row":
            p.data.view(-1)[:2] = 0.1
        elif how == "gathered":
            with self.gathered():
                p.data.mul_(0.9)
        elif how == "apply":
            self.model.apply(_shrink_linears)
        elif how == "init":
            nn.init.constant_(p, 0.2)
        else:
            with torch.no_grad():
                if how == "row" and p.ndim and p.numel():
                    p[0].mul_(0.5)
                elif how == "copy":
                    p.copy_(p * 0.9)
                elif how == "foreach":
                    torch._foreach_mul_([q for q in self.parameters if q.is_floating_point()], 0.99)
                elif how == "clamp":
                    p.clamp_(-0.4, 0.4)
                else:
                    p.mul_(0.9)

    def op_grad(self, op: Op) -> None:
        """Changes gradients in place between backward and step. The last three ways are for one rank: not linear.

        Where all is zero a rank may not know that no rank used the parameter, so nothing is changed there.
        """
        found = [p for p in self.parameters if p.grad is not None and bool(p.grad.any())]
        chosen = found[op.index % len(found) :][:2] if found else []
        if op.how == "foreach":
            torch._foreach_mul_([p.grad for p in found], 0.5)
        elif op.how == "clip":
            nn.utils.clip_grad_norm_(self.parameters, 0.3)
        elif op.how == "clip_value":
            nn.utils.clip_grad_value_(self.parameters, 0.05)
        elif op.how == "step":  # an optimizer of torch's beside ours, for some of the parameters
            torch.optim.SGD(chosen, lr=0.05).step() if chosen else None
            for p in chosen:
                p.grad = None
        else:
            for p in chosen:
                p.grad.mul_(0.5) if op.how == "mul" else p.grad.add_(p.detach(), alpha=0.01)

    def gathered(self) -> Any:
        return nullcontext()

    def op_shadow(self, op: Op) -> None:
        """Reads, or writes into, the tensors that lie over the memory of parameters."""
        for piece in self.model.pieces():
            shadow = getattr(piece, "shadow", None)
            if shadow is not None and op.how == "write":
                shadow.mul_(0.9)
            elif shadow is not None:
                self.record(f"shadow at {self.at}", shadow.sum().item() if op.how == "sum" else shadow.clone())

    def op_state_dict(self, op: Op) -> None:
        values = {name: value.clone() for name, value in self.model.state_dict().items()}
        names = [name for name, value in values.items() if value.is_floating_point()]
        values[names[op.index % len(names)]] *= 0.9
        self.model.load_state_dict(values)


@torch.no_grad()
def _shrink_linears(module: nn.Module) -> None:
    if type(module) is nn.Linear and "weight" in module._parameters:
        module.weight.mul_(0.9)
