"""Whether parts of parameters are enough for the user's optimizer, and what it keeps of each: both are tried.

Owns the steps of throw-away parameters, and what is refused because of them. Runs no step of the training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..errors import UnsupportedOptimizerError, listed
from .by_itself import Look, look_of, state_of
from .contracts import BY_ITSELF, ELEMENTWISE, contract_of
from .joint import placed
from .segments import options_of, over_segments, own_attributes, same
from .uncut import NeedsUncut, check_count, check_named, is_muon, named_shapes, needs_uncut, unlike_memory

__all__ = [
    "PROBE_SCALES",
    "KeptStates",
    "drawn",
    "first_apart",
    "kept_states",
    "refuse_one_name",
    "trial_rate",
    "trial_shape",
    "trial_steps",
    "turned",
]

# They look at a parameter's shape, or at all parameters together: a slice of one is not enough for them.
_NOT_ELEMENTWISE = ("LBFGS", "SparseAdam", "Adafactor", "Muon", "Shampoo", "SOAP")
_KNOWN = "AdamW, Adam, SGD or Adagrad of torch.optim, or zero_optim_cpu.Lion"
_WAY_OUT = (
    f"it needs whole parameters, and a rank has slices of them. Use {_KNOWN}; or, where a step looks at one parameter "
    'at a time, say shard(optimizer_contract="by itself"), which keeps each whole on one rank'
)
# An optimizer may treat vectors, matrices and kernels differently, and matrices by their size (Adafactor, from 128 on).
# Some quantise states in blocks, if they are large and a whole number of blocks (torchao: 4,096 elements, 256 each).
_PROBE_SHAPES = ((7,), (5, 3), (160, 128), (2, 3, 4), (2, 3, 2, 2))
# It may also wait for some steps before it looks at more than an element, or for a large or a small norm. So a probe
# takes a step with gradients of each of these sizes.
PROBE_SCALES = (1.0, 1.0, 1e-4, 1.0, 30.0, 1.0, 1e3, 1.0)


@dataclass(frozen=True)
class KeptStates:
    """What an optimizer keeps of a parameter: names of `tensors` of its shape and of `scalars` besides the step count;
    the numbers of the groups in which it `counts` steps; names of states of other shapes, which it names; and what it
    keeps of a parameter that it needs whole in another form than contiguous fp32."""

    tensors: tuple[str, ...]
    scalars: tuple[str, ...]
    counts: frozenset[int]
    shaped: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()


def kept_states(optimizer: torch.optim.Optimizer, device: torch.device) -> KeptStates:
    """What the optimizer keeps, found by steps of throw-away parameters in the options of each of its groups.

    Parameters of one to four dimensions take a step for each of `PROBE_SCALES`, whole, flattened, and flattened in two
    slices. An optimizer that looks at whole parameters only later, or beyond these sizes of gradients, or with other
    values of its options, passes. Two steps show the states of one that is elementwise by its contract, as torch's own
    are.

    What the optimizer needs uncut takes its steps whole alone. Of a joint optimizer, all that its members keep.

    Raises UnsupportedOptimizerError where these differ, where a state is neither of the parameter's shape nor a number
    and the optimizer does not name it, where the optimizer keeps something outside its `state`, and where a step of it
    raises. Draws no random number.
    """
    found = [(_kept_states(member, device), first) for member, first in placed(optimizer)]
    refuse_one_name((n for each, _ in found for n in each.tensors), (n for each, _ in found for n in each.shaped))
    return KeptStates(
        tuple(dict.fromkeys(name for each, _ in found for name in each.tensors)),
        tuple(dict.fromkeys(name for each, _ in found for name in each.scalars)),
        frozenset(first + group for each, first in found for group in each.counts),
        tuple(dict.fromkeys(name for each, _ in found for name in each.shaped)),
        tuple(dict.fromkeys(what for each, _ in found for what in each.unlike)),
    )


def refuse_one_name(tensors: Iterable[str], shaped: Iterable[str]) -> None:
    """Raise where a state has the parameter's shape by one optimizer and another shape by the one beside it."""
    both = sorted(set(tensors) & set(shaped))
    if both:
        raise UnsupportedOptimizerError(
            f"{both[0]!r} is a state of the parameter's shape of one optimizer, and of another shape of the one beside "
            "it, so a checkpoint could not tell them apart: call it otherwise in one of them"
        )


