"""Draws a program from a seed: what most training loops consist of. unusual.py adds what few of them do."""

import dataclasses
from random import Random
from typing import Any

from tests.fuzz.program import Block, Config, Model, Op, Optimizer, Program, sound
from tests.fuzz.unusual import add_unusual, add_way

COMMON = ["linear", "mlp", "conv", "layernorm", "batchnorm", "embedding", "scalar", "nested", "gru", "mha"]
RARER = ["encoder", "experts", "buffer", "dropout", "empty", "max_norm", "list"]
PARAMETRISED = ["weight_norm", "spectral_norm", "orthogonal", "symmetric"]
OUTPUTS = ["tuple", "list", "dict", "dataclass", "namedtuple", "nested", "object", "pass"]
WRITES = ["clamp", "detach", "copy", "row"]

_DECAY = {"weight_decay": [0.0, 0.1]}
_ADAM = {"lr": [0.01, 0.03], "eps": [1e-3, 1e-2], **_DECAY, "betas": [(0.9, 0.99), (0.5, 0.9)]}
_FOREACH = {"foreach": [None, None, True, False]}
_FASTER = {**_FOREACH, "fused": [None, None, None, True]}
_SGD = {"lr": [0.03, 0.1], "momentum": [0.0, 0.9], "nesterov": [False, True], **_DECAY}
STOCK: dict[str, dict[str, list[Any]]] = {
    "SGD": {**_SGD, "maximize": [False, False, False, True], **_FASTER},
    "Adam": {**_ADAM, "amsgrad": [False, False, True], **_FASTER},
    "AdamW": {**_ADAM, "amsgrad": [False, False, True], **_FASTER},
    "NAdam": {**_ADAM, "decoupled_weight_decay": [False, True], **_FOREACH},
    "Adadelta": {"lr": [0.3], "eps": [1e-3], **_DECAY, **_FOREACH},
    "Adagrad": {"lr": [0.03], "eps": [1e-3], "lr_decay": [0.0, 0.1], "initial_accumulator_value": [0.0, 0.1]},
    "RMSprop": {"lr": [0.01], "eps": [1e-2], "momentum": [0.0, 0.9], "centered": [False, True], **_FOREACH},
}
TIERED = {"SGD", "Adam", "AdamW"}  # what every UpdateStep knows
OWN = ["Soft", "Counting", "Slow"]
NOT_ELEMENTWISE = ["Rows", "Factors", "Noise", "Whole", "Adafactor", "Muon", "LBFGS"]
READS = ["norm", "mean", "first", "tolist", "numpy", "clone", "data", "detach", "state_dict", "vector", "grad"]
PARAMETER_WRITES = ["copy", "mul", "data", "data_row", "detach", "row", "gathered", "init", "foreach", "clamp", "apply"]


def generate(seed: int) -> Program:
    """The program of a seed: usually one that shard() is to honour, now and then with something it may refuse."""
    r = Random(seed)
    exotic = r.choice(["optimizer"] * 4 + ["config"]) if r.random() < 0.03 else ""
    model = _model(r)
    config = _config(r, exotic == "config")
    if config.ranks > 1 and (model.container != "list" or config.units == "linears"):
        # every expert would be a unit of its own, and ranks that choose others are refused
        blocks = tuple(dataclasses.replace(b, kind="nested") if b.kind == "experts" else b for b in model.blocks)
        model = dataclasses.replace(model, blocks=blocks)
    if exotic == "optimizer":  # with tiers it would be refused for its name
        config = dataclasses.replace(config, placement="", slab=False, cpu_step=False)
    optimizer = _optimizer(r, exotic == "optimizer", config)
    joint = Random(seed + (2 << 32))
    if not exotic and joint.random() < 0.12:
        optimizer = _joint(joint, optimizer.groups)
        if joint.random() < 0.4:  # a mixture, whose experts may be in groups
            at = joint.randrange(len(model.blocks) + 1)
            use, checkpoint = joint.choice(["once", "once", "twice"]), _some(joint, 0.3, "plain", "")
            stack = Block("stack", use=use, checkpoint=checkpoint)
            model = dataclasses.replace(model, blocks=(*model.blocks[:at], stack, *model.blocks[at:]))
            config = dataclasses.replace(config, expert_bytes=joint.choice([1, 1, 300, None]))
    loop = _loop(r, config)
    same = any(block.kind == "max_norm" for block in model.blocks)
    program = Program(model, optimizer, loop=loop, config=config, seed=seed, same_data=same)
    program = add_way(Random(seed + (3 << 32)), add_unusual(Random(seed + (1 << 32)), program))
    if not sound(program):
        kept = tuple(op for op in program.loop if op.name not in ("interrupt", "grad"))
        program = dataclasses.replace(program, loop=kept)
    return program


