"""Small models with one peculiarity each, and the run that holds a sharded one against its dense twin."""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_core
from tests import kit
from tests.kit import world
from tests.reference import Reference
from zero_core.optim.device_store import DeviceStore

WIDTH = 13  # prime: no shard boundary falls on a parameter's


class Block(nn.Module):
    """A residual block with an odd number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 17)
        self.down = nn.Linear(17, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Embedding, three blocks, head. `wrap` changes what a block returns, `unwrap` undoes it."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(self.make_block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("offset", torch.ones(3), persistent=False)

    def make_block(self) -> nn.Module:
        return Block()

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x) + self.offset


Pair = namedtuple("Pair", "hidden extra")


@dataclass
class Output:
    hidden: Tensor
    note: str = ""


@dataclass
class Slotted:
    __slots__ = ("hidden",)
    hidden: Tensor


class Returning(Stack):
    """Blocks that return their hidden state inside something."""

    WRAP: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
        "dict": (lambda x: {"hidden": x, "none": None}, lambda o: o["hidden"]),
        "namedtuple": (lambda x: Pair(x, 1), lambda o: o.hidden),
        "tuple": (lambda x: (x, x.detach()), lambda o: o[0]),
        "list": (lambda x: [[x]], lambda o: o[0][0]),
        "dataclass": (lambda x: Output(x), lambda o: o.hidden),
        "slots": (lambda x: Slotted(x), lambda o: o.hidden),
    }

    def __init__(self, kind: str) -> None:
        self.wrap, self.unwrap = self.WRAP[kind]
        super().__init__()

    def make_block(self) -> nn.Module:
        wrap = self.wrap

        class Wrapping(Block):
            def forward(self, x: Tensor) -> Any:
                return wrap(super().forward(x))

        return Wrapping()

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return self.unwrap(block(x))


class Unused(Stack):
    """A block of which one parameter is never used, and a block that is skipped altogether."""

    def __init__(self) -> None:
        super().__init__(4)
        self.blocks[0].spare = nn.Parameter(torch.randn(7))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for k in (0, 1, 3):
            x = self.blocks[k](x)
        return self.head(x)


class Frozen(Stack):
    """A wholly frozen block, and one with a frozen matrix and trainable rest (as LoRA makes)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
        self.blocks[1].up.weight.requires_grad_(False)


class Tied(Stack):
    """One matrix in two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


class External(Stack):
    """The head's weight and a block's are used outside their modules, before and after."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.blocks[1].norm.weight.mean()
        x = super().forward(x) * scale
        return x + (self.head.weight.sum(1) + self.blocks[2].down.weight.sum()) * 0.1


class Checkpointed(Stack):
    """Blocks under activation checkpointing; `segment` blocks in one go."""

    def __init__(self, reentrant: bool, segment: int = 1, blocks: int = 4) -> None:
        super().__init__(blocks)
        self.reentrant, self.segment = reentrant, segment

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for start in range(0, len(self.blocks), self.segment):
            part = list(self.blocks[start : start + self.segment])

            def run(x: Tensor, part: list[nn.Module] = part) -> Tensor:
                for block in part:
                    x = block(x)
                return x

            x = checkpoint(run, x, use_reentrant=self.reentrant)
        return self.head(x)


class Routed(Stack):
    """Experts in a ModuleList inside each block; ranks choose differently, and one expert is never chosen."""

    def make_block(self) -> nn.Module:
        class Experts(Block):
            def __init__(self) -> None:
                super().__init__()
                self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

            def forward(self, x: Tensor) -> Tensor:
                x = super().forward(x)
                chosen = int(x.detach().abs().sum() * 1000) % 3
                return x + self.experts[chosen](x)

        return Experts()


