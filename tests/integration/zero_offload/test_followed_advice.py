"""Advice of zero-offload that is followed: each test makes a mistake, does what the error says, and that works."""

import pytest
import torch
from torch import nn

pytest.importorskip("zero_optim_cpu")

import zero_core
import zero_offload
import zero_optim_cpu
from zero_core.errors import UnsupportedOptimizerError
from zero_offload import Hardware, MemoryByteStore, TieredStore, plan


def backward(net):
    net(torch.ones(1, 4)).sum().backward()


@pytest.mark.advice("has keys of its own, such as", "needs units that are recomputed, and")
@pytest.mark.parametrize(
    ("wrong", "advice", "ways"),
    [
        (lambda: Hardware(nvme_read_gbps=0), "give the figure, or leave it out", [lambda: Hardware(nvme_read_gbps=2)]),
        (
            lambda: Hardware(tiers={"nvme": {"gib": 3}}),
            "has keys of its own, such as nvme_gib; give the figures there",
            [lambda: Hardware(nvme_gib=3, tiers={"nvme": {}})],
        ),
        (
            lambda: plan([8, 8], rows=2, activations="host"),
            "give the rows of one micro-batch as well",
            [lambda: plan([8, 8], rows=2, micro_batch=4, activations="host", tokens=8)],
        ),
        (
            lambda: plan([8, 8], rows=2, micro_batch=4, activations="keep", tokens=8),
            "or leave rows out",
            [
                lambda: plan([8, 8], micro_batch=4, activations="keep", tokens=8),
                *(
                    lambda policy=policy: plan([8, 8], rows=2, micro_batch=4, activations=policy, tokens=8)
                    for policy in ("recompute", "host", "nvme", "auto")
                ),
            ],
        ),
        (
            lambda: plan([8, 8], activations=["keep"], tokens=8),
            "1 activation policies for 2 units; give one, or one a unit",
            [lambda each=each: plan([8, 8], activations=each, tokens=8) for each in ("keep", ["keep", "recompute"])],
        ),
        (
            lambda: TieredStore(tiers={"host": MemoryByteStore()}),
            "give the ByteStore another one",
            [lambda: TieredStore(tiers={"shelf": MemoryByteStore()}).close()],
        ),
    ],
)
def test_arguments_that_an_error_names_pass(wrong, advice, ways):
    with pytest.raises(ValueError) as raised:
        wrong()
    assert advice in str(raised.value)
    for way in ways:
        way()


@pytest.mark.advice("give it more room (hardware.tiers")
@pytest.mark.parametrize(
    ("small", "advice", "large"),
    [
        ({"nvme_gib": 0.001}, "hardware.nvme_gib, hardware.nvme_paths", {"nvme_gib": 1}),
        ({"nvme_gib": 0.001}, "hardware.nvme_gib, hardware.nvme_paths", {"nvme_gib": 0.001, "nvme_paths": 500}),
        (
            {"tiers": {"nvme": {}, "shelf": {"gib": 0.001}}},
            "hardware.tiers.shelf.gib",
            {"tiers": {"shelf": {"gib": 1}}},
        ),
    ],
)
def test_a_tier_gets_the_room_that_a_plan_asks_for(small, advice, large):
    where = dict.fromkeys(("parameters", "gradients"), "host") | {"optimizer": "shelf" if "tiers" in small else "nvme"}
    with pytest.raises(zero_offload.PlanError) as raised:
        plan([1 << 20] * 4, Hardware(host_gib=8, **small), **where)
    assert advice in str(raised.value)
    plan([1 << 20] * 4, Hardware(host_gib=8, **large), **where)


@pytest.mark.advice("pass step= an UpdateStep that supports it")
def test_a_step_that_does_not_know_the_optimizer_is_changed_for_one_that_does():
    class Mine(torch.optim.Adagrad):
        pass

    def sharded(step, kind=Mine, **options):
        net = nn.Sequential(nn.Linear(4, 4))
        return net, zero_core.shard(net, kind(net.parameters()), store=TieredStore(step=step), **options)

    with pytest.raises(TypeError, match=r"TorchStep does not know .*Mine; .* parameter at a time, say so by shard\("):
        zero_offload.TorchStep().bind(Mine([nn.Parameter(torch.zeros(2))]))
    with pytest.raises(UnsupportedOptimizerError, match=r"Mine has no contract.*say shard\(optimizer_contract="):
        sharded(zero_offload.TorchStep())
    for net, optimizer in (
        sharded(zero_optim_cpu.CpuStep(threads=1), torch.optim.Adagrad),
        sharded(zero_offload.TorchStep(), optimizer_contract="by itself"),
    ):
        backward(net)
        optimizer.step()