def _some(r: Random, chance: float, value: Any, otherwise: Any) -> Any:
    return value if r.random() < chance else otherwise


def _model(r: Random) -> Model:
    blocks = tuple(_block(r) for _ in range(r.choice([1, 2, 2, 3, 4])))
    pairs = [(i, j) for i in range(len(blocks)) for j in range(i)]
    return Model(
        blocks,
        width=r.choice([4, 6]),
        container=r.choice(["list", "list", "sequential", "attributes", "dict"]),
        root=_some(r, 0.4, r.choice(["scale", "bias", "empty", "embedding"]), ""),
        output=_some(r, 0.4, r.choice(OUTPUTS), "tensor"),
        ties=(r.choice(pairs),) if pairs and r.random() < 0.15 else (),
        external=_some(r, 0.15, r.randrange(len(blocks)), -1),
        in_place=r.random() < 0.1,
        wrapped=r.random() < 0.1,
    )


def _block(r: Random) -> Block:
    kind = r.choice(r.choice([*[COMMON] * 5, *[RARER] * 3, PARAMETRISED]))
    return Block(
        kind,
        use=_some(r, 0.25, r.choice(["twice", "twice", "never", "odd", "training", "no_grad"]), "once"),
        output=_some(r, 0.3, r.choice(OUTPUTS), "tensor"),
        checkpoint=_some(r, 0.15, r.choice(["plain", "reentrant"]), ""),
        write=_some(r, 0.1, r.choice(WRITES), ""),
        frozen=_some(r, 0.15, r.choice(["all", "first"]), ""),
        hook=_some(r, 0.1, r.choice(["forward", "backward", "parameter"]), ""),
    )


def _optimizer(r: Random, exotic: bool, config: Config) -> Optimizer:
    groups = _some(r, 0.4, r.choice(["two", "ndim", "partial", "named"]), "one")
    if exotic:
        return Optimizer(r.choice(NOT_ELEMENTWISE), (("lr", 0.03),), groups)
    if not config.placement and r.random() < 0.25:
        return Optimizer(r.choice(OWN), (("lr", 0.03),), groups)
    name = r.choice(sorted(TIERED) if config.placement or r.random() < 0.4 else sorted(STOCK))
    options = {key: r.choice(values) for key, values in STOCK[name].items()}
    options = {k: v for k, v in options.items() if v not in (None, False) or k in ("foreach",)}
    if name == "SGD" and not options.get("momentum"):
        options.pop("nesterov", None)
    if options.get("fused"):
        options.pop("foreach", None)
    if config.placement:  # these the steps of zero-offload refuse
        options.pop("amsgrad", None)
        options.pop("maximize", None)
    return Optimizer(name, tuple((k, v) for k, v in options.items() if v is not None), groups)


def _joint(r: Random, groups: str) -> Optimizer:
    """Muon and AdamW. Orthogonalised in bf16, a rounding of the gradient would be as large as a mistake."""
    options = {"lr": [0.01, 0.03], "eps": [1e-3, 1e-2], **_DECAY, "nesterov": [True, False], "ns_steps": [5, 3]}
    options |= {"adjust_lr_fn": ["original", "match_rms_adamw"]}
    return Optimizer("Joint", tuple((key, r.choice(values)) for key, values in options.items()), groups)


