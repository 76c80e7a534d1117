"""Advice that is followed: each test makes a mistake, does what the error says, and that works."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import zero_core
import zero_nvme
import zero_offload
import zero_optim_cpu
from tests.following import adamw, advised, backward, model, step
from zero_offload import TieredStore


def test_gradients_before_shard_are_used_or_dropped():
    net = model()
    optimizer = adamw(net)
    backward(net)
    for use in (optimizer.step, net.zero_grad):
        with advised("call model.zero_grad(). To use these gradients, call step() of their optimizer before that"):
            zero_core.shard(net, optimizer)
        use()
    step(net, zero_core.shard(net, optimizer))


@pytest.mark.promise("optimizer-wrappers")
def test_the_inner_optimizer_is_given():
    accelerate = pytest.importorskip("accelerate")
    net = model()
    optimizer = accelerate.Accelerator(cpu=True).prepare(adamw(net))
    with advised("wraps another optimizer", "`optimizer = zero_core.shard(model, optimizer.optimizer, ...)`"):
        zero_core.shard(net, optimizer)
    step(net, zero_core.shard(net, optimizer.optimizer))


@pytest.mark.promise("optimizer-wrappers")
def test_an_optimizer_that_wraps_another_does_both_in_a_step_of_its_own():
    """Its advice was to give the inner one, which trains without what the wrapper does, as without Lookahead."""

    class Wrapper(torch.optim.SGD):
        def __init__(self, inner):
            super().__init__(inner.param_groups[0]["params"], lr=0.1)
            self.inner = inner

    class Both(torch.optim.AdamW):
        optimizer_contract = "elementwise"

        @torch.no_grad()
        def step(self, closure=None):
            super().step()
            torch._foreach_mul_([p for group in self.param_groups for p in group["params"] if p.grad is not None], 0.9)

    net = model()
    with advised("wraps another optimizer, AdamW in .inner", "use one optimizer whose step() does the work of both"):
        zero_core.shard(net, Wrapper(adamw(net)))
    step(net, zero_core.shard(net, Both(net.parameters())))


def test_the_optimizers_that_are_named_run():
    net = model()
    with advised("Or use a known optimizer, such as AdamW"):
        mine = type("Mine", (torch.optim.Adafactor,), {})(net.parameters())
        zero_core.shard(net, mine, store=TieredStore(step=zero_optim_cpu.CpuStep(threads=1)))
    kinds = [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad, zero_optim_cpu.Lion]
    for kind in kinds:
        for store in (None, TieredStore(step=zero_optim_cpu.CpuStep(threads=1))):
            net = model()
            step(net, zero_core.shard(net, kind(net.parameters()), store=store))


@pytest.mark.promise("uncuttable-class")
def test_a_lazy_model_runs_once_on_a_sample():
    """Also where it is planned. Fails if torch's own error, which names no parameter and no call, comes first."""
    net = nn.Sequential(nn.LazyLinear(3))
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    zero_hf = pytest.importorskip("zero_hf.sharding")
    config = zero_hf.ZeroConfig(offload="host")
    more = partial(zero_offload.plan, net), partial(zero_hf.shard, net, sgd, config)
    for refused in (partial(zero_core.shard, net, sgd), *more):
        with advised("0.weight has no shape yet: run the model once on a sample before zero_core.shard"):
            refused()
    net(torch.ones(2, 4))
    step(net, zero_core.shard(net, torch.optim.SGD(net.parameters(), lr=0.1)))


def test_a_linear_layer_is_tiled_as_a_class():
    with advised("use TiledLinear.from_linear(model, out_splits=...)"):
        zero_core.tile_linear(nn.Linear(4, 4), threshold=1)
    assert zero_core.TiledLinear.from_linear(nn.Linear(4, 4), out_splits=2)(torch.ones(1, 4)).shape == (1, 4)


@pytest.mark.advice("TorchStep cannot do", "has no CPU kernel; set it to False")
@pytest.mark.parametrize("make", [zero_offload.TorchStep, zero_optim_cpu.CpuStep])
def test_an_option_without_an_update_is_left_off(make):
    def sharded(**options):
        net = model()
        return net, zero_core.shard(net, torch.optim.AdamW(net.parameters(), **options), store=TieredStore(step=make()))

    with advised("amsgrad=True"):
        make().bind(torch.optim.AdamW(model().parameters(), amsgrad=True))
    step(*sharded(amsgrad=False))


@pytest.mark.advice("numpy.ascontiguousarray(x)", "pass a bytearray")
def test_buffers_are_made_contiguous_and_extents_get_room(tmp_path):
    with zero_nvme.Slab(tmp_path, allow_memory=True) as slab:
        slab.reserve(1 << 16)
        extent = slab.allocate(4096)
        rows = np.zeros((64, 128), dtype=np.uint8)[:, :64]
        with advised("numpy.ascontiguousarray(x)"):
            slab.write(extent, rows)
        slab.write(extent, np.ascontiguousarray(rows)).wait()
        columns = torch.zeros(64, 128, dtype=torch.uint8)[:, :64]
        with advised("pass tensor.contiguous()"):
            slab.write(extent, columns)
        slab.write(extent, columns.contiguous()).wait()
        with advised("pass a bytearray"):
            slab.read(extent, b"\0" * 4096)
        slab.read(extent, bytearray(4096)).wait()
        with advised("has no CPU address; copy it to CPU memory first"):
            slab.write(extent, torch.empty(4096, dtype=torch.uint8, device="meta"))
