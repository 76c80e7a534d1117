"""Runs a program twice, on plain torch and sharded, and compares what the two recorded. Runs on every rank.

Plain torch stands for R ranks with R replicas in one process: each runs its own batches with its own random numbers,
and before a step every replica's gradients become their mean, as DistributedDataParallel makes them.
"""

from __future__ import annotations

import copy
import gc
import io
import itertools
import math
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zero_core
from tests.fuzz import models
from tests.fuzz.models import Failure, Piece, first_tensor
from tests.fuzz.optimizers import build_optimizer
from tests.fuzz.program import Op, Program
from zero_core.errors import ZeroError
from zero_core.init import materialise
from zero_nvme import NvmeError
from zero_offload.errors import OffloadError

__all__ = ["Outcome", "execute"]

ROWS = 3
NUMBERS, UPDATES = 1e-5, 1e-3  # the tolerances: of losses, norms and outputs; of parameters, relative to their update
JITTER = 3e-7  # what jittered plain runs change in inputs and first values, to learn what rounding does
_runs = itertools.count()  # of this process
ALLOWANCE = 10  # how many times what jitter changed is allowed beside the tolerances


@dataclass(frozen=True)
class Outcome:
    """match, refused, invalid (plain torch cannot run it), differs or error; what was seen; the refusal's reason."""

    kind: str
    text: str = ""
    loose: bool = False  # it matched with an allowance for rounding


class Invalid(Exception):
    """Plain torch does not define what the program computes."""


@dataclass
class Record:
    """Something both runs saw. scale: what its tolerance is relative to."""

    label: str
    value: Tensor
    tolerance: float = NUMBERS
    scale: float | None = None  # None: the largest value


# -- what one rank does ------------------------------------------------------------------------------------------------


class Side:
    """One rank's model, optimizer and random numbers. Every operation of a loop is a method `op_NAME`."""

    model: Any
    optimizer: Any

    def __init__(self, program: Program, rank: int, jitter: int = 0) -> None:
        self.program, self.rank = program, rank
        self.noise = torch.Generator().manual_seed(jitter) if jitter else None
        self.records: list[Record] = []
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
        x, target = torch.randn(ROWS, width, generator=made), torch.randn(ROWS, width, generator=made)
        return self.shaken(x), torch.randint(0, models.WORDS, (ROWS,), generator=made), target

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
        self.record(f"read at {self.at}", read[how]())

    def op_write(self, op: Op) -> None:
        p, how = self.parameter(op), op.how
        if not p.is_floating_point():
            return
        if how == "detach":
            p.detach().mul_(0.9)
        elif how == "data":
            p.data.mul_(0.9)
        elif how == "data_row":
            p.data.view(-1)[:2] = 0.1
        elif how == "gathered":
            with self.gathered():
                p.data.mul_(0.9)
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
        modes: dict[str, Any] = {"inference": torch.inference_mode, "thrown_away": nullcontext}
        with modes.get(op.how, torch.no_grad)():
            self.record(f"output at {self.at}", first_tensor(self.model(x, tokens, self.batches, -1)))
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


def _raise(gradient: Tensor) -> Tensor:
    raise Failure("in backward")


# -- plain torch -------------------------------------------------------------------------------------------------------


class Plain(Side):
    """One replica on plain torch."""

    first: Plain  # rank 0's, whose buffers a checkpoint holds

    def step(self, op: Op) -> None:
        self.optimizer.step()

    def op_resume(self, op: Op) -> None:
        saved = copy.deepcopy((self.first.model.state_dict(), self.first.optimizer.state_dict()))
        random, frozen = torch.get_rng_state(), [p.requires_grad for p in self.parameters]
        training, noise, self.noise = self.model.training, self.noise, None
        self.model = self.make(99)
        self.optimizer = build_optimizer(self.program.optimizer, self.model)
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])
        self.noise = noise
        self.model.train(training)
        for parameter, wanted in zip(self.parameters, frozen, strict=True):
            parameter.requires_grad_(wanted)
        torch.set_rng_state(random)


