"""What a program is, and how one is made smaller. Data only: runs nothing.

Defaults are the simplest choice of every field: a program becomes smaller by giving fields their defaults back and by
losing elements of its tuples, and its `repr` shows only what is left.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


class Brief:
    """A repr without the fields that have their defaults: it is what a person reads of a failure."""

    def __repr__(self) -> str:
        shown = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in dataclasses.fields(self)  # type: ignore[arg-type]
            if getattr(self, f.name) != f.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Block(Brief):
    """One block of a model: (rows, width) in, the same shape out, inside whatever `output` says."""

    kind: str = "linear"  # a key of models.KINDS
    use: str = "once"  # once, twice, never, odd (every second forward), training, no_grad, forced, forced_through
    output: str = "tensor"  # a key of models.PACK
    checkpoint: str = ""  # "", plain, reentrant, adjoint: the last is recomputing.py's
    write: str = ""  # what its forward writes into its first weight: a key of models.WRITES
    frozen: str = ""  # "", all, first
    hook: str = ""  # "", forward, backward, parameter: a hook of the user's
    keep: str = ""  # where it keeps a tensor of its graph: "", attribute, buffer, list, dict


@dataclass(frozen=True, repr=False)
class Share(Brief):
    """A tensor that lies in the memory of block `one`'s weight: `other` picks it."""

    how: str = "data"  # data, parameter, transposed, view, flat, buffer, attribute, rows: see sharing.py
    one: int = 0
    other: int = 0


@dataclass(frozen=True, repr=False)
class Model(Brief):
    blocks: tuple[Block, ...] = (Block(),)
    width: int = 4
    container: str = "list"  # list, sequential, attributes, dict
    root: str = ""  # what the root itself owns: "", scale, bias, empty, embedding
    output: str = "tensor"
    ties: tuple[tuple[int, int], ...] = ()  # pairs of blocks with one weight, where both have one
    shares: tuple[Share, ...] = ()
    external: int = -1  # a block whose weight the root's forward uses, outside that block
    in_place: bool = False  # the root changes what blocks return
    wrapped: bool = False  # inside another module, which owns nothing


@dataclass(frozen=True, repr=False)
class Optimizer(Brief):
    name: str = "SGD"
    options: tuple[tuple[str, Any], ...] = (("lr", 0.1),)
    groups: str = "one"  # one, two, ndim, partial, named


@dataclass(frozen=True, repr=False)
class Config(Brief):
    ranks: int = 1
    stage: int = 3
    placement: str = ""  # "": zero-core's own store; else the tiers of parameters, gradients, states: "host nvme nvme"
    slab: bool = False  # a zero_nvme.Slab in place of zero_offload.MemoryByteStore
    cpu_step: bool = False  # zero_optim_cpu.CpuStep in place of zero_offload.TorchStep
    overlap: bool = True
    units: str = ""  # "", blocks, linears: the classes given as units=
    expert_bytes: int | None = 64 << 20  # 1: each expert of a stack is a unit
    prefetch_bytes: int = 128 << 20
    resident_bytes: int = 0
    max_grad_norm: float | None = None
    update_in_backward: bool = False
    deferred: bool = False  # the model is built under deferred_init
    warm: int = 0  # plain steps before shard


@dataclass(frozen=True, repr=False)
class Op(Brief):
    """One operation of the loop: a method of side.Side. `index` and `how` mean what that method says."""

    name: str = "backward"
    index: int = 0
    how: str = ""
    quiet: bool = False  # inside no_sync


@dataclass(frozen=True, repr=False)
class Program(Brief):
    model: Model = Model()
    optimizer: Optimizer = Optimizer()
    loop: tuple[Op, ...] = ()
    config: Config = Config()
    seed: int = 0
    same_data: bool = False  # every rank has the same batches: forwards that write what depends on them
    before: tuple[Op, ...] = ()  # what is done before shard


# -- making smaller ----------------------------------------------------------------------------------------------------


def sound(program: Program) -> bool:
    """Whether plain torch and shard() can be compared.

    With update_in_backward, every backward is a step of its own; a deferred model cannot be trained before shard(), nor
    can its tensors be changed. Which gradients an edit finds differs where ranks choose other experts.
    """
    names = {op.name for op in program.loop}
    if "grad" in names and program.config.ranks > 1 and any(b.kind == "experts" for b in program.model.blocks):
        return False
    if program.config.deferred and (program.config.warm or program.before or program.model.shares):
        return False
    uses = [op for op in program.loop if op.name in ("backward", "step") or op.how == "backward"]
    lone = [a for a, b in pairwise([*uses, Op()]) if a.name != "step" and b.name != "step"]
    return not (program.config.update_in_backward and lone)


def smaller(value: Any) -> Iterator[Any]:
    """Values of the same kind that have less: fields at their defaults, tuples without some of their elements."""
    if isinstance(value, tuple):
        half = len(value) // 2
        if half > 1:
            yield value[:half]
            yield value[half:]
        for at in range(len(value)):
            yield value[:at] + value[at + 1 :]
        for at, item in enumerate(value):
            for less in smaller(item) if dataclasses.is_dataclass(item) else ():
                yield value[:at] + (less,) + value[at + 1 :]
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            now = getattr(value, field.name)
            if now == field.default:
                continue
            if field.name != "seed":
                yield dataclasses.replace(value, **{field.name: field.default})
            if isinstance(now, tuple) or dataclasses.is_dataclass(now):
                for less in smaller(now):
                    yield dataclasses.replace(value, **{field.name: less})
