"""Gives tensors of a model the memory of others, in the ways that programs of users do. Plain torch only."""

import torch
from torch import nn

from tests.fuzz.program import Share


def share(model: nn.Module, pieces: list, wanted: Share) -> None:
    """Let another tensor lie where the weight of block `one` lies, if there is a fitting one."""
    piece = pieces[wanted.one % len(pieces)]
    weight, holder = piece.weight(), pieces[wanted.other % len(pieces)]
    if wanted.how == "flat":
        _flatten(list(model.parameters()))
    elif weight is None or not weight.numel():
        return
    elif wanted.how == "buffer":
        piece.register_buffer("shadow", weight.detach(), persistent=wanted.other % 2 == 0)
    elif wanted.how == "attribute":
        holder.shadow = weight.detach()
    elif wanted.how == "rows":
        holder.shadow = weight.data.view(-1)[:2]
    else:
        _join(model, weight, wanted)


def _flatten(parameters: list[nn.Parameter]) -> None:
    """Makes all parameters views of one buffer, side by side."""
    flat = torch.cat([p.data.flatten().float() for p in parameters if p.is_floating_point()])
    at = 0
    for p in parameters:
        if p.is_floating_point():
            p.data = flat[at : at + p.numel()].view(p.shape)
            at += p.numel()


def _join(model: nn.Module, weight: nn.Parameter, wanted: Share) -> None:
    """Lets a second Parameter lie over the weight: over all of it, or over a part."""
    places = [(m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None]
    start = wanted.other % len(places)
    for module, name, other in places[start:] + places[:start]:
        if other is weight or not other.is_floating_point() or not other.numel():
            continue
        same = other.shape == weight.shape
        if wanted.how == "data" and same:
            other.data = weight.data
        elif wanted.how == "parameter" and same:
            setattr(module, name, nn.Parameter(weight))
        elif wanted.how == "transposed" and same and weight.ndim == 2 and len(weight) == weight.shape[1]:
            other.data = weight.data.t()
        elif wanted.how == "view" and other.numel() < weight.numel():
            other.data = weight.data.view(-1)[-other.numel() :].view(other.shape)
        else:
            continue
        return