class World:
    """Every rank's replica in this process, one after another."""

    def __init__(self, program: Program, jitter: int = 0) -> None:
        self.program = program
        self.sides: list[Plain] = []
        self.random: list[Tensor] = []
        for rank in range(program.config.ranks):
            self.sides.append(Plain(program, rank, jitter))
            self.sides[-1].first = self.sides[0]
            self.random.append(torch.get_rng_state())
        self.before = self.values()
        self.travelled = [torch.zeros(()) for _ in self.before]

    def run(self) -> list[list[Record]]:
        """Every rank's records."""
        for at, op in enumerate(self.program.loop):
            joint = op.name == "step"
            if joint and op.how == "closure":
                self.each(at, Op("backward"))
            norm = self.average() if joint else None
            self.each(at, op)
            for side in self.sides:
                if norm is not None:
                    side.record(f"gradient norm at {side.at}", norm)
            self.measure()
        for side in self.sides:
            for (name, p), far in zip(side.model.named_parameters(), self.travelled, strict=True):
                side.record(name, p, tolerance=UPDATES, scale=float(far))
            for name, buffer in side.model.named_buffers():
                side.record(name, buffer)
        self.restore_each(lambda side: side.record("the next random number", torch.rand(1)))
        for one, other in zip(self.sides[0].parameters, self.sides[-1].parameters, strict=True):
            if not torch.allclose(one, other, rtol=1e-6, atol=1e-7):
                raise Invalid("the replicas' parameters part: ranks write different values in forward")
        for side in self.sides:
            for record in side.records:
                if not bool(record.value.isfinite().all()):
                    raise Invalid(f"{record.label} is not finite")
        return [side.records for side in self.sides]

    def each(self, at: int, op: Op) -> None:
        self.restore_each(lambda side: side.run(at, op))

    def restore_each(self, act: Callable[[Plain], None]) -> None:
        for rank, side in enumerate(self.sides):
            torch.set_rng_state(self.random[rank])
            act(side)
            self.random[rank] = torch.get_rng_state()

    def average(self) -> float:
        """Give every replica the mean gradient, clipped; its norm before."""
        total = 0.0
        members = [{id(p) for g in side.optimizer.param_groups for p in g["params"]} for side in self.sides]
        for replicas in zip(*(side.parameters for side in self.sides), strict=True):
            found = [p.grad for p in replicas if p.grad is not None]
            if found and id(replicas[0]) in members[0]:
                mean = torch.stack(found).sum(0) / len(replicas)
                total += float(mean.double().square().sum())
                for p in replicas:
                    p.grad = mean.clone()
        norm, limit = math.sqrt(total), self.program.config.max_grad_norm
        if limit is not None:
            for side, mine in zip(self.sides, members, strict=True):
                for p in side.parameters:
                    if p.grad is not None and id(p) in mine:
                        p.grad.mul_(min(1.0, limit / (norm + 1e-6)))
        return norm

    def values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.sides[0].parameters]

    def measure(self) -> None:
        """How far each parameter went so far, by its largest change of every operation."""
        now = self.values()
        for k, (old, new) in enumerate(zip(self.before, now, strict=True)):
            if new.numel():
                self.travelled[k] = self.travelled[k] + (new - old).abs().max()
        self.before = now


# -- sharded -----------------------------------------------------------------------------------------------------------


class Sharded(Side):
    """This rank of the sharded run."""

    def __init__(self, program: Program, rank: int, folder: str, bytestore: Any) -> None:
        self.folder, self.bytestore = folder, bytestore
        super().__init__(program, rank)
        self.optimizer = self.shard(program.config.stage)

    def make(self, seed: int) -> Any:
        with zero_core.deferred_init() if self.program.config.deferred else nullcontext():
            return models.build(self.program.model, seed)

    def shard(self, stage: int) -> Any:
        config = self.program.config
        units: dict[str, Any] = {"blocks": [Piece], "linears": [nn.Linear]}
        return zero_core.shard(
            self.model,
            self.optimizer,
            stage=stage,
            units=units.get(config.units),
            prefetch_bytes=config.prefetch_bytes,
            resident_bytes=config.resident_bytes,
            max_grad_norm=config.max_grad_norm,
            update_in_backward=config.update_in_backward,
            store=self.store(),
        )

    def store(self) -> Any:
        config = self.program.config
        if not config.placement:
            return None
        import zero_offload
        import zero_optim_cpu

        kinds = dict(zip(("parameters", "gradients", "optimizer"), config.placement.split(), strict=True))
        return zero_offload.TieredStore(
            **kinds,
            nvme=self.bytestore if "nvme" in config.placement else None,
            step=zero_optim_cpu.CpuStep() if config.cpu_step else None,
            tile_numel=1 << 20,
            overlap=config.overlap,
        )

    def quietly(self, op: Op) -> Any:
        return zero_core.no_sync(self.model) if op.quiet else nullcontext()

    def gathered(self) -> Any:
        return zero_core.gathered(self.model)

    def step(self, op: Op) -> None:
        if op.how == "closure":
            at, self.at = self.at, f"{self.at.split(':')[0]}: {Op('backward')!r}"
            self.optimizer.step(lambda: self.op_backward(Op("backward")))
            self.at = at
        else:
            self.optimizer.step()
        self.record(f"gradient norm at {self.at}", self.optimizer.grad_norm)

    def op_resume(self, op: Op) -> None:
        folder = Path(self.folder) / f"checkpoint-{len(self.records)}-{self.batches}"
        zero_core.checkpoint.save(folder, self.model, self.optimizer)
        frozen, training = [p.requires_grad for p in self.parameters], self.model.training
        self.optimizer.close()
        self.model = self.make(99)
        self.optimizer = build_optimizer(self.program.optimizer, self.model)
        self.optimizer = self.shard((self.program.config.stage + 1) % 4 if op.how else self.program.config.stage)
        zero_core.checkpoint.load(folder, self.model, self.optimizer)
        self.model.train(training)
        for parameter, wanted in zip(self.parameters, frozen, strict=True):
            parameter.requires_grad_(wanted)

    def finish(self) -> None:
        with zero_core.gathered(self.model, master=True):
            for name, p in self.model.named_parameters():
                self.record(name, p)
        for name, buffer in self.model.named_buffers():
            self.record(name, buffer)
        self.record("the next random number", torch.rand(1))
        self.optimizer.close()


