"""Advice of zero-optim-cpu that is followed: each test makes a mistake, does what the error says, and that works."""

import os

import pytest
import torch

import zero_optim_cpu
from zero_optim_cpu.kernels import Kernels
from zero_optim_cpu.tensors import check, dtype_code


def weights(dtype=torch.float32):
    parameter = torch.nn.Parameter(torch.ones(8, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    return parameter


def test_threads_and_cores_are_given_as_an_error_says():
    own = sorted(os.sched_getaffinity(0))[:1]
    with pytest.raises(ValueError, match="leave it out for one per core"):
        Kernels(threads=0)
    with pytest.raises(ValueError, match="leave threads out"):
        Kernels(cores=own, threads=2)
    with pytest.raises(ValueError, match="leave those out, or leave cores out"):
        Kernels(cores=[*own, 1023])
    assert Kernels().threads >= 1
    assert Kernels(cores=own).threads == 1


@pytest.mark.advice("use to_dense()", "use .contiguous()")
@pytest.mark.parametrize(
    ("given", "advice", "way"),
    [
        (torch.ones(2).to_sparse(), "use to_dense()", lambda tensor: tensor.to_dense()),
        (torch.ones(2, 3).t(), "use .contiguous()", lambda tensor: tensor.contiguous()),
        (torch.ones(2, device="meta"), "give it values first", lambda tensor: torch.ones_like(tensor, device="cpu")),
    ],
)
def test_a_tensor_is_made_what_the_kernels_take(given, advice, way):
    with pytest.raises(ValueError) as raised:
        check("values", given)
    assert advice in str(raised.value)
    check("values", way(given))


@pytest.mark.advice("the kernels take float32, bfloat16 and float16: cast it")
def test_a_dtype_without_a_kernel_is_cast():
    with pytest.raises(TypeError, match="cast it"):
        dtype_code("values", torch.float64)
    assert dtype_code("values", torch.ones(2, dtype=torch.float64).float().dtype) == 0


def test_an_optimizer_is_made_and_bound_as_an_error_says():
    with pytest.raises(ValueError, match="to ascend, pass maximize=True"):
        zero_optim_cpu.AdamW([weights()], lr=-0.1)
    parameter = weights()
    zero_optim_cpu.AdamW([parameter], lr=0.1, weight_decay=0.0, maximize=True, threads=1).step()
    assert bool((parameter > 1).all())
    step = zero_optim_cpu.CpuStep(threads=1)
    with pytest.raises(RuntimeError, match=r"call bind\(optimizer\) first"):
        step._bound()
    step.bind(torch.optim.AdamW([parameter]))
    step._bound()


def test_momentum_is_given_before_bind():
    rule = {}
    for momentum in (0.0, 0.9):
        step = zero_optim_cpu.CpuStep(threads=1)
        step.bind(torch.optim.SGD([weights()], lr=0.1, momentum=momentum))
        rule[momentum] = step._bound()
    options = torch.optim.SGD([weights()], lr=0.1, momentum=0.9).param_groups[0]
    with pytest.raises(ValueError, match=r"give some param group a momentum before bind\(\)"):
        rule[0.0].hyper(options, 1)
    rule[0.9].hyper(options, 1)
