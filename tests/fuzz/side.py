"""What one rank of a run does: its model, its batches, and a method for every operation of a loop. Records what it saw.

Plain torch, but for `materialise`: what is the same on both sides. What differs is Plain's and Sharded's, in run.py.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import cached

import zero_core
from tests.fuzz.hooks import Hooks
from tests.fuzz.kinds import WORDS
from tests.fuzz.models import Failure, Piece, build, first_tensor
from tests.fuzz.optimizers import build_optimizer
from tests.fuzz.program import Op, Program
from tests.fuzz.values import Values
from tests.fuzz.ways import Ways
from zero_core.model.initial_values import materialise

ROWS = 3
NUMBERS = 1e-5  # the tolerance of losses, norms and outputs
JITTER = 3e-7  # what jittered plain runs change in inputs and first values, to learn what rounding does
ATTENTION = {"mha", "masked", "encoder", "transformer"}  # use the weight of out_proj outside of that module

OPTIONS: dict[str, Any] = {
    "momentum": 0.5,
    "weight_decay": 0.05,
    "dampening": 0.2,
    "eps": 0.02,
    "betas": (0.7, 0.8),
    "lr_decay": 0.2,
    "rho": 0.7,
    "alpha": 0.8,
    "momentum_decay": 0.01,
}


@dataclass
class Record:
    """Something both runs saw. scale: what its tolerance is relative to."""

    label: str
    value: Tensor
    tolerance: float = NUMBERS
    scale: float | None = None  # None: the largest value


class Side(Values, Hooks, Ways):
    """One rank's model, optimizer and random numbers. Every operation of a loop is a method `op_NAME`.

    `step`, `save`, `load` and `interrupted` are each kind's own.
    """

    def __init__(self, program: Program, rank: int, jitter: int = 0) -> None:
        super().__init__()
        self.program, self.rank = program, rank
        self.noise = torch.Generator().manual_seed(jitter) if jitter else None
        self.records: list[Record] = []
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
        self.prepare()
        torch.manual_seed(self.program.seed + 1000 + rank)

    def prepare(self) -> None:
        """What is done before shard."""
        self.unhook()
        for at, op in enumerate(self.program.before):
            self.run(at - len(self.program.before), op)

    def make(self, seed: int) -> Any:
        if self.program.config.deferred:
            with zero_core.deferred_init():  # its first values are not those of eager construction
                model = build(self.program.model, seed)
            materialise(model)
        else:
            model = build(self.program.model, seed)
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
        return self.shaken(x), torch.randint(0, WORDS, (rows,), generator=made), target

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
        self.tell()

    def tell(self) -> None:
        """Records what hooks saw in the operation."""
        for name, told in self.told().items():
            self.record(f"what hook {name} saw at {self.at}", told)

    # -- backward and step

    def op_backward(self, op: Op) -> None:
        how = op.how or "plain"
        with self.quietly(op):
            if hasattr(self, f"_loss_{how}"):
                value = getattr(self, f"_loss_{how}")(op)
                self.backward(value)
            else:
                value = getattr(self, f"_backward_{how}")(op)
        self.record(f"loss at {self.at}", value)

    def _loss_plain(self, op: Op) -> Tensor:
        return self.forward()

    def _loss_l2(self, op: Op) -> Tensor:
        return self.forward() + 0.05 * self.parameter(op).square().sum()

    def _loss_l2_before(self, op: Op) -> Tensor:
        term = 0.05 * self.parameter(op).square().sum()
        return self.forward() + term

    def _loss_external_read(self, op: Op) -> Tensor:
        loss = self.forward()
        self.record(f"norm at {self.at}", self.parameter(op).norm().item())
        return loss

    def _backward_grad_scale(self, op: Op) -> Tensor:
        loss = self.forward()
        self.backward(loss / 3)
        return loss

    def _loss_joint(self, op: Op) -> Tensor:
        return self.forward() + self.forward()

    def _backward_reverse(self, op: Op) -> Tensor:
        first, second = self.forward(), self.forward()
        self.backward(second)
        self.backward(first)
        return first + second

    def _loss_penalty(self, op: Op) -> Tensor:
        x, tokens, target = self.batch()
        x.requires_grad_(True)
        loss = self.loss(first_tensor(self.model(x, tokens, self.batches, -1)), target)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()

    def _loss_autograd_grad(self, op: Op) -> Tensor:
        parameter = self.parameter(op)
        loss = self.forward()
        if parameter.requires_grad and loss.requires_grad:
            (gradient,) = torch.autograd.grad(loss, [parameter], allow_unused=True)
            self.record(f"gradient at {self.at}", 0.0 if gradient is None else gradient)
        return self.forward()

    def _loss_saved_on_cpu(self, op: Op) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return self.forward()

    def _loss_saved_copies(self, op: Op) -> Tensor:
        """What the graph keeps is packed by hooks of the user's, which keep copies in twice the precision."""

        def pack(tensor: Tensor) -> Any:
            return (tensor.double(), tensor.dtype) if tensor.is_floating_point() else (tensor.clone(), tensor.dtype)

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept[0].to(kept[1])):
            return self.forward()

    def _loss_hook_runs(self, op: Op) -> Tensor:
        """A hook on the output of a block runs another block, or a whole model, inside backward.

        What it runs gets no such hook: a block whose forward has a backward would run it again, without an end.
        """
        x, tokens, _ = self.batch()
        inside = False
        runs = self.model if op.index % 3 == 0 else self.piece(Op(index=op.index // 3))
        arguments = (x, tokens, self.batches, -1) if runs is self.model else (x, tokens)

        def run(gradient: Tensor) -> Tensor:
            with torch.no_grad():
                return gradient * (1 + 0.1 * first_tensor(runs(*arguments)).mean())

        def run_twice(gradient: Tensor) -> Tensor:
            nonlocal inside
            inside, before = True, inside
            with torch.enable_grad():
                again = x.clone().requires_grad_()
                (slope,) = torch.autograd.grad(first_tensor(runs(again, *arguments[1:])).square().sum(), again)
            inside = before
            return gradient * (1 + 0.1 * slope.mean())

        def put(module: nn.Module, args: Any, output: Any) -> None:
            y = first_tensor(output)
            if y.requires_grad and not inside:
                y.register_hook(run if op.index % 2 else run_twice)

        handle = self.piece(op).register_forward_hook(put)
        loss = self.forward()
        handle.remove()
        return loss

    def _backward_part(self, op: Op) -> Tensor:
        loss = self.forward()
        self.backward(loss, inputs=[self.parameter(op)] if self.parameter(op).requires_grad else None)
        return loss

    def op_forward(self, op: Op) -> None:
        """A forward whose backward is the operation `late`: whatever is between them may change what it used."""
        loss = self.forward()
        attention = any(block.kind in ATTENTION for block in self.program.model.blocks)
        used = attention or self.program.model.external >= 0 or op.how == "l2"
        self.outside = used or (bool(self.waiting) and self.outside)
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
        """A step and the end of its gradients."""
        self.step(op)
        if op.how == "model":
            self.model.zero_grad()
        elif op.how == "parameters":
            self.op_drop_all(op)
        else:
            self.optimizer.zero_grad()

    def op_resume(self, op: Op) -> None:
        """Another model and optimizer go on from what `save` has kept; `load` gives it to them."""
        self.unhook()
        saved = self.save()
        frozen, training = [p.requires_grad for p in self.parameters], self.model.training
        self.waiting.clear()  # they are of the model that is left
        self.model = self.make(99)
        self.optimizer = build_optimizer(self.program.optimizer, self.model)
        self.load(saved, op)
        self.model.train(training)
        for parameter, wanted in zip(self.parameters, frozen, strict=True):
            parameter.requires_grad_(wanted)

    def op_drop(self, op: Op) -> None:
        self.parameter(op).grad = None

    def op_drop_all(self, op: Op) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    # -- other things that loops do

    def op_evaluate(self, op: Op) -> None:
        x, tokens, _ = self.batch()
        training = self.model.training
        if op.how.startswith("eval"):
            self.model.eval()
        model = self.model
        if op.how == "copy":
            model = build(self.program.model, 1)
            model.load_state_dict(self.model.state_dict())
            model.train(training)
        modes: dict[str, Any] = {
            "inference": torch.inference_mode,
            "eval_inference": torch.inference_mode,
            "thrown_away": nullcontext,
            "cached": cached,
        }
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
        """Changes an option of a group, where the group has it."""
        group = self.optimizer.param_groups[op.index % len(self.optimizer.param_groups)]
        if op.how in ("", "lr"):
            group["lr"] = group["lr"] * 0.5
        elif op.how in ("maximize", "nesterov", "amsgrad", "foreach", "decoupled_weight_decay"):
            if op.how in group:
                group[op.how] = not group[op.how]
        elif op.how == "lr_tensor":
            group["lr"] = torch.tensor(float(group["lr"]) * 0.5)
        elif op.how in group:
            group[op.how] = OPTIONS[op.how]

    def op_interrupt(self, op: Op) -> None:
        """Ctrl-C in a forward and backward, or in an evaluation, and going on: only one rank, between steps."""
        torch.manual_seed(self.program.seed)
        self.interrupted(op)
        self.record(f"modes at {self.at}", [float(torch.is_grad_enabled()), float(torch.is_inference_mode_enabled())])
        self.seen.clear()
        self.waiting.clear()
        self.optimizer.zero_grad()
        self.model.zero_grad()  # of what is in no group, a backward in the forward may have left gradients
        torch.manual_seed(self.program.seed)

    def op_freeze(self, op: Op) -> None:
        parameter = self.parameter(op)
        if parameter.is_floating_point():
            parameter.requires_grad_(not parameter.requires_grad)

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


def _raise(gradient: Tensor) -> Tensor:
    raise Failure("in backward")