# -- judgement ---------------------------------------------------------------------------------------------------------


def execute(program: Program, folder: str) -> Outcome:
    """Run the program on plain torch and as this rank of the sharded run. Raises what nobody raised on purpose."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = World(program).run()[rank]
        except Exception as error:
            return Outcome("invalid", f"{type(error).__name__}: {error}"[:300])
        try:
            found = _sharded(program, rank, folder)
        except Exception as error:
            if _on_purpose(error):
                return Outcome("refused", f"{type(error).__name__}: {error}")
            raise
        finally:
            if next(_runs) % 10 == 0:
                gc.collect()
                gc.freeze()  # what is left is torch's; looking through it takes longer than a program
        return _compare(program, rank, expected, found)


def _sharded(program: Program, rank: int, folder: str) -> list[Record]:
    bytestore = None
    if "nvme" in program.config.placement:
        import zero_nvme
        import zero_offload

        place = tempfile.mkdtemp(dir=folder)
        bytestore = zero_nvme.Slab([place]) if program.config.slab else zero_offload.MemoryByteStore()
    try:
        side = Sharded(program, rank, folder, bytestore)
        for at, op in enumerate(program.loop):
            side.run(at, op)
        side.finish()
        return side.records
    finally:
        if bytestore is not None:
            bytestore.close()


def _on_purpose(error: BaseException) -> bool:
    """One of our classes; or a TypeError or ValueError that a `raise` of ours raised."""
    if isinstance(error, (ZeroError, OffloadError, NvmeError)):
        return True
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = Path(last.filename).parent.name.startswith("zero_")
    return ours and isinstance(error, (TypeError, ValueError)) and str(last.line).startswith("raise ")


def _compare(program: Program, rank: int, expected: list[Record], found: list[Record]) -> Outcome:
    labels = [[record.label for record in records] for records in (expected, found)]
    if labels[0] != labels[1]:
        return Outcome("differs", f"recorded {labels[0]}, sharded {labels[1]}")
    wrong = [k for k, (a, b) in enumerate(zip(expected, found, strict=True)) if _distance(a, b) > _allowed(a)]
    if not wrong:
        return Outcome("match")
    jittered = []
    for jitter in (1, 2, 3):
        with torch.random.fork_rng():
            jittered.append(World(program, jitter).run()[rank])
    told = []
    for k in wrong:
        noise = max(_distance(expected[k], records[k]) for records in jittered)
        if _distance(expected[k], found[k]) > max(_allowed(expected[k]), ALLOWANCE * noise):
            told.append(_tell(expected[k], found[k], noise))
    return Outcome("differs", "\n".join(told)) if told else Outcome("match", loose=True)


def _distance(expected: Record, found: Record) -> float:
    if expected.value.shape != found.value.shape:
        return math.inf
    far = (expected.value - found.value).abs()
    return float(far.nan_to_num(math.inf).max()) if far.numel() else 0.0


def _allowed(expected: Record) -> float:
    largest = float(expected.value.abs().max()) if expected.value.numel() else 0.0
    if expected.scale is None:
        return expected.tolerance * largest
    return expected.tolerance * expected.scale + 2e-7 * largest  # what fp32 cannot hold


def _tell(expected: Record, found: Record, noise: float) -> str:
    def shown(values: Tensor) -> str:
        return "[" + " ".join(f"{v:.7g}" for v in values.tolist()[:6]) + (" ...]" if values.numel() > 6 else "]")

    return (
        f"{expected.label}: plain {shown(expected.value)}, sharded {shown(found.value)}; apart by "
        f"{_distance(expected, found):.2g}, allowed {_allowed(expected):.2g}, rounding makes {noise:.1g}"
    )


