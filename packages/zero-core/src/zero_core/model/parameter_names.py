"""Finds which tensors of a file make up which parameter of a model, by name and shape. Reads no values.

Owns ties, base-model prefixes, tiled linears and the fused experts of newer `transformers`. A parameter is the
concatenation of parts of file tensors, in row-major order; almost always of one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..tensors.inner_tensors import named_parts
from .tiled_linear import TiledLinear

Shapes = Mapping[str, tuple[int, ...]]
_Found = tuple[tuple["Part", ...], tuple[int, ...] | None]  # parts, and the file's shape where it is not the model's


@dataclass(frozen=True)
class Part:
    """`numel` elements of the file tensor `name`, from its element `start`."""

    name: str
    start: int
    numel: int


@dataclass(frozen=True)
class Named:
    """One parameter or persistent buffer: its first name, its other names (ties), and the tensor itself."""

    name: str
    aliases: tuple[str, ...]
    tensor: Tensor
    is_buffer: bool

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


@dataclass(frozen=True)
class Match:
    """The result of `match`. Keys, `missing` and `mismatched` name the model's tensors, all others the file's."""

    parts: Mapping[str, tuple[Part, ...]]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]  # "name: file (2, 3), model (3, 2)"
    others: Mapping[str, tuple[str, ...]]  # the file's further names of a tensor in `parts`, as of a tied weight


def named_tensors(model: nn.Module) -> tuple[Named, ...]:
    """Returns parameters (their parts, where they have several), then persistent buffers, each once, in the model's
    order, with all their names."""
    found: dict[int, tuple[list[str], Tensor, bool]] = {}
    for part in named_parts(model, remove_duplicate=False):
        found.setdefault(id(part.tensor), ([], part.tensor, False))[0].append(part.name)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                name = f"{prefix}.{key}" if prefix else key
                found.setdefault(id(buffer), ([], buffer, True))[0].append(name)
    return tuple(Named(names[0], tuple(names[1:]), t, is_buffer) for names, t, is_buffer in found.values())


def whole_tensors(model: nn.Module) -> dict[str, tuple[tuple[Part, ...], tuple[int, ...], torch.dtype]]:
    """Returns for each parameter or buffer name its parts of written tensors, and the written tensor's shape and dtype.

    A tiled linear is written as the untiled linear. Everything else is written under its own first name.
    """
    tiles = _tiles(model)
    written = {}
    for named in named_tensors(model):
        itself = (Part(named.name, 0, named.tensor.numel()),), tuple(named.tensor.shape)
        written[named.name] = (*tiles.get(named.name, itself), named.tensor.dtype)
    return written


def match(model: nn.Module, shapes: Shapes, rename: Callable[[str], str] | None = None) -> Match:
    """Finds every parameter and persistent buffer of the model among the file's tensors.

    shapes: the file's tensors. rename: from a model name to the file's, tried first. A tied parameter is found under
    any of its names. Buffers that the file lacks are not missing: they were built with the model.
    """
    tiles = _tiles(model)
    spell = _spellings(getattr(model, "base_model_prefix", ""), rename)
    ignored = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    parts: dict[str, tuple[Part, ...]] = {}
    others: dict[str, tuple[str, ...]] = {}
    missing, mismatched = [], []
    used: set[str] = set()
    for named in named_tensors(model):
        wanted = tuple(named.tensor.shape)
        runs, whole = tiles.get(named.name, ((), wanted))
        found, wrong = _find((runs[0].name,) if runs else named.names, whole, shapes, spell)
        used.update(part.name for part in found)
        if wrong is not None:
            mismatched.append(f"{named.name}: file {wrong}, model {wanted}")
        elif found:
            parts[named.name] = tuple(Part(found[0].name, run.start, run.numel) for run in runs) or found
            # the file may hold the tied weight under its other names too
            others[named.name] = tuple(dict.fromkeys(s for n in named.names for s in spell(n) if s in shapes))
            used.update(others[named.name])
        elif not named.is_buffer:
            missing.append(named.name)
    known = used.union(s for n, _ in model.named_buffers(remove_duplicate=False) for s in spell(n))
    unexpected = [n for n in shapes if n not in known and not any(p.search(n) for p in ignored)]
    read = {part.name for found in parts.values() for part in found}
    others = {name: left for name, all_of in others.items() if (left := tuple(s for s in all_of if s not in read))}
    return Match(parts, tuple(missing), tuple(unexpected), tuple(mismatched), others)


def _spellings(base: str, rename: Callable[[str], str] | None) -> Callable[[str], list[str]]:
    """Returns the file's possible names for a model's name: renamed, as it is, without and with the base's prefix."""

    def spell(name: str) -> list[str]:
        names = [rename(name)] if rename is not None else []
        names.append(name)
        if base:
            names.append(name[len(base) + 1 :] if name.startswith(base + ".") else f"{base}.{name}")
        return names

    return spell


