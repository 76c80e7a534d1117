"""Every mistake is an error that names the tensor, the value and the way out; nothing is written."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_optim_cpu
from tests.unit.zero_optim_cpu.tiles import BF16, FP32, Segment, Tile, adamw, make_tile, same
from zero_optim_cpu import CpuStep, available_isas, compiled_isas

pytestmark = pytest.mark.promise("cpu-refused")

OPTIONS = dict(adamw().param_groups[0])


def bound(layout: str = "split") -> CpuStep:
    step = CpuStep(layout, threads=1)
    step.bind(adamw())
    return step


def whole(tile: Tile) -> list[Segment]:
    return [Segment(0, tile.parameter.numel(), OPTIONS)]


def change(name: str, value: Any) -> Any:
    def apply(tile: Tile) -> None:
        if name in tile.states:
            tile.states[name] = value(tile.states[name])
        else:
            setattr(tile, name, value(getattr(tile, name)))

    return apply


def shared_moments(tile: Tile) -> None:
    tile.states["exp_avg_sq"] = tile.states["exp_avg"]


def gradient_inside_state(tile: Tile) -> None:
    tile.gradient = tile.states["exp_avg"]


def half_over_the_parameter(tile: Tile) -> None:
    memory = torch.zeros(1500, dtype=BF16)
    tile.parameter, tile.gradient = memory[:1000], memory[500:]


WAYS = {  # what an error says to do with the gradient
    "the kernels take float32, bfloat16 and float16: cast it": Tensor.float,
    "use to_dense()": Tensor.to_dense,
    "use .contiguous()": Tensor.contiguous,
    "give it values first": lambda tensor: torch.ones_like(tensor, device="cpu"),
}


@pytest.mark.advice("use to_dense()", "use .contiguous()")
@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (change("gradient", lambda t: t[:-1].clone()), ValueError, "gradient has 999 elements, wanted 1000"),
        (change("gradient", lambda t: t.double()), TypeError, "gradient is torch.float64"),
        (change("gradient", lambda t: torch.zeros(2000)[::2]), ValueError, r"gradient of shape \(1000,\) has strides"),
        (change("gradient", lambda t: t.to("meta")), ValueError, r"gradient is on the meta device and has no values"),
        (change("gradient", lambda t: t.to_sparse()), ValueError, "gradient is torch.sparse_coo"),
        (change("gradient", lambda t: None), TypeError, "gradient is a NoneType, not a tensor"),
        (change("parameter", lambda t: t.to(torch.int32)), TypeError, "parameter is torch.int32"),
        (change("parameter", lambda t: t.to(torch.complex64)), TypeError, "parameter is torch.complex64"),
        (change("remainder", lambda t: t.to(torch.int32)), TypeError, "remainder is torch.int32, wanted torch.int16"),
        (change("exp_avg", lambda t: t[1:].clone()), ValueError, "exp_avg has 999 elements, wanted 1000"),
        (lambda tile: tile.states.pop("exp_avg_sq"), KeyError, "no state 'exp_avg_sq'"),
        (shared_moments, ValueError, "second state and first state overlap in memory"),
        (gradient_inside_state, ValueError, "first state and gradient overlap in memory"),
        (half_over_the_parameter, ValueError, "gradient and parameter overlap in memory"),
    ],
)
def test_tiles_that_do_not_fit(spoil: Any, error: type[Exception], text: str) -> None:
    step = bound()
    tile = make_tile(step, torch.ones(1000), BF16)
    spoil(tile)
    before = {name: value.clone() for name, value in tile.states.items()}
    with pytest.raises(error, match=text) as raised:
        step.update(tile, whole(tile), 1.0)
    assert all(same(tile.states[name], value) for name, value in before.items())
    for advice, way in WAYS.items():
        if text.startswith("gradient") and advice in str(raised.value):
            tile.gradient = way(tile.gradient)
            step.update(tile, whole(tile), 1.0)


@pytest.mark.parametrize(
    ("segments", "text"),
    [
        ([Segment(0, 1001, OPTIONS)], r"segment \[0, 1001\) is not within the tile's 1000 elements"),
        ([Segment(-1, 5, OPTIONS)], r"segment \[-1, 5\)"),
        ([Segment(5, 4, OPTIONS)], r"segment \[5, 4\)"),
        ([Segment(10, 20, OPTIONS), Segment(0, 11, OPTIONS)], r"segment \[10, 20\) overlaps .* ends at 11"),
        ([Segment(0, 10, OPTIONS, step=0)], "has step 0; steps count from 1"),
    ],
)
def test_segments_that_do_not_fit(segments: list[Segment], text: str) -> None:
    step = bound()
    tile = make_tile(step, torch.ones(1000), BF16)
    with pytest.raises(ValueError, match=text):
        step.update(tile, segments, 1.0)
    assert (step.read(tile, "master") == 1).all()


def test_a_misaligned_address_is_refused_by_name() -> None:
    step = bound()
    tile = make_tile(step, torch.ones(10), FP32)
    memory = bytearray(64)
    try:
        tile.gradient = torch.frombuffer(memory, dtype=FP32, count=10, offset=2)
    except ValueError:
        pytest.skip("this torch refuses to make a misaligned tensor")
    with pytest.raises(ValueError, match="gradient at an address that is not a multiple of its element's 4 bytes"):
        step.update(tile, whole(tile), 1.0)


def test_names_that_are_unknown() -> None:
    with pytest.raises(ValueError, match="layout='fp8' is unknown; there are fp32, split"):
        CpuStep("fp8")
    with pytest.raises(ValueError, match="withdrawn in 0.2; split_bf16m takes the same memory"):
        CpuStep("bf16_stochastic")
    with pytest.raises(ValueError, match=r"isa=sse9: instruction set 'sse9' is unknown; this build has scalar"):
        CpuStep(isa="sse9")
    with pytest.raises(ValueError, match="threads=0.* leave it out for one per core"):
        CpuStep(threads=0)
    step = bound()
    tile = make_tile(step, torch.ones(10), FP32)
    with pytest.raises(KeyError, match="'sum' is no state of AdamW"):
        step.read(tile, "sum")
    with pytest.raises(RuntimeError, match=r"call bind\(optimizer\) first"):
        CpuStep().layout(10, FP32)


def test_a_cpu_without_an_instruction_set_says_what_it_has() -> None:
    """Runs where the CPU lacks one; `scripts/sanitize.py old` asks the same of an emulated CPU without AVX2."""
    missing = sorted(set(compiled_isas()) - set(available_isas()))
    if not missing:
        pytest.skip("this CPU has every instruction set of this build")
    with pytest.raises(ValueError, match=f"'{missing[0]}' is not supported by this CPU; it has scalar"):
        CpuStep(isa=missing[0])


def test_the_environment_names_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERO_OPTIM_ISA", "scalar")
    assert CpuStep().isa == "scalar"
    assert CpuStep(isa=available_isas()[-1]).isa == available_isas()[-1]
    monkeypatch.setenv("ZERO_OPTIM_ISA", "mmx")
    with pytest.raises(ValueError, match="ZERO_OPTIM_ISA=mmx: instruction set 'mmx' is unknown"):
        CpuStep()
    monkeypatch.delenv("ZERO_OPTIM_ISA")
    assert CpuStep().isa == available_isas()[-1]


def test_optimizers_without_a_kernel() -> None:
    p = torch.nn.Parameter(torch.zeros(3))
    known = r"zero_optim_cpu\.Lion"

    class Mine(torch.optim.AdamW):
        pass

    for optimizer in (torch.optim.RMSprop([p]), Mine([p])):
        with pytest.raises(TypeError, match=f"no CPU kernel for optimizer .*{type(optimizer).__name__}.*{known}"):
            CpuStep().bind(optimizer)
    with pytest.raises(ValueError, match=r"AdamW with amsgrad=True \(param group 0\)"):
        CpuStep().bind(torch.optim.AdamW([p], amsgrad=True))
    with pytest.raises(ValueError, match="differentiable=True"):
        CpuStep().bind(torch.optim.SGD([p], differentiable=True))
    plain = torch.optim.SGD([p], lr=0.1)
    step = CpuStep()
    step.bind(plain)
    tile = make_tile(step, torch.ones(4), FP32)
    later = [Segment(0, 4, plain.param_groups[0] | {"momentum": 0.9})]
    with pytest.raises(ValueError, match=r"now has momentum=0\.9.* give some param group a momentum before bind\(\)"):
        step.update(tile, later, 1.0)
    step.bind(torch.optim.SGD([p], lr=0.1, momentum=0.9))
    step.update(make_tile(step, torch.ones(4), FP32), later, 1.0)


def test_parameters_that_no_kernel_takes() -> None:
    for bad, error in ((torch.zeros(3).double(), TypeError), (torch.zeros(4, 4).t()[1:], ValueError)):
        with pytest.raises(error, match="parameter"):
            zero_optim_cpu.AdamW([torch.nn.Parameter(bad)])
    with pytest.raises(ValueError, match="parameter is on the meta device"):
        zero_optim_cpu.AdamW([torch.nn.Parameter(torch.zeros(3, device="meta"))])
    optimizer = zero_optim_cpu.AdamW([torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match="amsgrad"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))], "amsgrad": True})
    assert len(optimizer.param_groups) == 1


def test_two_parameters_in_one_memory() -> None:
    memory = torch.zeros(100)
    params = [torch.nn.Parameter(memory[:60]), torch.nn.Parameter(memory[50:])]
    optimizer = zero_optim_cpu.AdamW(params)
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="two parameters, or their states, overlap in memory"):
        optimizer.step()
    assert (memory == 0).all()


@pytest.mark.advice("to ascend, pass maximize=True")
@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("AdamW", {"lr": -1.0}, "lr=-1.0 is negative; to ascend, pass maximize=True"),
        ("AdamW", {"betas": (1.0, 0.9)}, "betas=(1.0, 0.9)"),
        ("Adam", {"eps": -1e-8}, "eps=-1e-08"),
        ("Adam", {"amsgrad": True}, "amsgrad=True"),
        ("Lion", {"betas": (0.9, 2.0)}, "betas"),
        ("Adagrad", {"lr_decay": -0.1}, "lr_decay=-0.1"),
        ("SGD", {"nesterov": True}, "nesterov=True needs momentum"),
    ],
)
def test_options_out_of_range(name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        getattr(zero_optim_cpu, name)([torch.nn.Parameter(torch.zeros(3))], **options)


@pytest.mark.advice("if it was cast after a step, cast it before")
def test_a_parameter_that_was_cast_between_steps_says_so():
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = zero_optim_cpu.AdamW([weight])
    weight.grad = torch.ones(8)
    optimizer.step()
    weight.grad = None
    weight.data = weight.data.bfloat16()
    weight.grad = torch.ones(8, dtype=torch.bfloat16)
    with pytest.raises(KeyError, match=r"no state 'remainder'.*the parameter is torch\.bfloat16; if it was cast"):
        optimizer.step()
    optimizer = zero_optim_cpu.AdamW([weight], lr=0.1)  # cast before the optimizer is made
    optimizer.step()
    assert bool((weight < 1).all())


@pytest.mark.promise("optimizer-wrappers")
def test_an_optimizer_around_another_one_names_the_inner_one():
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

    inner = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(TypeError, match=r"Wrapper wraps the AdamW in its \.optimizer: bind that one"):
        CpuStep(threads=1).bind(Wrapper(inner))
