"""Operators on the simulated device: the CPU's bits, later, and asynchronous where CUDA's are."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

zero_sim = pytest.importorskip("zero_sim", exc_type=ImportError)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Streams compute with one thread each: so does the CPU that they are compared with."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Each takes x (6, 8) and y (6, 8), positive z (8, 5), and integers i (6,) below 6.
FLOATING: dict[str, Callable[..., Any]] = {
    **{
        name: (lambda op: lambda x, y, z, i: op(x))(getattr(torch, name))
        for name in "abs neg exp expm1 sin cos tan tanh sigmoid erf erfc sign floor ceil round trunc frac square relu "
        "sinh cosh asinh atan isnan isfinite positive deg2rad logical_not t".split()
    },
    **{
        name: (lambda op: lambda x, y, z, i: op(z))(getattr(torch, name))
        for name in "log log2 log10 log1p sqrt rsqrt reciprocal lgamma digamma std var mean sum prod amax amin "
        "median argmax argmin norm all any".split()
    },
    **{
        name: (lambda op: lambda x, y, z, i: op(x, y))(getattr(torch, name))
        for name in "add sub mul div maximum minimum atan2 fmod remainder hypot copysign eq ne lt le gt ge "
        "logical_and logical_or logical_xor dist".split()
    },
    **{
        name: (lambda op: lambda x, y, z, i: op(x))(getattr(F, name))
        for name in "gelu silu elu selu celu leaky_relu softplus hardtanh hardswish mish logsigmoid softsign".split()
    },
    "add a number": lambda x, y, z, i: x + 2,
    "number of the host": lambda x, y, z, i: x * torch.tensor(3.0),
    "broadcast": lambda x, y, z, i: x[:, None, :] * y[None, :, :],
    "in place": lambda x, y, z, i: x.clone().add_(y, alpha=0.5).mul_(2).clamp_(-1, 1),
    "in place on a view": lambda x, y, z, i: _changed(x, lambda c: c[1:3, ::2].mul_(3)),
    "in place on overlapping rows": lambda x, y, z, i: _changed(x, lambda c: c[:, 1].add_(c[:, 0])),
    "out": lambda x, y, z, i: torch.add(x, y, out=torch.empty_like(x)) if not x.requires_grad else x + y,
    "out that grows": lambda x, y, z, i: (
        torch.mul(x, y, out=torch.empty(0, dtype=x.dtype, device=x.device)) if not x.requires_grad else x * y
    ),
    "matmul": lambda x, y, z, i: x @ z,
    "linear": lambda x, y, z, i: F.linear(x, y, y[:, 0]),
    "norm of a dimension": lambda x, y, z, i: torch.linalg.vector_norm(x, dim=1),
    "max with indices": lambda x, y, z, i: x.max(1),
    "sort": lambda x, y, z, i: x.sort(1),
    "cumsum in place": lambda x, y, z, i: x.clone().cumsum_(1),
    "softmax": lambda x, y, z, i: x.softmax(-1),
    "cross entropy": lambda x, y, z, i: F.cross_entropy(x, i),
    "layer norm": lambda x, y, z, i: F.layer_norm(x, (8,), y[0], y[1]),
    "batch norm": lambda x, y, z, i: F.batch_norm(x, None, None, y[0], y[1], training=True),
    "embedding": lambda x, y, z, i: F.embedding(i, x),
    "attention": sdpa_kernel(SDPBackend.MATH)(  # on a CPU, torch 2.15 would choose another
        lambda x, y, z, i: F.scaled_dot_product_attention(*(t.view(2, 3, 8) for t in (x, y, x)))
    ),
    "convolution": lambda x, y, z, i: F.conv1d(x[None], y[:4, :6, None], padding=1),
    "cat": lambda x, y, z, i: torch.cat([x, y], 1),
    "split": lambda x, y, z, i: torch.cat(x.split([2, 1, 5], 1)[::-1], 1),
    "unfold": lambda x, y, z, i: x.unfold(1, 3, 2) * 2,
    "as_strided": lambda x, y, z, i: x.as_strided((4, 4), (3, 1), 2) + 1,
    "expand": lambda x, y, z, i: x[:, :1].expand(6, 4) * z[:6, :4],
    "masked select": lambda x, y, z, i: x[x > y],
    "gather": lambda x, y, z, i: x.gather(0, i[:, None].expand(6, 8)),
    "scatter add": lambda x, y, z, i: torch.zeros_like(x).scatter_add(0, i[:, None].expand(6, 8), x),
    "index": lambda x, y, z, i: x[i, i],
    "index by the host's": lambda x, y, z, i: x[torch.tensor([3, 1])],
    "index put": lambda x, y, z, i: _changed(x, lambda c: c.index_put_((i,), y)),
    "assign rows": lambda x, y, z, i: _changed(x, lambda c: c.__setitem__(slice(1, 3), y[:2])),
    "types": lambda x, y, z, i: x.to(torch.float64).to(torch.bfloat16).float(),
    "integers": lambda x, y, z, i: (i * 2 + 1, i // 2, i % 3, i.bincount(), i.cumsum(0), i.sum(), i << 1),
    "nonzero": lambda x, y, z, i: (x > 0).nonzero(),
    "unique": lambda x, y, z, i: i.unique(return_counts=True),
    "arange": lambda x, y, z, i: torch.arange(3, 11, 2, device=x.device) + torch.linspace(0, 1, 4, device=x.device),
    "complex": lambda x, y, z, i: torch.view_as_real(torch.fft.rfft(x.float(), dim=1)),
    "conjugate": lambda x, y, z, i: (torch.complex(x.float(), y.float()).conj() * 2).imag.contiguous(),
    "linear algebra": lambda x, y, z, i: torch.linalg.cholesky(x[:, :6].float() @ x[:, :6].float().t() + 9 * _eye(x)),
    "foreach": lambda x, y, z, i: torch._foreach_mul([x, y], 2.0) + torch._foreach_norm([x, z]),
    "empty": lambda x, y, z, i: x[:0].sum(0) + x[:0].t().numel(),
}


def _eye(x: torch.Tensor) -> torch.Tensor:
    return torch.eye(6, device=x.device)


def _changed(x: torch.Tensor, change: Callable[[torch.Tensor], object]) -> torch.Tensor:
    made = x.clone()
    change(made)
    return made


def leaves(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    b = b.detach().cpu()
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    first, second = (torch.empty(t.numel(), dtype=t.dtype).copy_(t.detach().reshape(-1)) for t in (a, b))
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_results_and_gradients_have_the_cpus_bits(dtype: torch.dtype):
    """Fails if an operator runs another kernel than the CPU's, sees its memory too early or late, or loses a write."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(6, 8, generator=generator).to(dtype) for _ in range(2)]
    given.append(torch.rand(8, 5, generator=generator).to(dtype) + 0.5)
    indices = torch.tensor([3, 0, 5, 2, 2, 1])
    zero_sim.configure(latency_us=0, jitter_us=100)
    wrong = []
    for name, operation in FLOATING.items():
        for requires_grad in (False, True):
            here = [t.detach().clone().requires_grad_(requires_grad) for t in given]
            there = [t.detach().to("sim").requires_grad_(requires_grad) for t in given]
            try:
                expected = leaves(operation(*here, indices))
            except RuntimeError:
                continue  # the CPU has no such kernel for bfloat16
            found = leaves(operation(*there, indices.to("sim")))
            if len(expected) != len(found) or not all(map(same, expected, found)):
                wrong.append(name)
            if requires_grad and any(t.requires_grad for t in expected):
                sums = [sum(t.sum() for t in some if t.requires_grad) for some in (expected, found)]
                gradients = [
                    torch.autograd.grad(total, inputs, allow_unused=True)
                    for total, inputs in zip(sums, (here, there), strict=True)
                ]
                pairs = zip(*gradients, strict=True)
                if not all((a is None) == (b is None) and (a is None or same(a, b)) for a, b in pairs):
                    wrong.append(f"the gradient of {name}")
    assert not wrong
    assert len(FLOATING) > 110
    assert not zero_sim.take_races()


