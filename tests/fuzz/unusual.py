"""Adds to a drawn program what few training loops do, and what a library that moves parameters is likely to miss.

Each function adds one idea. It first gives up what would make plain torch undefined, or another reason to be refused.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from tests.fuzz.program import Block, Op, Optimizer, Program, Share

SHARES = ["data", "parameter", "transposed", "view", "flat", "buffer", "attribute", "rows"]
ON_GRADIENTS = ["accumulated", "multi", "node", "prehook"]  # what a library that moves gradients may lose
HOOKS = [*ON_GRADIENTS, "tensor", "forward", "forward_pre", "backward", "backward_pre", "step_post"]
OPTIONS: dict[str, list[str]] = {
    "SGD": ["momentum", "maximize", "nesterov", "dampening", "lr_tensor"],
    "Adam": ["betas", "eps", "maximize", "amsgrad"],
    "AdamW": ["betas", "eps", "maximize", "amsgrad", "lr_tensor"],
    "NAdam": ["betas", "momentum_decay", "decoupled_weight_decay", "maximize"],
    "Adadelta": ["rho", "maximize"],
    "Adagrad": ["lr_decay", "maximize"],
    "RMSprop": ["momentum", "alpha", "maximize"],
}
KEEPS = ["attribute", "buffer", "list", "dict"]
KEPT_LOSSES = ["kept", "kept", "kept_too", "kept_after", "kept_earlier"]
INNER_LOSSES = ["inner", "inner", "inner_too", "intermediate"]
LEAVES = ["detach", "data", "state_dict"]
TRANSFORMS = ["grad", "leaves", "hvp"]
WRITES_BUFFERS = {"batchnorm", "buffer", "max_norm", "spectral_norm"}  # in forward


def _eager(program: Program) -> Program:
    return replace(program, config=replace(program.config, deferred=False))


def _alone(program: Program) -> Program:
    return replace(_eager(program), config=replace(program.config, ranks=1, deferred=False, update_in_backward=False))


def _somewhere(r: Random, program: Program, op: Op) -> Program:
    """The operation right after a step, or first, and a backward and a step behind it."""
    places = [0, *(k + 1 for k, each in enumerate(program.loop) if each.name == "step")]
    at = r.choice(places)
    loop = (*program.loop[:at], op, *program.loop[at:], *((Op(), Op("step")) if r.random() < 0.7 else ()))
    return replace(program, loop=loop)


def _block(r: Random, program: Program, **changes: object) -> Program:
    """One block with these fields changed."""
    blocks = list(program.model.blocks)
    at = r.randrange(len(blocks))
    blocks[at] = replace(blocks[at], **changes)
    return replace(program, model=replace(program.model, blocks=tuple(blocks)))


def _shared_memory(r: Random, program: Program) -> Program:
    program = _eager(program)
    shared = Share(r.choice(SHARES), r.randrange(4), r.randrange(12))
    if len(program.model.blocks) == 1:
        program = replace(program, model=replace(program.model, blocks=(*program.model.blocks, Block())))
    program = replace(program, model=replace(program.model, shares=(shared,)))
    if r.random() < 0.5:
        program = _somewhere(r, program, Op("shadow", how=r.choice(["write", "sum", "clone"])))
    return program


def _hook(r: Random, program: Program) -> Program:
    how = r.choice([*HOOKS, *ON_GRADIENTS * 2])
    op = Op("hook", r.randrange(12), how)
    program = _eager(program)
    if r.random() < 0.3:
        program = _somewhere(r, program, Op("unhook"))
    if r.random() < 0.4:
        return replace(program, before=(*program.before, op))
    if r.random() < 0.6:
        return replace(program, loop=(op, *program.loop))
    return _somewhere(r, program, op)


def _option(r: Random, program: Program) -> Program:
    """An option changes between two steps: half of the time with a store that has update rules of its own."""
    if r.random() < 0.5:
        placement = " ".join(r.choice(["device", "host", "nvme"]) for _ in range(3))
        config = replace(program.config, placement=placement, slab=False, cpu_step=r.random() < 0.4)
        optimizer = Optimizer(r.choice(["SGD", "SGD", "Adam", "AdamW"]), (("lr", 0.02),), program.optimizer.groups)
        program = replace(program, config=config, optimizer=optimizer)
    name = program.optimizer.name
    how = r.choice([*OPTIONS.get(name, ["lr"]), "weight_decay"])
    if how == "momentum" and r.random() < 0.7:  # switched on
        kept = tuple((k, v) for k, v in program.optimizer.options if k not in ("momentum", "nesterov"))
        program = replace(program, optimizer=replace(program.optimizer, options=kept))
    program = _somewhere(r, program, Op("options", r.randrange(2), how))
    return replace(program, loop=(*program.loop, Op(), Op("step"), Op(), Op("step")))


def _gradient(r: Random, program: Program) -> Program:
    """Gradients change between backward and step."""
    how = r.choice(["mul", "foreach", "add", "clip", "clip_value", "step"])
    program = replace(program, config=replace(program.config, update_in_backward=False))
    program = _alone(program) if how in ("clip", "clip_value", "step") else program
    return replace(program, loop=(*program.loop, Op(), Op("grad", r.randrange(12), how), Op("step"), Op(), Op("step")))


def _saved(r: Random, program: Program) -> Program:
    """Hooks of the user's on what the graph keeps."""
    op = Op("backward", 0, r.choice(["saved_on_cpu", "saved_copies"]))
    return replace(program, loop=(*program.loop, op, Op("step"), Op(), Op("step")))