def _kept_states(optimizer: torch.optim.Optimizer, device: torch.device) -> KeptStates:
    """As `kept_states`, of one that is no joint optimizer."""
    if contract_of(optimizer) == BY_ITSELF:
        return _states_by_itself(optimizer)
    kind = type(optimizer).__name__
    classes = {each.__name__ for each in type(optimizer).__mro__}  # a subclass steps as its class does
    if classes & {*_NOT_ELEMENTWISE} and not is_muon(optimizer) and not isinstance(optimizer, NeedsUncut):
        raise UnsupportedOptimizerError(f"{kind} is not elementwise: {_WAY_OUT}")
    _refuse_tensors_of_its_own(optimizer)
    tensors: dict[str, None] = {}
    scalars: dict[str, None] = {}
    unlike: dict[str, None] = {}
    counts = False
    if device.type == "meta":
        device = torch.device("cpu")
    known = contract_of(optimizer) == ELEMENTWISE
    with torch.random.fork_rng(devices=[]):
        for group in _unlike(optimizer.param_groups):
            for shape in _shapes(optimizer, group, known):
                whole = known or needs_uncut(optimizer, group, shape)
                state = _kept(optimizer, group, shape, device) if whole else _probe(optimizer, group, shape, device)
                counts |= "step" in state
                if needs_uncut(optimizer, group, shape):
                    check_count(optimizer, state, 2)
                    if (named := named_shapes(optimizer, group, shape)) is not None:
                        check_named(optimizer, shape, named, state)
                        continue
                    unlike |= dict.fromkeys(unlike_memory((n, v) for n, v in state.items() if n != "step"))
                for name, value in state.items():
                    if name == "step" or value is None:
                        continue
                    if isinstance(value, Tensor) and value.shape == shape:
                        tensors[name] = None
                    elif isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0):
                        scalars[name] = None
                    else:
                        what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                        raise UnsupportedOptimizerError(
                            f"{kind} keeps {name!r} ({what}) of a parameter of shape {shape}, neither a value an "
                            f"element nor a number: {_WAY_OUT}. Where it needs whole parameters and says so by "
                            "needs_uncut(), let it name the shapes of its states by state_shapes(): see "
                            "zero_core.optim.uncut"
                        )
            if not known and not _all_uncut(optimizer, group):
                _probe_neighbours(optimizer, group, device)
    if not known and not is_muon(optimizer):
        with torch.random.fork_rng(devices=[]):
            _probe_classes(optimizer, device)
            if len(optimizer.param_groups) > 1:
                _probe_groups(optimizer, device)
    like, shaped = _named(optimizer)
    counting = frozenset(range(len(optimizer.param_groups)) if counts else ())
    return KeptStates((*tensors, *like), tuple(scalars), counting, shaped, tuple(unlike))


def _states_by_itself(optimizer: torch.optim.Optimizer) -> KeptStates:
    """The states of its own parameters, from one dry step of each shape."""
    like, shaped = _named(optimizer, ())
    groups = enumerate(optimizer.param_groups)
    states = {g: [state_of(optimizer, g, tuple(p.shape)) for p in group["params"]] for g, group in groups}
    for state in (each for found in states.values() for each in found):
        if not getattr(state.get("step"), "is_meta", False):
            check_count(optimizer, state, 2)
    return KeptStates(like, (), frozenset(g for g, found in states.items() if any("step" in s for s in found)), shaped)


