"""Copies and gathers run beside kernels, as torch's profiler saw them on the device."""

import torch

import zero_core
from tests import kit
from tests.device.zero_core import runs, traces


def trained(device: torch.device, store: object) -> list[tuple[str, traces.Interval]]:
    """The trace of two steps of bf16, of which a unit's kernels take longer than its parameters to come."""
    width, blocks, rows = (32, 4, 8) if device.type == "cpu" else (2048, 12, 16384)
    model = runs.Wide(width, blocks).to(device)
    optimizer = zero_core.shard(
        model, runs.fused(model.parameters()), param_dtype=torch.bfloat16, max_grad_norm=1.0, store=store
    )
    x = torch.randn(rows, width, device=device, dtype=torch.bfloat16)

    def step() -> None:
        for _ in range(2):
            kit.step(optimizer, runs.loss_of(model, x))

    step()
    trace = traces.traced(device, step)
    optimizer.close()
    return trace


def test_parameters_swap_in_beside_kernels(device, needs_hardware):
    trace = trained(device, runs.swapping(device))
    assert trace
    needs_hardware("a trace of the device")
    copies, kernels = traces.split(trace, "memcpy htod")
    assert copies and kernels
    assert traces.hidden(copies, kernels) >= 0.5


def gathered_beside(kind: str) -> tuple[int, float]:
    """(gathers seen, the fraction of their time that is hidden behind kernels) on one rank."""
    trace = trained(runs.device_of_rank(kind), None)
    gathers, kernels = traces.split(trace, "allgather")
    return len(gathers), traces.hidden(gathers, kernels)


def test_gathers_run_beside_kernels(device, needs_hardware, device_ranks):
    for gathers, fraction in device_ranks.run(gathered_beside, device.type):
        needs_hardware("a trace of the device")
        assert gathers and fraction >= 0.5