def _recomputing(r: Random, program: Program) -> Program:
    program = _block(r, program, checkpoint="adjoint", use=r.choice(["once", "twice"]))
    return replace(program, loop=(*program.loop, Op(), Op("step")))


def _forced(r: Random, program: Program) -> Program:
    program = _block(r, program, use=r.choice(["forced", "forced_through"]), checkpoint="")
    return _somewhere(r, program, Op("evaluate", how=r.choice(["no_grad", "eval"])))


def _hook_that_runs(r: Random, program: Program) -> Program:
    loop = (*program.loop, Op("backward", r.randrange(36), "hook_runs"), Op("step"))
    return replace(program, loop=loop)


def _interrupt(r: Random, program: Program) -> Program:
    program = _alone(program)
    blocks = tuple(
        replace(b, kind="linear" if b.kind in WRITES_BUFFERS else b.kind, write="") for b in program.model.blocks
    )
    program = replace(program, model=replace(program.model, blocks=blocks))
    for _ in range(r.choice([2, 4, 6])):
        line = r.randrange(1, 400 + 800 * len(blocks))  # about as many as a forward and a backward have
        program = _somewhere(r, program, Op("interrupt", line, r.choice(["", "", "", "evaluate"])))
    return program


def _mask(r: Random, program: Program) -> Program:
    kind = r.choice(["transformer", "transformer", "masked"])
    program = _block(r, program, kind=kind, use=r.choice(["once", "once", "twice"]))
    return _somewhere(r, program, Op("evaluate", how=r.choice(["eval", "eval", "eval_inference", "no_grad"])))


def _last(r: Random, program: Program, how: str) -> Program:
    """A backward of this kind and a step at the end, and a plain one behind it."""
    return replace(program, loop=(*program.loop, Op("backward", r.randrange(36), how), Op("step"), Op(), Op("step")))


def _kept(r: Random, program: Program) -> Program:
    for _ in range(r.choice([1, 1, 2])):
        program = _block(r, program, keep=r.choice(KEEPS))
    how = r.choice(KEPT_LOSSES)
    return _last(r, program, "kept" if how == "kept_after" and program.config.update_in_backward else how)


def _inner(r: Random, program: Program) -> Program:
    return _last(r, program, r.choice(INNER_LOSSES))


def _leaf(r: Random, program: Program) -> Program:
    return _somewhere(r, program, Op("leaf", r.randrange(12), r.choice(LEAVES)))


def _transform(r: Random, program: Program) -> Program:
    return _somewhere(r, program, Op("transform", r.randrange(12), r.choice(TRANSFORMS)))


IDEAS: dict[str, Callable[[Random, Program], Program]] = {
    "shared memory": _shared_memory,
    "hooks": _hook,
    "options": _option,
    "edited gradients": _gradient,
    "saved tensors": _saved,
    "recomputing": _recomputing,
    "autograd in forward": _forced,
    "forward in backward": _hook_that_runs,
    "interrupt": _interrupt,
    "mask": _mask,
}
WAYS: dict[str, Callable[[Random, Program], Program]] = {
    "kept tensors": _kept,
    "inner outputs": _inner,
    "leaves": _leaf,
    "transforms": _transform,
}
OFTEN = ["shared memory", "hooks", "hooks", "options", "interrupt", "interrupt"]


def add_unusual(r: Random, program: Program) -> Program:
    """The program with one idea, seldom two, or as it is."""
    for chance in (0.5, 0.1):
        if r.random() < chance:
            program = IDEAS[r.choice([*IDEAS, *OFTEN])](r, program)
    return program


def add_way(r: Random, program: Program) -> Program:
    """The program with one way into the model besides its call, or as it is."""
    return WAYS[r.choice(list(WAYS))](r, program) if r.random() < 0.35 else program
