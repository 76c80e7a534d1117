"""What the tests of all packages share: ranks, optimizers, a step, twins, values. Importable in spawned ranks."""

import copy
import functools
import importlib
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_core


def world() -> tuple[int, int]:
    """This rank, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def sharded(model: Any, build: Callable[[Any], Any] = sgd, **options: Any) -> tuple[Any, Any]:
    """The model, or one of what makes models, and its optimizer from zero_core.shard(); `options` are shard()'s."""
    if not isinstance(model, nn.Module):
        torch.manual_seed(0)
        model = model()
    return model, zero_core.shard(model, build(model.parameters()), **options)


def twins(make: Callable[[], Any], seed: int = 0) -> tuple[Any, Any]:
    """A model for plain torch, and a copy of it to shard."""
    torch.manual_seed(seed)
    dense = make()
    return dense, copy.deepcopy(dense)


def pair(make: Callable[[], Any], build: Callable[[Any], Any] = sgd, seed: int = 0, **options: Any) -> Any:
    """A model for plain torch and its optimizer, a sharded copy of the model and its optimizer from shard()."""
    dense, model = twins(make, seed)
    return dense, build(dense.parameters()), model, zero_core.shard(model, build(model.parameters()), **options)


def scaled(optimizer: Any, loss: Tensor) -> Tensor:
    """The loss for backward: scaled, if the optimizer is a sharded one with a loss scale."""
    return getattr(optimizer, "scale_loss", lambda loss: loss)(loss)


def step(optimizer: Any, loss: Tensor) -> Tensor:
    """Backward, step and zero_grad. Returns the loss without its graph."""
    scaled(optimizer, loss).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def values(model: nn.Module, master: bool = False) -> list[Tensor]:
    """Copies of a sharded model's parameters, whole. Collective. `master` is `zero_core.gathered`'s."""
    return list(named_values(model, master).values())


def named_values(model: nn.Module, master: bool = False) -> dict[str, Tensor]:
    with zero_core.gathered(model, master=master):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same(model: nn.Module, dense: nn.Module, **tolerance: float) -> None:
    """A sharded model's parameters are close to a plain one's. Collective."""
    torch.testing.assert_close(values(model), [p.detach() for p in dense.parameters()], **tolerance)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def assert_bits(found: Any, wanted: Any) -> None:
    """Two state dicts have the same names in one order, or two lists the same length, and the same bits."""
    found, wanted = (each if hasattr(each, "items") else dict(enumerate(each)) for each in (found, wanted))
    assert list(found) == list(wanted)
    assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []


def count_sent(ranks: Any) -> Counter[str]:
    """Elements that this rank sends from here on, by collective: its share of a ring."""
    sent: Counter[str] = Counter()
    gather, reduce, average = ranks.all_gather, ranks.reduce_scatter, ranks.average_replicas
    others, replicas = ranks.shard.size - 1, ranks.replicate.size

    def all_gather(whole: Tensor, part: Tensor, *given: Any, **options: Any) -> Any:
        sent["all_gather"] += part.numel() * others
        return gather(whole, part, *given, **options)

    def reduce_scatter(part: Tensor, whole: Tensor, *given: Any, **options: Any) -> Any:
        sent["reduce_scatter"] += whole.numel() - part.numel()
        return reduce(part, whole, *given, **options)

    def average_replicas(values: Tensor, unit: str) -> Any:
        sent["all_reduce"] += 2 * values.numel() * (replicas - 1) // replicas
        return average(values, unit)

    ranks.all_gather, ranks.reduce_scatter, ranks.average_replicas = all_gather, reduce_scatter, average_replicas
    return sent


def on_ranks(*sizes: int) -> Callable[[Any], Any]:
    """The test is what each rank of a pool runs: of as many ranks as `sizes` says, or as its own `size` does."""

    def decorate(test: Any) -> Any:
        names = [*inspect.signature(test).parameters]

        @functools.wraps(test)
        def start(ranks: Any, size: int = sizes[0] if sizes else 0, **given: Any) -> None:
            ranks(size).run(
                _test, test.__module__, test.__name__, {**given, "size": size} if "size" in names else given
            )

        fixtures = {"ranks", *names} | ({"size"} if len(sizes) != 1 else set())
        start.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in sorted(fixtures)]
        )
        return pytest.mark.parametrize("size", sizes)(start) if len(sizes) > 1 else start

    return decorate


def _test(module: str, name: str, given: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**given)