def test_only_operators_whose_result_depends_on_data_make_the_host_wait():
    x, one = torch.arange(6.0, device="sim"), torch.tensor([1], device="sim")
    asynchronous = [lambda: x[one], lambda: x.index_select(0, x.long()), lambda: x.sum()]
    waiting = [lambda: x.nonzero(), lambda: x[x > 2], lambda: x.unique(), lambda: x.sum().item(), lambda: bool(x.any())]
    torch.sim.set_sync_debug_mode("error")
    try:
        for operation in asynchronous:
            operation()
        for operation in waiting:
            with pytest.raises(RuntimeError, match="called a synchronizing operation of the device: "):
                operation()
        torch.sim.set_sync_debug_mode("warn")
        with pytest.warns(UserWarning, match="called a synchronizing operation of the device: aten::nonzero"):
            x.nonzero()
    finally:
        torch.sim.set_sync_debug_mode("default")


def test_tensors_must_be_on_one_device():
    here, there, other = torch.ones(2), torch.ones(2, device="sim:0"), torch.ones(2, device="sim:1")
    for a, b in ((there, here), (here, there), (there, other)):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device, but found at least two"):
            a + b
    with pytest.raises(RuntimeError, match="same device"):
        here.add_(there.sum())
    assert (there * here[0]).tolist() == [1.0, 1.0]  # a number of the CPU


def test_freed_storage_is_refused_when_a_kernel_would_touch_it():
    x = torch.ones(3, device="sim")
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="12 bytes of a storage that has 0 bytes"):
        x + 1


def test_random_numbers_are_the_devices_own():
    """Fails if a kernel draws from the CPU's generator, or at the time it runs instead of when it is queued."""

    def drawn(device: str) -> list[torch.Tensor]:
        x = torch.ones(64, device=device)
        made = [torch.rand(3, device=device), torch.randn(3, device=device), torch.randperm(9, device=device)]
        return [
            t.cpu() for t in (*made, F.dropout(x, 0.5), torch.bernoulli(x / 2), torch.randint(9, (3,), device=device))
        ]

    zero_sim.configure(latency_us=300, jitter_us=300)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = drawn("sim:0")
    assert torch.equal(torch.get_rng_state(), state)
    zero_sim.configure(latency_us=0, jitter_us=0)
    assert all(map(torch.equal, first, drawn("sim:1")))  # one seed, as on CUDA
    torch.manual_seed(3)
    assert all(map(torch.equal, first, drawn("sim:0")))
    mine = torch.Generator("sim").manual_seed(3)
    assert torch.equal(torch.rand(3, device="sim", generator=mine).cpu(), first[0])


def test_a_backward_node_is_reported_where_its_forward_operator_is():
    """Fails if a report of what autograd's thread queued does not lead to the user's line."""
    x = torch.ones(64, device="sim", requires_grad=True)
    y = x.exp()  # the line
    gradient = torch.ones_like(y)
    with torch.sim.stream(torch.sim.Stream()):
        gradient.mul_(2)
        gradient.record_stream(torch.sim.current_stream())
    y.backward(gradient)
    torch.sim.synchronize()
    sites = [party.site for race in zero_sim.take_races() for party in (race.now, race.before)]
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    place = f"test_operations.py:{lines.index('    y = x.exp()  # the line') + 1}"
    assert any("in ExpBackward0, the backward of " in site and place in site for site in sites), sites