def _named(
    optimizer: torch.optim.Optimizer, small: Sequence[tuple[int, ...]] = _PROBE_SHAPES
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of the states that the optimizer names of its parameters, and of small ones: those that always have the
    parameter's shape, and the others."""
    found: dict[str, bool] = {}
    for group, options in enumerate(optimizer.param_groups):
        for shape in {**dict.fromkeys(small), **dict.fromkeys(tuple(p.shape) for p in options["params"])}:
            for name, named in (named_shapes(optimizer, group, shape) or {}).items():
                found[name] = found.get(name, True) and named == shape
    return tuple(n for n, like in found.items() if like), tuple(n for n, like in found.items() if not like)


def _shapes(optimizer: torch.optim.Optimizer, group: int, known: bool) -> Sequence[tuple[int, ...]]:
    """Of the throw-away parameters that a probe of this group steps."""
    if is_muon(optimizer):
        return ((5, 3),)
    if known:
        return _PROBE_SHAPES[:1]
    mine = _shapes_in(optimizer, group)
    whole = [shape for shape in mine if needs_uncut(optimizer, group, shape)]
    uncut: list[tuple[int, ...]] = [shape for shape in _PROBE_SHAPES if needs_uncut(optimizer, group, shape)]
    if whole and not uncut:  # it needs none so small
        uncut = [min(whole, key=math.prod)]
    return (
        uncut if whole and len(whole) == len(mine) else (*_PROBE_SHAPES, *(s for s in uncut if s not in _PROBE_SHAPES))
    )


def _all_uncut(optimizer: torch.optim.Optimizer, group: int) -> bool:
    """Whether the optimizer needs each parameter of this group whole, so that it steps it alone and in its shape."""
    return all(needs_uncut(optimizer, group, shape) for shape in _shapes_in(optimizer, group))


def _shapes_in(optimizer: torch.optim.Optimizer, group: int) -> list[tuple[int, ...]]:
    """Of the parameters in this group; of a group without any, one matrix."""
    return [tuple(p.shape) for p in optimizer.param_groups[group]["params"]] or [(5, 3)]


def trial_shape(optimizer: torch.optim.Optimizer, group: int, numel: int) -> tuple[int, ...]:
    """Of a throw-away parameter of this group: a matrix, if the group has one that the optimizer needs uncut."""
    uncut = any(needs_uncut(optimizer, group, shape) for shape in _shapes_in(optimizer, group))
    return (numel // 2, 2) if uncut else (numel,)


def _kept(optimizer: torch.optim.Optimizer, group: int, shape: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    """The state of a throw-away parameter of `shape` after two steps."""
    values, gradients = (each.view(shape) for each in drawn(math.prod(shape), device))
    return trial_steps(optimizer, group, [values], [gradients], (1.0, 1.0))[1]


def _probe(
    optimizer: torch.optim.Optimizer, group: int, shape: tuple[int, ...], device: torch.device
) -> dict[str, Any]:
    """The state of a throw-away parameter of `shape` after its steps; raises where its slices step otherwise."""
    numel = math.prod(shape)
    values, gradients = drawn(numel, device)
    whole, state = trial_steps(optimizer, group, [values.view(shape)], [gradients.view(shape)])
    for cuts in ((0, numel), (0, numel // 3, numel)):
        slices = [slice(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
        runs = [trial_steps(optimizer, group, [values[part]], [gradients[part]])[0] for part in slices]
        apart = first_apart(whole, [torch.cat(parts) for parts in zip(*runs, strict=True)])
        if apart is not None:
            how = "flattened" if len(slices) == 1 else f"flattened and split after {cuts[1]} elements"
            raise UnsupportedOptimizerError(
                f"{type(optimizer).__name__} is not elementwise: of a parameter of shape {shape}, {apart} with the "
                f"parameter {how}; {_WAY_OUT}"
            )
    return state


def first_apart(ones: Sequence[Tensor], others: Sequence[Tensor]) -> str | None:
    """Which element differs first, as a part of a sentence, of values (numel,) after each step. None: they are equal.

    Gradients of very different sizes leave rounding errors as large as the largest value's.
    """
    for count, (one, other) in enumerate(zip(ones, others, strict=True), 1):
        size = float(one.abs().max().nan_to_num(0.0, 0.0))
        if not torch.allclose(one, other, rtol=1e-4, atol=1e-6 * max(1.0, size), equal_nan=True):
            at = int((one - other).abs().argmax())
            return f"element {at} became {float(one[at]):.6g} in {count} steps, and {float(other[at]):.6g}"
    return None


def _unlike(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    """Of the groups with the same options but for the rate, the first."""
    rates = ("params", "lr", "initial_lr")
    alike = {repr([(k, v) for k, v in g.items() if k not in rates]): i for i, g in reversed(list(enumerate(groups)))}
    return sorted(alike.values())


def drawn(numel: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Values and gradients (numel,) of many sizes and both signs; no random numbers."""
    row = torch.arange(numel, dtype=torch.float32, device=device)
    return (row * 0.37).sin(), (row * 1.7 + 0.3).sin() * (row * 0.11).cos().exp()


def _drawn_in(shapes: Sequence[tuple[int, ...]], device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """As `drawn`, for each of the shapes."""
    both = [(drawn(math.prod(shape), device), shape) for shape in shapes]
    return [values.view(shape) for (values, _), shape in both], [grads.view(shape) for (_, grads), shape in both]


def turned(gradient: Tensor, count: int) -> Tensor:
    """The gradient of step `count`, from 0 on: some elements change sign, so that they and their momentum disagree.

    An element's value decides whether it changes, so a slice has the gradients of its elements in the whole parameter.
    A changed element is smaller too: otherwise it might cancel the momentum up to a rounding error.
    """
    return gradient if count == 0 else torch.where((gradient * count).remainder(1) < 0.5, gradient, -0.7 * gradient)


def trial_rate(options: Mapping[str, Any]) -> dict[str, float]:
    """The rate of trial steps, where the group's is smaller: a step of 1e-5, or of 0 in a warm-up, hides differences
    behind the rounding of the values."""
    rate = options.get("lr")
    return {"lr": 0.01} if isinstance(rate, (int, float)) and rate < 0.01 else {}


def _probe_neighbours(optimizer: torch.optim.Optimizer, group: int, device: torch.device) -> None:
    """Raises where a parameter steps otherwise behind, before or beside another one of its group."""
    (values, gradients), (others, theirs) = drawn(6, device), drawn(15, device)
    alone, _ = trial_steps(optimizer, group, [values], [gradients])
    for neighbour in (theirs.view(5, 3), None):
        for first in (True, False):
            order = slice(None) if first else slice(None, None, -1)
            both = [values, others.view(5, 3)][order], [gradients, neighbour][order]
            beside, _ = trial_steps(optimizer, group, *both, of=0 if first else 1)
            if first_apart(alone, beside) is not None:
                what = "with a gradient" if neighbour is not None else "without a gradient"
                raise UnsupportedOptimizerError(
                    f"{type(optimizer).__name__} steps a parameter otherwise {'before' if first else 'after'} another "
                    f"one {what} in its group, and units are stepped apart: {_WAY_OUT}"
                )


def _probe_groups(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Raises where a parameter steps otherwise beside those of all other groups than alone: a unit may lack a group."""
    groups = range(len(optimizer.param_groups))
    values, gradients = _drawn_in([trial_shape(optimizer, group, 6) for group in groups], device)
    beside, _ = trial_steps(optimizer, groups, values, gradients, of=None)
    alone = [trial_steps(optimizer, group, [values[group]], [gradients[group]])[0] for group in groups]
    if first_apart(beside, [torch.cat(each) for each in zip(*alone, strict=True)]) is not None:
        listed = [key for key, v in own_attributes(optimizer).items() if isinstance(v, (list, tuple))]
        fitting = [f"self.{key}" for key in listed if len(vars(optimizer)[key]) == len(groups)]
        told = f" (as many entries: {', '.join(fitting)})" if fitting else ""
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__} steps a parameter otherwise where other groups are absent, and units may lack "
            f"some of its {len(groups)} groups{told}: keep what belongs to a group as an option in "
            "param_groups, or give zero_core.shard a list of optimizers with one group each"
        )


def _probe_classes(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Raises where a parameter of a class of its own, or with attributes, steps otherwise than a plain one."""
    for group, options in enumerate(optimizer.param_groups):
        odd: dict[Any, tuple[tuple[int, ...], Look]] = {}
        for p in options["params"]:
            shape, look = tuple(min(size, 4) for size in p.shape), look_of(p)  # an optimizer may look at dimensions
            if p.requires_grad and look != (nn.Parameter, {}):
                own = ((k, v if isinstance(v, (bool, int, float, str)) else id(v)) for k, v in look[1].items())
                odd.setdefault((shape, look[0], *own), (shape, look))
        if not odd:
            continue
        groups, looks = [group] * len(odd), [look for _, look in odd.values()]
        values, gradients = _drawn_in([shape for shape, _ in odd.values()], device)
        plain, _ = trial_steps(optimizer, groups, values, gradients, of=None)
        alike, _ = trial_steps(optimizer, groups, values, gradients, of=None, looks=looks)
        if first_apart(plain, alike) is not None:
            told = sorted({f"{kind.__qualname__} with {', '.join(had) or 'no attributes'}" for kind, had in looks})
            raise UnsupportedOptimizerError(
                f"{type(optimizer).__name__} steps a parameter otherwise because of its class or its attributes "
                f"({listed(told)}), and slices of parameters have neither: keep what step() reads of a parameter as an "
                f"option in param_groups, or use {_KNOWN}"
            )


def trial_steps(
    optimizer: torch.optim.Optimizer,
    group: int | Sequence[int],
    values: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    scales: Sequence[float] = PROBE_SCALES,
    of: int | None = 0,
    looks: Sequence[Look] | None = None,
) -> tuple[list[Tensor], dict[str, Any]]:
    """A step of throw-away parameters of one group, or of one group each, for each scale: the values (numel,) of one of
    them after each step, and its state in the end. of=None: the values of all, one after another. looks: of
    each throw-away parameter."""
    probes = [nn.Parameter(value.clone()) for value in values]
    for probe, (kind, own) in zip(probes, looks or (), strict=looks is not None):
        probe.__class__ = kind
        probe.__dict__.update(own)
    trial = over_segments(optimizer, probes, [group] * len(probes) if isinstance(group, int) else group)
    for each in trial.param_groups:
        each.update(trial_rate(each))
    told = probes if of is None else [probes[of]]
    before, found = _numbers(trial), []
    for count, scale in enumerate(scales):
        for probe, gradient in zip(probes, gradients, strict=True):
            probe.grad = None if gradient is None else turned(gradient, count) * scale
        try:
            trial.step()
        except Exception as error:
            raise UnsupportedOptimizerError(
                f"a step of {type(optimizer).__name__} over a new parameter of shape {tuple(values[0].shape)} raised "
                f"{type(error).__name__}: {error}. Slices of parameters are stepped by a copy of the optimizer, so "
                "what it needs must be in its param_groups and its state, and step() must work without a closure"
            ) from error
        found.append(torch.cat([probe.detach().reshape(-1) for probe in told]))
    after = _numbers(trial)
    changed = [key for key in after if key not in before or not same(before[key], after[key])]
    if changed:
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__} changes {', '.join(changed)} in step(), which no checkpoint and no other unit "
            f"would see: keep it in self.state[parameter], or use {_KNOWN}"
        )
    return found, trial.state[told[0]]


def _numbers(trial: Any) -> dict[str, Any]:
    """Numbers that a step must not change: in the groups' options, and in attributes that the class has made."""
    found: dict[str, Any] = {}
    for group in trial.param_groups:
        for key, value in options_of(group).items():
            found.setdefault(f"param_groups[...][{key!r}]", []).append(value)
    found |= {f"self.{key}": value for key, value in own_attributes(trial).items()}
    leaves = {key: [leaf for leaf in tree_leaves(value) if _is_number(leaf)] for key, value in found.items()}
    kept = {key: [n.clone() if isinstance(n, Tensor) else n for n in each] for key, each in leaves.items() if each}
    return kept | {f"self.state[{key!r}]": [True] for key in trial.state if not isinstance(key, Tensor)}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, complex, Tensor))


def _leaves(value: Any) -> Iterator[Any]:
    """What is in nested containers, sets and keys included."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _refuse_tensors_of_its_own(optimizer: torch.optim.Optimizer) -> None:
    """Tensors in attributes belong to whole parameters, and nothing would shard or save them; nor would it find a
    parameter by its identity."""
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for key, value in own_attributes(optimizer).items():
        if any(leaf in known if type(leaf) is int else id(leaf) in known for leaf in _leaves(value)):
            raise UnsupportedOptimizerError(
                f"{type(optimizer).__name__} looks parameters up in self.{key}, and slices of them are other objects: "
                "make them a group of their own, with an option in param_groups"
            )
        if any(isinstance(leaf, Tensor) and leaf.numel() > 1 for leaf in tree_leaves(value)):
            raise UnsupportedOptimizerError(
                f"{type(optimizer).__name__} keeps tensors in self.{key}, which are not sharded: keep them in "
                f"self.state[parameter], or use {_KNOWN}"
            )
