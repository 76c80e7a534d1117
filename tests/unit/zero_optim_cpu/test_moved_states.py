"""The memory of a state may move while the tensor stays the same object, as over a store that sleeps and wakes."""

import pytest
import torch

import zero_optim_cpu


def stepped(*, moved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The parameter and its first moment after three steps."""
    parameter = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 64))
    optimizer = zero_optim_cpu.AdamW([parameter], lr=0.1, threads=1)
    earlier = []  # kept alive, so that a write into it corrupts nothing else
    for step in range(3):
        parameter.grad = torch.linspace(1.0, 2.0, 64) * (step + 1)
        optimizer.step()
        if moved:
            for name in ("exp_avg", "exp_avg_sq"):
                state = optimizer.state[parameter][name]
                earlier.append(state.detach())
                state.set_(state.clone())
    return parameter.detach(), optimizer.state[parameter]["exp_avg"]


@pytest.mark.promise("moved-states")
def test_a_step_finds_states_whose_memory_has_moved() -> None:
    for ours, theirs in zip(stepped(moved=True), stepped(moved=False), strict=True):
        assert torch.equal(ours, theirs)