class Twice(Stack):
    """One block called two times in a forward, and an inner stack called on its own."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for k in (0, 1, 0, 2):
            x = self.blocks[k](x)
        return self.head(x)


class Sometimes(Stack):
    """What runs depends on the batch, so ranks differ: a tower, a block, a parameter, and a use outside of its module.

    The tower has the last units, and runs first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList(self.make_block() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        tower, block, scale, outside = (bool(each > 0) for each in x[0, :4])
        x = self.embed(x)
        for one in self.tower if tower else ():
            x = one(x)
        for one in self.blocks if block else self.blocks[::2]:
            x = one(x)
        x = x * self.scale if scale else x
        return self.head(x + self.blocks[0].up.bias.sum() if outside else x)


class InPlace(Stack):
    """The output of a block is changed in place by the next thing."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
            x += 1.0
        return self.head(x)


class InPlaceView(Stack):
    """The output of a block is a view, as a linear layer returns for three dimensions, and a slice of it is changed."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x[None])
        for block in self.blocks:
            x = block(x).view(-1, x.shape[-1])
            x[..., :2] += 1.0
        x = self.head(x[None])
        x[..., 0] *= 2.0
        return x


class Noting(DeviceStore):
    """Notes what is asked of it in `calls`, and whose values in `asked`, by the names of units."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []
        self.asked: set[str] = set()

    def attach(self, shards: Any, *given: Any, **options: Any) -> None:
        self.names = [shard.name for shard in shards]
        super().attach(shards, *given, **options)

    def prefetch(self, i: int) -> None:
        self._note("prefetch", i)
        super().prefetch(i)

    def parameters(self, i: int) -> Tensor:
        self._note("parameters", i)
        return super().parameters(i)

    def _note(self, call: str, i: int) -> None:
        self.calls.append((call, i))
        self.asked.add(self.names[i])


class Refused(Exception):
    """What a Refusing store raises."""


class Refusing(DeviceStore):
    """Fails when it is given shard `at`, or when all is there. `forgets`: it has nothing left then."""

    def __init__(self, at: int = 99, *, forgets: bool = False) -> None:
        super().__init__()
        self.at, self.forgets = at, forgets

    def attach(self, shards: Any, optimizer: Any, initial: Any, *, context: Any) -> None:
        def until(i: int) -> Tensor:
            if i == self.at:
                raise Refused
            return initial(i)

        if self.forgets:
            context = zero_core.store.StoreContext(context.device)
        super().attach(shards, optimizer, until, context=context)
        raise Refused


def data(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(97 * step + rank)
    return torch.randn(6, 5, generator=generator)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def train(
    make: Callable[[], nn.Module],
    *,
    steps: int = 4,
    loss: Callable[[nn.Module, Tensor], Tensor] = loss_of,
    micro: int = 1,
    build: Callable[[Any], torch.optim.Optimizer] = sgd,
    before: Callable[[nn.Module, int], Any] | None = None,
    backward: Callable[[nn.Module, int, int, Tensor], None] | None = None,
    tolerance: float = 1e-5,
    **options: Any,
) -> tuple[nn.Module, Any]:
    """Train sharded and dense side by side; assert equal losses, norms, and at the end equal parameters.

    micro: backwards before each step; the twin averages over ranks and sums over micro-batches. backward: in place of
    the usual one, whose losses are compared. Returns the sharded model and its optimizer.
    """
    rank, size = world()
    torch.manual_seed(1)
    dense = make()
    torch.manual_seed(1)
    model = make()
    clip = options.setdefault("max_grad_norm", 0.5)
    if options.get("update_in_backward"):
        clip = options["max_grad_norm"] = None
    reference = Reference(dense, build, param_dtype=options.get("param_dtype"), max_grad_norm=clip)
    optimizer = zero_core.shard(model, build(model.parameters()), **options)
    for step in range(steps):
        if before is not None:
            before(model, step)
        value = 0.0
        for m in range(micro):
            if backward is not None:
                backward(model, step, m, data(step * micro + m, rank))
            else:
                one = loss(model, data(step * micro + m, rank))
                optimizer.scale_loss(one).backward()
                value += float(one.detach())
        optimizer.step()
        optimizer.zero_grad()
        expected = reference.step(
            [[data(step * micro + m, r) for m in range(micro)] for r in range(size)],
            lambda dense, parts: sum(loss(dense, part) for part in parts),  # type: ignore[arg-type,misc,return-value]
        )
        if backward is None:
            assert abs(value - expected[rank]) <= tolerance * max(abs(expected[rank]), 1e-3), (step, value, expected)
        assert abs(optimizer.grad_norm - reference.grad_norm) <= tolerance * max(reference.grad_norm, 1e-3), step
    compare(model, reference, tolerance)
    for unit in zero_core.units(model):
        assert unit.residency.value == "sharded", f"{unit.name} was left {unit.residency.value}"
        assert unit.flat.untyped_storage().nbytes() == 0
    return model, optimizer


def beside(
    make: Callable[[], nn.Module],
    *,
    steps: int = 3,
    loss: Callable[[nn.Module, Tensor], Tensor] = loss_of,
    build: Callable[[Any], torch.optim.Optimizer] = sgd,
    **options: Any,
) -> tuple[nn.Module, nn.Module]:
    """Train a sharded model and a plain copy on the same data on every rank; assert equal losses and parameters.

    Unlike the reference of train(), the copy shows what a forward writes or steps. Returns both models.
    """
    dense, theirs, model, ours = kit.pair(make, build, seed=1, **options)
    for step in range(steps):
        losses = [kit.step(own, loss(each, data(step, 0))) for each, own in ((model, ours), (dense, theirs))]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    kit.assert_same(model, dense, rtol=1e-5, atol=1e-6)
    return model, dense


def backward_both(model: nn.Module, dense: nn.Module, step: int, loss: Any = loss_of) -> None:
    """On this rank's data; and on that of all ranks in turn, with the mean of their gradients."""
    rank, size = world()
    zero_core.handle(model).optimizer.scale_loss(loss(model, data(step, rank))).backward()
    for each in range(size):
        (loss(dense, data(step, each)) / size).backward()


def same_gradients(model: nn.Module, dense: nn.Module, **tolerance: float) -> None:
    """A sharded model's full gradients are close to a plain one's, or None where those are. Collective."""
    found = [zero_core.full_gradient(p) for p in model.parameters()]
    torch.testing.assert_close(found, [p.grad for p in dense.parameters()], **tolerance)


def compare(model: nn.Module, reference: Reference, tolerance: float) -> None:
    with zero_core.gathered(model, master=True):
        for (name, ours), master in zip(model.named_parameters(), reference.masters, strict=True):
            torch.testing.assert_close(
                ours.detach(), master.detach(), rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


class Uneven(nn.Module):
    """Units of several sizes, a small one, a frozen one, and parameters of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(64))
        self.wide = nn.Sequential(nn.Linear(64, 400), nn.Tanh(), nn.Linear(400, 64))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 90), nn.Tanh(), nn.Linear(90, 64)) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 150)
        self.layers[2].requires_grad_(False)

    def forward(self, x):
        x = self.wide(x + self.position)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x)).float().square().mean()
