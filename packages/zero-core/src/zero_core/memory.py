"""Estimates the bytes each rank holds and the elements it moves, per stage, by closed formulas. No tensors, no model.

Counts the bytes of one element too, with which the stores and the planner of zero_offload count.

[Note: the residency table]
With Psi parameters and N shards, between uses and up to the padding of a unit:

    stage   parameters   gradients                optimizer states   elements moved per rank and step, x (N-1)/N
    0       all          all                      all                2 Psi a micro-batch (one all-reduce)
    1       all          all until the step       shard              2 Psi (reduce-scatter, all-gather)
    2       all          shard                    shard              Psi, and Psi a micro-batch
    3       shard        shard                    shard              3 Psi a micro-batch (all-gather twice), less the
                                                                     units that are still unsharded in backward

Gradients are in the reduce dtype, sums of several micro-batches in fp32. A 16-bit parameter has an fp32 master among
the states. In 16 bits with Adam this is table 1 of Rajbhandari et al., "ZeRO", 2020, bytes a parameter:

    stage 0    2 + 2 + 12
    stage 1    2 + 2 + (12 + 2) / N    the last 2: the gradient that is reduced at the step; the paper omits it
    stage 2    2 + (2 + 12) / N        a 16-bit shard of the parameters exists only while it is gathered
    stage 3    (2 + 2 + 12) / N

With fp32 parameters stages 1 and 2 hold the shard of the master beside the unsharded parameters.
`no_sync` keeps an unsharded gradient on every rank at stages 0, 2 and 3 too, in fp32, beside the one that is reduced at
the end: 4 bytes a parameter for one reduction a step instead of one a micro-batch.
Hybrid sharding adds an all-reduce of the shard over replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import StageError
from .precision import round_traffic

FP32_BYTES = 4  # of a master, a state and a sum of gradients
OPTIMIZER_STATES = {
    **dict.fromkeys(("adam", "adamw", "nadam", "radam", "adamax", "adadelta"), 2),
    **dict.fromkeys(("adagrad", "rmsprop", "lion", "sgd_momentum"), 1),
    "sgd": 0,
}
"""fp32 values a parameter that each optimizer keeps besides the master (AMSGrad and centred variants keep one more)."""


@dataclass(frozen=True)
class ElementBytes:
    """Bytes of one element of each kind of value."""

    parameter_dtype: torch.dtype
    reduce_dtype: torch.dtype
    states: int = 0  # fp32 values that the optimizer keeps besides the master
    trained: bool = True

    @property
    def master(self) -> int:
        """Bytes of the master: 0 for an fp32 parameter, which is its own master, and for a frozen one."""
        return FP32_BYTES if self.trained and self.parameter_dtype != torch.float32 else 0

    @property
    def optimizer(self) -> int:
        """Bytes of the master and of the optimizer's states, in fp32."""
        return self.master + FP32_BYTES * self.states

    def gradient(self, arriving: int | None) -> int:
        """Bytes that are kept if `arriving` gradients are added up before a step; None: their number is not known.

        A single gradient stays in the reduce dtype. A sum is in fp32.
        """
        return self.reduce_dtype.itemsize if arriving == 1 else FP32_BYTES

    @property
    def widened(self) -> int:
        """Bytes that the update needs to widen a gradient that was reduced in 16 bits."""
        return FP32_BYTES if self.trained and self.reduce_dtype != torch.float32 else 0


def step_traffic(element: ElementBytes, kept: int) -> int:
    """Returns bytes of accelerator memory that norm, clipping, update and rounding read and write for one element.

    kept: bytes of its gradient when the step begins. The norm is clipped, and the optimizer reads and writes each value
    once, as torch's fused ones do. A planner counts with this, and a test counts the bytes of each pass: change both if
    you add a pass.
    """
    values = FP32_BYTES * (1 + element.states)  # the master, or the parameter that is its own, and the states
    norm, clipped, updated = kept, kept + FP32_BYTES, 2 * values + FP32_BYTES  # of 16 bits, widened and clipped in one
    return norm + clipped + updated + (round_traffic(element.parameter_dtype) if element.master else 0)


