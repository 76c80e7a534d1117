"""What one rank of a run does: its model, its batches, and a method for every operation of a loop. Records what it saw.

Plain torch, but for `materialise`: what is the same on both sides. What differs is Plain's and Sharded's, in run.py.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import cached

import zero_core
from tests.fuzz import models
from tests.fuzz.models import Failure, Piece, first_tensor
from tests.fuzz.optimizers import build_optimizer
from tests.fuzz.program import Op, Program
from zero_core.building.init import materialise

__all__ = ["Record", "Side"]

ROWS = 3
NUMBERS = 1e-5  # the tolerance of losses, norms and outputs
JITTER = 3e-7  # what jittered plain runs change in inputs and first values, to learn what rounding does


@dataclass
class Record:
    """Something both runs saw. scale: what its tolerance is relative to."""

    label: str
    value: Tensor
    tolerance: float = NUMBERS
    scale: float | None = None  # None: the largest value


class Side:
    """One rank's model, optimizer and random numbers. Every operation of a loop is a method `op_NAME`."""

    model: Any
    optimizer: Any

    def __init__(self, program: Program, rank: int, jitter: int = 0) -> None:
        self.program, self.rank = program, rank
        self.noise = torch.Generator().manual_seed(jitter) if jitter else None
        self.records: list[Record] = []
        self.average: list[Tensor] = []
        self.waiting: list[Tensor] = []  # losses of forwards whose backward comes later
        self.outside = False  # whether one of them used a parameter outside of its module
        self.batches = 0
        self.model = self.make(program.seed)
        self.optimizer = build_optimizer(program.optimizer, self.model)
        for _ in range(program.config.warm):
            x, tokens, target = self.batch(rank=0)
            self.loss(first_tensor(self.model(x, tokens)), target).backward()
            self.optimizer.step()
            self.model.zero_grad()
        torch.manual_seed(self.program.seed + 1000 + rank)

    def make(self, seed: int) -> Any:
        if self.program.config.deferred:
            with zero_core.deferred_init():  # its first values are not those of eager construction
                model = models.build(self.program.model, seed)
            materialise(model)
        else:
            model = models.build(self.program.model, seed)
        if self.noise is not None:
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.is_floating_point():
                        parameter.copy_(self.shaken(parameter))
        return model

    def shaken(self, values: Tensor) -> Tensor:
        if self.noise is None:
            return values
        return values * (1 + JITTER * torch.randn(values.shape, generator=self.noise, dtype=values.dtype))

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def parameter(self, op: Op) -> nn.Parameter:
        found = self.parameters
        return found[op.index % len(found)]

    def piece(self, op: Op) -> Piece:
        found = self.model.pieces()
        return found[op.index % len(found)]

    def batch(self, rank: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        self.batches += 1
        rank = 0 if self.program.same_data else self.rank if rank is None else rank
        made = torch.Generator().manual_seed(self.program.seed * 7919 + self.batches * 31 + rank)
        width = self.program.model.width
        rows = ROWS + rank  # ranks have batches of different sizes
        x, target = torch.randn(rows, width, generator=made), torch.randn(rows, width, generator=made)
        return self.shaken(x), torch.randint(0, models.WORDS, (rows,), generator=made), target

    @staticmethod
    def loss(y: Tensor, target: Tensor) -> Tensor:
        return (y - target).square().mean()

    @staticmethod
    def backward(loss: Tensor, **how: Any) -> None:
        if loss.requires_grad:  # else everything that was used is frozen
            loss.backward(**how)

    def forward(self, fail: int = -1) -> Tensor:
        x, tokens, target = self.batch()
        return self.loss(first_tensor(self.model(x, tokens, self.batches, fail)), target)

    def record(self, label: str, value: Any, **how: Any) -> None:
        with torch.no_grad():
            tensor = torch.as_tensor(value).detach().clone().double().reshape(-1)
        self.records.append(Record(label, tensor, **how))

    def quietly(self, op: Op) -> Any:
        return nullcontext()

    def run(self, at: int, op: Op) -> None:
        self.at = f"{at}: {op!r}"
        getattr(self, f"op_{op.name}")(op)

    # -- backward and step

    def op_backward(self, op: Op) -> None:
        with self.quietly(op):
            value = getattr(self, f"_backward_{op.how or 'plain'}")(op)
        self.record(f"loss at {self.at}", value)

    def _backward_plain(self, op: Op) -> Tensor:
        loss = self.forward()
        self.backward(loss)
        return loss

    def _backward_l2(self, op: Op) -> Tensor:
        loss = self.forward()
        loss = loss + 0.05 * self.parameter(op).square().sum()
        self.backward(loss)
        return loss

    def _backward_l2_before(self, op: Op) -> Tensor:
        term = 0.05 * self.parameter(op).square().sum()
        loss = self.forward() + term
        self.backward(loss)
        return loss

    def _backward_external_read(self, op: Op) -> Tensor:
        loss = self.forward()
        self.record(f"norm at {self.at}", self.parameter(op).norm().item())
        self.backward(loss)
        return loss

    def _backward_grad_scale(self, op: Op) -> Tensor:
        loss = self.forward()
        self.backward(loss / 3)
        return loss

    def _backward_joint(self, op: Op) -> Tensor:
        loss = self.forward() + self.forward()
        self.backward(loss)
        return loss

    def _backward_retain(self, op: Op) -> Tensor:
        loss = self.forward()
        self.backward(loss / 2, retain_graph=True)
        self.backward(loss / 2)
        return loss

    def _backward_reverse(self, op: Op) -> Tensor:
        first, second = self.forward(), self.forward()
        self.backward(second)
        self.backward(first)
        return first + second

    def _backward_penalty(self, op: Op) -> Tensor:
        x, tokens, target = self.batch()
        x.requires_grad_(True)
        loss = self.loss(first_tensor(self.model(x, tokens, self.batches, -1)), target)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + slope.square().sum()
        self.backward(loss)
        return loss

    def _backward_autograd_grad(self, op: Op) -> Tensor:
        parameter = self.parameter(op)
        loss = self.forward()
        if parameter.requires_grad and loss.requires_grad:
            (gradient,) = torch.autograd.grad(loss, [parameter], allow_unused=True)
            self.record(f"gradient at {self.at}", 0.0 if gradient is None else gradient)
        return self._backward_plain(op)

    def _backward_part(self, op: Op) -> Tensor:
        loss = self.forward()
        self.backward(loss, inputs=[self.parameter(op)] if self.parameter(op).requires_grad else None)
        return loss

    def op_forward(self, op: Op) -> None:
        """A forward whose backward is the operation `late`: whatever is between them may change what it used."""
        loss = self.forward()
        self.outside = self.program.model.external >= 0 or op.how == "l2" or (bool(self.waiting) and self.outside)
        self.waiting.append(loss + 0.05 * self.parameter(op).square().sum() if op.how == "l2" else loss)

    def op_late(self, op: Op) -> None:
        if not self.waiting:
            return
        loss, raised = self.waiting.pop(), False
        try:
            with self.quietly(op):
                self.backward(loss)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raised = True
            self.optimizer.zero_grad()
        self.record(f"raised at {self.at}", float(raised))
        self.record(f"loss at {self.at}", loss)

    def op_step(self, op: Op) -> None:
        """A step and, but for "unzeroed", the end of its gradients."""
        self.step(op)
        if op.how == "model":
            self.model.zero_grad()
        elif op.how == "parameters":
            self.op_drop_all(op)
        elif op.how != "unzeroed":
            self.optimizer.zero_grad(set_to_none=op.how != "keep")

    def step(self, op: Op) -> None:
        raise NotImplementedError

    def op_resume(self, op: Op) -> None:
        raise NotImplementedError

    def op_drop(self, op: Op) -> None:
        self.parameter(op).grad = None

    def op_drop_all(self, op: Op) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    # -- reading and writing

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
            "square": lambda: p.square().sum().item(),
            "first": lambda: p[0].tolist() if p.ndim and p.numel() else 0.0,
            "tolist": p.tolist,
            "numpy": lambda: p.detach().cpu().numpy(),
            "clone": lambda: p.detach().clone(),
            "data": lambda: p.data.sum(),
            "detach": lambda: p.detach().abs().sum(),
            "state_dict": lambda: torch.cat([v.double().flatten() for v in self.model.state_dict().values()]),
            "vector": lambda: nn.utils.parameters_to_vector(self.model.parameters()),
        }
        if how == "average":  # of the values so far, as evaluation likes it
            now = [q.detach().clone().double() for q in self.parameters]
            old = self.average or now
            self.average = [0.5 * a + 0.5 * b for a, b in zip(old, now, strict=True)]
            read[how] = lambda: torch.cat([q.flatten() for q in self.average])
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

    def gathered(self) -> Any:
        return nullcontext()

    def op_state_dict(self, op: Op) -> None:
        values = {name: value.clone() for name, value in self.model.state_dict().items()}
        names = [name for name, value in values.items() if value.is_floating_point()]
        values[names[op.index % len(names)]] *= 0.9
        self.model.load_state_dict(values)

    # -- other things that loops do

    def op_evaluate(self, op: Op) -> None:
        x, tokens, _ = self.batch()
        training = self.model.training
        if op.how == "eval":
            self.model.eval()
        model = self.model
        if op.how == "copy":
            model = models.build(self.program.model, 1)
            model.load_state_dict(self.model.state_dict())
            model.train(training)
        modes: dict[str, Any] = {"inference": torch.inference_mode, "thrown_away": nullcontext, "cached": cached}
        with modes.get(op.how, torch.no_grad)():
            self.record(f"output at {self.at}", first_tensor(model(x, tokens, self.batches, -1)))
        self.model.train(training)

    def op_sub_forward(self, op: Op) -> None:
        x, tokens, target = self.batch()
        with torch.no_grad() if op.how == "no_grad" else nullcontext():
            y = first_tensor(self.piece(op)(x, tokens))
        self.record(f"output at {self.at}", y)
        if y.requires_grad:
            self.loss(y, target).backward()

    def op_mode(self, op: Op) -> None:
        self.model.train(not self.model.training)

    def op_options(self, op: Op) -> None:
        group = self.optimizer.param_groups[op.index % len(self.optimizer.param_groups)]
        if op.how == "weight_decay" and "weight_decay" in group:
            group["weight_decay"] = 0.05
        else:
            group["lr"] = group["lr"] * 0.5

    def op_freeze(self, op: Op) -> None:
        parameter = self.parameter(op)
        if parameter.is_floating_point():
            parameter.requires_grad_(not parameter.requires_grad)

    def op_seed(self, op: Op) -> None:
        torch.manual_seed(op.index * 10 + self.rank)

    def op_fail(self, op: Op) -> None:
        at = op.index % len(self.model.pieces())
        hook = None
        if op.how == "backward":

            def spoil(module: nn.Module, args: Any, output: Any) -> None:
                y = first_tensor(output)
                if y.requires_grad:
                    y.register_hook(_raise)

            hook = self.piece(op).register_forward_hook(spoil)
        try:
            loss = self.forward(-1 if op.how == "backward" else at)
            if op.how == "backward":
                self.backward(loss)
        except Failure:
            pass
        if hook is not None:
            hook.remove()
            self.optimizer.zero_grad()

    # -- what may be refused

    def op_functional(self, op: Op) -> None:
        x, tokens, _ = self.batch()
        values = {name: p.detach() * 0.9 for name, p in self.model.named_parameters()}
        with torch.no_grad():
            y = torch.func.functional_call(self.model, values, (x, tokens, self.batches, -1))
        self.record(f"output at {self.at}", first_tensor(y))

    def op_parameters_to(self, op: Op) -> None:
        self.model.to(torch.float32)

    def op_vector(self, op: Op) -> None:
        values = nn.utils.parameters_to_vector(self.model.parameters()).detach()
        nn.utils.vector_to_parameters(values * 0.9, self.model.parameters())

    def op_clip(self, op: Op) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)

    def op_deepcopy(self, op: Op) -> None:
        copy.deepcopy(self.model)

    def op_pickle(self, op: Op) -> None:
        torch.save(self.parameter(op), io.BytesIO())

    def op_set_data(self, op: Op) -> None:
        self.parameter(op).data = self.parameter(op).detach() * 0.9

    def op_add_group(self, op: Op) -> None:
        self.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})

    def op_optimizer_state(self, op: Op) -> None:
        saved = pickle.loads(pickle.dumps(self.optimizer.state_dict()))
        fresh = {"state": {}, "param_groups": saved["param_groups"]}
        if not op.index % 2:
            self.optimizer.load_state_dict(fresh)
        self.optimizer.load_state_dict(saved)


@torch.no_grad()
def _shrink_linears(module: nn.Module) -> None:
    if type(module) is nn.Linear and "weight" in module._parameters:
        module.weight.mul_(0.9)


def _raise(gradient: Tensor) -> Tensor:
    raise Failure("in backward")
