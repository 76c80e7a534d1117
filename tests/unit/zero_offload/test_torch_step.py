"""TorchStep: the split of the master, what it refuses."""

import math

import pytest
import torch

from zero_offload.torch_step import TorchStep, join_master, split_master


def patterns() -> torch.Tensor:
    """fp32 values at and around every kind of edge, and many at random."""
    edges = [0.0, -0.0, 1.0, 1 + 2**-8, -(1 + 2**-8), 2**-149, -(2**-126), 3.3895e38, math.inf, -math.inf]
    random = torch.randint(-(2**31), 2**31 - 1, (100_000,), generator=torch.Generator().manual_seed(3))
    values = torch.cat([torch.tensor(edges), random.to(torch.int32).view(torch.float32)])
    return values[~values.isnan()]


def split(values: torch.Tensor, *, spare: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    parameter, remainder = (torch.empty_like(values, dtype=dtype) for dtype in (torch.bfloat16, torch.int16))
    split_master(values, parameter, remainder, spare=spare)
    return parameter, remainder


def joined(parameter: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    return join_master(parameter, remainder, torch.full_like(parameter, torch.nan, dtype=torch.float32))


@pytest.mark.parametrize("spare", [False, True])
def test_the_split_is_rebuilt_bit_for_bit(spare: bool) -> None:
    values = patterns()
    given = values.clone()
    found = joined(*split(given, spare=spare))
    assert torch.equal(found.view(torch.int32), values.view(torch.int32))
    assert spare or torch.equal(given.view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize("spare", [False, True])
def test_nan_stays_nan(spare: bool) -> None:
    nan = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    parameter, remainder = split(nan, spare=spare)
    assert parameter.isnan().all() and joined(parameter, remainder).isnan().all() and not remainder.any()


def test_bind_refuses_what_it_cannot_do() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(TypeError, match="RMSprop.*AdamW"):
        TorchStep().bind(torch.optim.RMSprop([parameter]))
    with pytest.raises(ValueError, match="amsgrad=True"):
        TorchStep().bind(torch.optim.AdamW([parameter], amsgrad=True))

    class AdamW(torch.optim.AdamW):
        """The user's own: its step may be anything."""

    with pytest.raises(TypeError, match="test_torch_step"):
        TorchStep().bind(AdamW([parameter]))
    with pytest.raises(ValueError, match="split"):
        TorchStep("half")
    with pytest.raises(RuntimeError, match="bind"):
        TorchStep().layout(4, torch.float32)