@dataclass(frozen=True)
class Movement:
    """Elements one rank sends in one optimizer step; receiving is as much. Exact where N divides the padded total."""

    gathered_numel: int
    reduced_numel: int
    replicated_numel: int = 0  # all-reduce of the shard over the replicas of hybrid sharding

    @property
    def total_numel(self) -> int:
        """Elements that one rank sends in a step, in all."""
        return self.gathered_numel + self.reduced_numel + self.replicated_numel


@dataclass(frozen=True)
class Estimate:
    """Bytes one rank holds, by kind, and the elements that it moves in a step."""

    parameters_bytes: int  # between uses
    gradients_bytes: int  # at their most, between backward and step
    optimizer_bytes: int  # fp32 master, where the parameter is not itself one, and the optimizer's states
    unsharded_bytes: int  # stage 3: the two units in use at a turn, and those gathered ahead or resident
    transient_bytes: int  # two units' gradients not reduced yet (gloo: four); a shard's in fp32 while it is stepped
    moved: Movement

    @property
    def total_bytes(self) -> int:
        """Everything but activations, at the worst moment of a step."""
        kept = self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes
        return kept + self.unsharded_bytes + self.transient_bytes


def optimizer_states(optimizer: str | int | torch.optim.Optimizer) -> int:
    """Returns fp32 values a parameter besides the master, for a number, a name of OPTIMIZER_STATES, or an optimizer."""
    if isinstance(optimizer, int):
        return optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        options = optimizer.defaults
        name = type(optimizer).__name__.lower()
        if name == "sgd":
            name = "sgd_momentum" if options.get("momentum") else "sgd"
        extra = bool(options.get("amsgrad")) + bool(options.get("centered"))
        extra += name == "rmsprop" and bool(options.get("momentum"))
    else:
        name, extra = optimizer.lower(), 0
    if name not in OPTIMIZER_STATES:
        known = ", ".join(sorted(OPTIMIZER_STATES))
        raise ValueError(f"optimizer {name!r} is not known; give its number of fp32 states, or one of: {known}")
    return OPTIMIZER_STATES[name] + extra


