"""Trains one model of the zoo beside its twin on plain torch, and prints the result: `python -m tests.zoo.one NAME`."""

import argparse
import json
import math
import random
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import zero_core
from tests.zoo.models import ZOO, Subject
from zero_core.errors import ZeroError
from zero_offload import MemoryByteStore, TieredStore

OPERATORS = "nms qnms roi_align roi_pool ps_roi_align ps_roi_pool deform_conv2d _roi_align_backward _roi_pool_backward "
OPERATORS += "_ps_roi_align_backward _ps_roi_pool_backward _deform_conv2d_backward"
LIBRARIES: list[Any] = []  # an operator goes with its library
STEPS = 4
CLIP = 1.0
RATE = 1e-3
EPSILON = 1e-3  # AdamW would make a step of the rate's size of a gradient that is rounding


def name_operators() -> None:
    """Declares the operators whose C++ in torchvision's wheel needs CUDA's libraries, without which it is no import."""
    library = torch.library.Library("torchvision", "DEF")
    for name in OPERATORS.split():
        library.define(f"{name}(Tensor x) -> Tensor")
    LIBRARIES.append(library)


def seeded(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(seed)


def made(name: str) -> tuple[Subject, Any]:
    seeded(0)
    subject = ZOO[name].make()
    optimizer = subject.optimizer or (lambda model: torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPSILON))
    return subject, optimizer(subject.model)


def trained(subject: Subject, optimizer: Any, clip: bool) -> list[float]:
    losses = []
    for step in range(STEPS):
        seeded(step)
        loss = subject.loss(subject.model, step)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(subject.model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def units_of(model: nn.Module, blocks: str) -> list[type[nn.Module]] | None:
    """The classes with these names, of which the model must have modules."""
    classes = {type(module).__name__: type(module) for module in model.modules()}
    return [classes[name] for name in blocks.split()] or None


def values_of(model: nn.Module) -> dict[str, Tensor]:
    values = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    return {name: torch.view_as_real(v) if v.is_complex() else v for name, v in values.items()}


def compared(name: str, placement: str = "") -> dict[str, str]:
    """placement: "" or nvme. Maps "result" to equal, refused or differs, and "told" to what is to be known."""
    plain, theirs = made(name)
    start = {key: value.clone() for key, value in values_of(plain.model).items()}
    wanted = trained(plain, theirs, clip=True)
    if not any(not torch.equal(start[key], value) for key, value in values_of(plain.model).items()):
        raise AssertionError("plain torch changed nothing")
    if not all(map(math.isfinite, wanted)):
        raise AssertionError(f"plain torch has losses of {wanted}")
    subject, ours = made(name)
    try:
        options: dict[str, Any] = {"units": units_of(subject.model, ZOO[name].blocks), "max_grad_norm": CLIP}
        if placement:
            options["store"] = TieredStore(placement, placement, placement, nvme=MemoryByteStore())
        ours = zero_core.shard(subject.model, ours, stage=3, **options)
        losses = trained(subject, ours, clip=False)
        found = {key: value.clone() for key, value in values_of(subject.model).items()}
    except ZeroError as error:
        return {"result": "refused", "told": f"{type(error).__name__}: {error}"}
    apart = farthest(values_of(plain.model), found, start)
    loss = max(abs(a - b) / (abs(a) + 1e-6) for a, b in zip(wanted, losses, strict=True))
    if apart[0] > 1 or loss > 1e-4:
        return {"result": "differs", "told": f"{apart[1]} by {apart[0]:.2g} x the tolerance, losses by {loss:.1g}"}
    return {"result": "equal", "told": f"in {len(zero_core.units(subject.model))} units"}


def distance(value: Tensor, start: Tensor | None) -> float:
    """The largest change of a floating-point tensor; from 0, if it was not there or had another shape."""
    first = start.double() if start is not None and start.shape == value.shape else 0.0
    away = (value.double() - first).abs().nan_to_num(posinf=0.0)
    return float(away.max()) if value.is_floating_point() and value.numel() else 0.0


def farthest(plain: dict[str, Tensor], found: dict[str, Tensor], start: dict[str, Tensor]) -> tuple[float, str]:
    """By how many tolerances a value is away at most, and its name.

    The tolerance of a tensor is 1e-3 of how far plain torch moved it, and 1e-5 of the farthest of all: some have
    gradients that are nothing but rounding, as the bias of an attention's keys.
    """
    if plain.keys() != found.keys():
        return float("inf"), f"names: {sorted(plain.keys() ^ found.keys())}"
    moved = {name: distance(value, start.get(name)) for name, value in plain.items()}
    apart, most = (0.0, ""), max(moved.values())
    for name, value in plain.items():
        if value.shape != found[name].shape:
            return float("inf"), f"the shape of {name}"
        if not value.numel():
            continue
        tolerance = 1e-3 * moved[name] + 1e-5 * most + 1e-6 * distance(value, None)
        away = (value.double() - found[name].double()).abs().nan_to_num(float("inf"))
        away[value.isnan() & found[name].isnan()] = 0
        away[value == found[name]] = 0  # infinities
        apart = max(apart, (float(away.max()) / (tolerance + 1e-30), name))
    return apart


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.one", description=__doc__)
    parser.add_argument("name", choices=sorted(ZOO))
    parser.add_argument("--placement", default="", choices=["", "nvme"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if not torch.cuda.is_available():
        name_operators()
    print(json.dumps(compared(given.name, given.placement)))


if __name__ == "__main__":
    main()