def _find(names: Iterable[str], shape: tuple[int, ...], shapes: Shapes, spell: Callable[[str], list[str]]) -> _Found:
    wrong: _Found = (), None
    for name in (s for n in names for s in spell(n)):
        moved = name.replace(".mlp.", ".block_sparse_moe.")  # Mixtral's router, in the same rename as its experts
        for wanted in dict.fromkeys((name, moved)):
            if shapes.get(wanted) == shape:
                return (Part(wanted, 0, math.prod(shape)),), None
        if name in shapes:
            wrong = (Part(name, 0, math.prod(shapes[name])),), shapes[name]
        if (stacked := _stacked_experts(name, shape, shapes)) is not None:
            return stacked
    return wrong


_EXPERTS = {  # fused parameter (experts, rows, columns): one file tensor an expert and projection
    "gate_up_proj": (("block_sparse_moe", ("w1", "w3")), ("mlp", ("gate_proj", "up_proj"))),
    "down_proj": (("block_sparse_moe", ("w2",)), ("mlp", ("down_proj",))),
}


def _stacked_experts(name: str, shape: tuple[int, ...], shapes: Shapes) -> _Found | None:
    """Finds experts that are one parameter in the model and one tensor each in the file; each projection is a run of
    rows."""
    prefix, _, kind = name.rpartition(".mlp.experts.")
    if kind not in _EXPERTS or not prefix or len(shape) != 3:
        return None
    for block, projections in _EXPERTS[kind]:
        names = [f"{prefix}.{block}.experts.{e}.{p}.weight" for e in range(shape[0]) for p in projections]
        if not all(n in shapes for n in names):
            continue
        each = (shape[1] // len(projections), shape[2])
        wrong = next((shapes[n] for n in names if shapes[n] != each), None)
        return tuple(Part(n, 0, math.prod(each)) for n in names), wrong
    return None


def _tiles(model: nn.Module) -> dict[str, tuple[tuple[Part, ...], tuple[int, ...]]]:
    """Returns for every parameter of a tiled linear its parts of the untiled parameter, and the latter's shape."""
    found: dict[str, tuple[tuple[Part, ...], tuple[int, ...]]] = {}
    for prefix, module in model.named_modules():
        if not isinstance(module, TiledLinear):
            continue
        dot = f"{prefix}." if prefix else ""
        width = module.in_features
        for index, (tile, (low, high), (start, stop)) in enumerate(module.placed()):
            if stop - start == width:  # whole rows: one run
                runs: tuple[Part, ...] = (Part(f"{dot}weight", low * width, (high - low) * width),)
            else:
                runs = tuple(Part(f"{dot}weight", row * width + start, stop - start) for row in range(low, high))
            found[f"{dot}tiles.{index}.weight"] = (runs, (module.out_features, width))
            if tile.bias is not None:
                found[f"{dot}tiles.{index}.bias"] = ((Part(f"{dot}bias", low, high - low),), (module.out_features,))
    return found