def _config(r: Random, exotic: bool) -> Config:
    placement = ""
    if r.random() < 0.35:
        placement = " ".join(r.choice(["device", "host", "nvme"]) for _ in range(3))
    config = Config(
        ranks=r.choice([1, 1, 2]),
        stage=r.choice([0, 1, 2, 3, 3, 3]),
        placement=placement,
        slab="nvme" in placement and r.random() < 0.3,
        cpu_step=bool(placement) and r.random() < 0.5,
        overlap=r.random() < 0.8,
        units=_some(r, 0.2, r.choice(["blocks", "linears"]), ""),
        prefetch_bytes=r.choice([128 << 20, 128 << 20, 0, 1, 200]),
        resident_bytes=r.choice([0, 0, 0, 200, 1 << 20]),
        max_grad_norm=r.choice([None, 0.1, 1.0]),
        warm=_some(r, 0.08, r.choice([1, 2]), 0),
        deferred=r.random() < 0.03,
    )
    if config.deferred:
        config = dataclasses.replace(config, warm=0)
    if exotic or r.random() < 0.08:
        config = dataclasses.replace(config, update_in_backward=True)
        if not exotic:
            config = dataclasses.replace(config, max_grad_norm=None, stage=r.choice([0, 2, 3]))
    return config


def _loop(r: Random, config: Config) -> tuple[Op, ...]:
    ops: list[Op] = []
    calm = config.update_in_backward  # then every backward is a step, and nothing can come between the two
    for _ in range(r.choice([1, 2, 3, 4])):
        while r.random() < 0.4:
            ops.append(_between(r, calm))
        waits = not calm and r.random() < 0.2  # a forward whose backward comes after what follows
        if waits:
            ops.append(Op("forward", r.randrange(12), _some(r, 0.2, "l2", "")))
            if r.random() < 0.3:  # as a loop with an adversary: some parameters are stepped, others are not
                ops += [Op("sub_forward", r.randrange(12), "backward"), Op("step")]
        micro = 1 if calm else r.choice([1, 1, 1, 2, 3])
        quiet = r.random() < 0.4
        for m in range(micro):
            ops.append(_backward(r, quiet and not calm and (m < micro - 1 or r.random() < 0.2), calm))
            while not calm and r.random() < 0.2:
                ops.append(_pending(r))
        if waits and r.random() < 0.5:
            ops += [_pending(r), Op("late", quiet=quiet and r.random() < 0.5)]
            waits = False
        ops.append(Op("step", how=_some(r, 0.3, r.choice(["model", "parameters", "" if calm else "closure"]), "")))
        if waits:
            ops += [Op("late"), Op("step")]
    while r.random() < 0.4:
        ops.append(_between(r, calm))
    return tuple(ops)


def _backward(r: Random, quiet: bool, calm: bool) -> Op:
    kinds = ["l2", "l2_before", "external_read", "grad_scale"]
    if not calm:
        kinds += ["joint", "penalty", "autograd_grad", "reverse", "part"]
    return Op("backward", r.randrange(12), _some(r, 0.35, r.choice(kinds), ""), quiet)


def _between(r: Random, calm: bool) -> Op:
    """Something that loops do between steps, when no gradient is pending."""
    seldom = ["options", "freeze", "resume", "state_dict", "mode", "fail", "sub_forward", "step"]
    name = r.choice([*["read"] * 4, *["write"] * 3, *["evaluate"] * 3, *seldom])
    how = {
        "read": READS,
        "write": PARAMETER_WRITES,
        "evaluate": ["no_grad", "inference", "eval", "thrown_away", "copy", "cached"],
        "options": ["lr", "weight_decay"],
        "fail": ["forward"] if calm else ["forward", "backward"],
        "resume": ["", "", "stage"],
        "sub_forward": ["no_grad"] if calm else ["no_grad", "backward"],
    }.get(name, [""])
    return Op(name, r.randrange(12), r.choice(how))


def _pending(r: Random) -> Op:
    """Something between backward and step."""
    name = r.choice(["read", "read", "evaluate", "drop", "write", "options", "fail", "drop_all"])
    how = {"read": READS, "write": PARAMETER_WRITES, "evaluate": ["no_grad", "eval"]}
    how |= {"options": ["lr"], "fail": ["forward"]}
    return Op(name, r.randrange(12), r.choice(how.get(name, [""])))
