"""Every stage trains as the reference does: real architectures, several ranks, both precisions, clipping active.

Fails if a gradient is lost, counted twice, averaged wrongly or clipped wrongly, or a master is rounded another way.
The default is a pairwise cover; --all-parity (nox -s parity) runs every combination.
"""

import itertools
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

import zero_core
from tests import kit, models
from tests.reference import Reference

pytest.importorskip("transformers")

STEPS, CLIP = 10, 0.5
# Every pair of (model, stage, ranks, precision, optimizer) values meets in one of these.
COVER = [
    ("llama", 0, 2, "fp32", "sgd"),
    ("llama", 1, 4, "bf16/fp32", "adamw"),
    ("llama", 2, 1, "fp32", "adamw"),
    ("llama", 3, 2, "bf16/fp32", "sgd"),
    ("gpt2", 0, 4, "bf16/fp32", "sgd"),
    ("gpt2", 1, 1, "fp32", "sgd"),
    ("gpt2", 2, 2, "bf16/fp32", "adamw"),
    ("gpt2", 3, 4, "fp32", "adamw"),
    ("moe", 0, 1, "bf16/fp32", "adamw"),
    ("moe", 1, 2, "fp32", "sgd"),
    ("moe", 2, 4, "fp32", "sgd"),
    ("moe", 3, 2, "fp32", "adamw"),
    ("t5", 0, 2, "fp32", "adamw"),
    ("t5", 1, 4, "bf16/fp32", "sgd"),
    ("t5", 2, 2, "bf16", "sgd"),
    ("t5", 3, 1, "bf16", "adamw"),
    ("bert", 0, 4, "fp32", "adamw"),
    ("bert", 1, 2, "bf16", "adamw"),
    ("bert", 2, 1, "bf16/fp32", "sgd"),
    ("bert", 3, 4, "fp32", "sgd"),
]
EVERY = list(
    itertools.product(
        ("llama", "gpt2", "moe", "t5", "bert"), (0, 1, 2, 3), (1, 2, 4), ("fp32", "bf16", "bf16/fp32"), ("sgd", "adamw")
    )
)


class Distance(NamedTuple):
    """How far a sharded run ended from the reference; relative losses and norms, parameters by the worst tensor."""

    loss: float
    norm: float
    parameter: float  # distance over the tensor's norm
    update: float  # distance over the norm of the tensor's change
    worst: str


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.01)


def run(name: str, stage: int, precision: str, optimizer_name: str) -> Distance | None:
    """Train on every rank; rank 0 then runs the reference on all ranks' batches and returns the distance.

    precision: "fp32"; "bf16", reduced in bf16; "bf16/fp32", bf16 parameters whose gradients are reduced in fp32.
    """
    rank, size = kit.world()
    build = partial(optimizer_of, optimizer_name)
    options = {"param_dtype": None if precision == "fp32" else torch.bfloat16, "max_grad_norm": CLIP}
    reduce = None if precision == "bf16" else torch.float32
    model = models.build(name)
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = zero_core.shard(model, build(model.parameters()), stage=stage, reduce_dtype=reduce, **options)
    found = []
    for step in range(STEPS):
        loss = float(kit.step(optimizer, models.loss(model, models.batch(step, rank))))
        found.append((loss, optimizer.grad_norm))
    ours = kit.named_values(model, master=True)
    optimizer.close()
    if rank:
        return None
    dense = models.build(name)
    reference = Reference(dense, build, **options)
    loss = norm = parameter = update = 0.0
    worst = ""
    for step, (our_loss, our_norm) in enumerate(found):
        expected = reference.step([models.batch(step, r) for r in range(size)], models.loss)[0]
        loss = max(loss, abs(our_loss - expected) / abs(expected))
        norm = max(norm, abs(our_norm - reference.grad_norm) / reference.grad_norm)
    for (name, _), master in zip(dense.named_parameters(), reference.masters, strict=True):
        apart = float((ours[name].double() - master.detach().double()).norm())
        parameter = max(parameter, apart / max(float(master.detach().norm()), 1e-3))
        moved = float((master.detach() - first[name]).norm())
        # softmax does not see a key's bias: its gradient is rounding noise
        if not name.endswith(("key.bias", "c_attn.bias")) and moved and apart / moved > update:
            update, worst = apart / moved, name
    return Distance(loss, norm, parameter, update, worst)


def pytest_generate_tests(metafunc):
    cases = EVERY if metafunc.config.getoption("--all-parity") else COVER
    metafunc.parametrize(("model", "stage", "size", "precision", "optimizer"), cases)


@pytest.mark.promise("stages-equal-reference")
def test_ten_steps_equal_the_reference(ranks, model, stage, size, precision, optimizer):
    distance: Distance = ranks(size).run(run, model, stage, precision, optimizer)[0]
    if precision == "bf16":
        # Gradients are averaged in bf16 (2^-9 relative a rounding), and a master that lands on the other side of a
        # rounding moves a parameter by 2^-8 of itself: some percent of the update. The losses of T5 and BERT are bf16
        # themselves: one step of theirs is up to 2^-7.
        assert distance.loss <= (2.0**-6 if model in ("t5", "bert") else 2e-3)
        assert distance.norm <= 3e-2
        # Stage 0 all-reduces, which gloo does with a rounding to bf16 after every addition: 0.156 with four ranks of
        # the MoE. The other stages add in fp32 and round once.
        assert distance.update <= (0.2 if stage == 0 else 0.15), distance.worst
        return
    assert distance.loss <= 1e-5
    assert distance.norm <= 1e-5
    if optimizer == "sgd":
        assert distance.parameter <= 1e-6
    else:
        assert distance.update <= 1e-3, distance.worst