def movement(
    numel: int,
    world_size: int,
    stage: int,
    *,
    replicas: int = 1,
    accumulate: int = 1,
    no_sync: bool = False,
    resident_numel: int = 0,
    frozen_numel: int = 0,
) -> Movement:
    """Returns the elements one rank sends in one optimizer step of `accumulate` micro-batches.

    Where an optimizer needs whole parameters, shards have different sizes, and this is the mean over the ranks.

    numel: trainable elements, padding included. world_size: ranks of the shard group (N of the table).
    no_sync: all micro-batches but the last are inside `zero_core.no_sync`. resident_numel: elements that stage 3 keeps
    unsharded between forward and backward. frozen_numel: elements that are not trained: gathered and not reduced.
    """
    _check(numel, world_size, stage, replicas)
    if accumulate < 1 or not 0 <= resident_numel <= numel + frozen_numel:
        raise ValueError(
            f"accumulate={accumulate} is at least 1, resident_numel={resident_numel} within 0..{numel + frozen_numel}"
        )

    def share(elements: int) -> int:
        return elements * (world_size - 1) // world_size

    times = 1 if no_sync or stage == 1 else accumulate
    reductions = times * numel
    if stage == 3:
        gathers = accumulate * (2 * (numel + frozen_numel) - resident_numel)
    else:
        gathers = reductions if stage == 0 else numel + frozen_numel  # an all-reduce gathers its reduced slices
    shard_numel = numel // world_size
    return Movement(share(gathers), share(reductions), times * 2 * shard_numel * (replicas - 1) // replicas)


def estimate(
    numel: int,
    world_size: int,
    stage: int = 3,
    *,
    param_dtype: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype | None = None,
    optimizer: str | int | torch.optim.Optimizer = "adamw",
    trainable_numel: int | None = None,
    largest_unit_numel: int = 0,
    prefetch_bytes: int = 0,
    resident_bytes: int = 0,
    replicas: int = 1,
    accumulate: int = 1,
    no_sync: bool = False,
    frozen_dtype: torch.dtype | None = None,
) -> Estimate:
    """Returns bytes per rank by kind, and elements moved, of `numel` parameters over `world_size` shards.

    See the note at the top. trainable_numel: elements with gradients, masters and states; all by default. The others
    take their own bytes and no more: `frozen_dtype`, or `param_dtype` if it is None; elements of a packed 4-bit weight
    are uint8, of two values each. largest_unit_numel: the largest unit, unsharded as it computes. reduce_dtype:
    `param_dtype` unless given. accumulate: backwards added up in a step. no_sync: all of them but the last are inside
    `zero_core.no_sync`. The elements sent at stage 3 are an upper bound: units that stay unsharded from a forward to
    its backward within `prefetch_bytes` are counted as gathered again. This is the account of a `DeviceStore`;
    zero_offload.plan has that of a store with tiers. Raises StageError for a stage other than 0, 1, 2, 3.

    Examples:
        >>> import torch, zero_core
        >>> for stage in range(4):
        ...     held = zero_core.memory.estimate(1_000_000, 4, stage, param_dtype=torch.bfloat16)
        ...     kept = held.parameters_bytes + held.gradients_bytes + held.optimizer_bytes
        ...     print(f"stage {stage}: {kept / 1_000_000} bytes a parameter")
        stage 0: 16.0 bytes a parameter
        stage 1: 7.5 bytes a parameter
        stage 2: 5.5 bytes a parameter
        stage 3: 4.0 bytes a parameter
    """
    _check(numel, world_size, stage, replicas)
    trainable = numel if trainable_numel is None else trainable_numel
    if not 0 <= trainable <= numel or not 0 <= largest_unit_numel <= numel:
        raise ValueError(f"trainable_numel={trainable}, largest_unit_numel={largest_unit_numel} exceed numel={numel}")
    shards = 1 if stage == 0 else world_size

    def held(elements: int, itemsize: int) -> int:
        """Returns the bytes of the store's shard."""
        return -(-elements // shards) * itemsize

    element = ElementBytes(param_dtype, reduce_dtype or param_dtype, optimizer_states(optimizer))
    itemsize, reduced = param_dtype.itemsize, element.gradient(1)
    frozen, frozen_itemsize = numel - trainable, (frozen_dtype or param_dtype).itemsize
    everything = trainable * itemsize + frozen * frozen_itemsize
    parameters = held(trainable, itemsize) + held(frozen, frozen_itemsize)
    if stage in (1, 2) and shards > 1:  # a shard with a master exists only while it is gathered
        parameters = everything + held(frozen, frozen_itemsize) + (0 if element.master else held(trainable, itemsize))
    summed = element.gradient(accumulate)
    gradients = held(trainable, summed)
    if world_size * replicas > 1 and (stage == 1 or (no_sync and accumulate > 1)):
        gradients = trainable * summed + held(trainable, reduced)  # one reaches the store
    unsharded = 0
    if stage == 3 and shards > 1:
        widest = itemsize if trainable else frozen_itemsize
        unsharded = min(2 * largest_unit_numel * widest + prefetch_bytes + resident_bytes, everything)
    largest = min(largest_unit_numel, trainable)
    resident_numel = min(resident_bytes // itemsize, numel) if stage == 3 else 0
    return Estimate(
        parameters_bytes=parameters,
        gradients_bytes=gradients,
        optimizer_bytes=held(trainable, element.optimizer),
        unsharded_bytes=unsharded,
        transient_bytes=min(2 * largest, trainable) * reduced + held(largest, element.widened),
        moved=movement(
            trainable, world_size, stage, replicas=replicas, accumulate=accumulate, no_sync=no_sync,
            resident_numel=resident_numel, frozen_numel=frozen,
        ),
    )  # fmt: skip


def _check(numel: int, world_size: int, stage: int, replicas: int) -> None:
    if stage not in (0, 1, 2, 3):
        raise StageError(f"stage={stage} does not exist; the stages are 0, 1, 2 and 3")
    if numel < 0 or world_size < 1 or replicas < 1:
        raise ValueError(f"numel={numel} is at least 0, world_size={world_size} and replicas={replicas} at least 1")
