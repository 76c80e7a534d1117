"""Ctrl-C at any line of ours, then zero_grad() and on, as in a notebook: what follows is exact, or is refused.

Each case interrupts a share of the lines, other ones than the other cases. Fails if a hook leaves anything behind: a
gradient or a part of one, a unit without memory, a buffer that is never free again, gradients that stay switched off.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_core
import zero_offload
from tests import kit
from tests.interrupting import firsts, interrupted, lines_of
from zero_core.active_calls import mended
from zero_core.errors import CollectiveError, GradientError, ZeroError

pytestmark = pytest.mark.promise("ctrl-c-training")

BATCHES = [torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
STORES: dict[str, Callable[[], Any]] = {
    "device": lambda: None,
    "host": lambda: zero_offload.TieredStore(),
    "nvme": lambda: zero_offload.TieredStore("nvme", "nvme", "nvme", nvme=zero_offload.MemoryByteStore()),
}
BETWEEN = ("zero_core/hooks/engine.py", "zero_core/hooks/saved_tensors.py")
CASES = [("device", 0), ("host", 3), ("device", 3), ("nvme", 0), ("host", 0), ("nvme", 3)]


class Block(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.blocks = nn.Sequential(Block(4, 5), Block(5, 5))
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def sharded(store: str, stage: int) -> tuple[nn.Module, Any]:
    model, optimizer = built()
    return model, zero_core.shard(model, optimizer, stage=stage, store=STORES[store](), units=[Block])


def backward(model: nn.Module, number: int) -> None:
    model(BATCHES[number]).square().mean().backward()


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    backward(model, number)
    optimizer.step()
    optimizer.zero_grad()


def values(model: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.allclose(one, other, atol=1e-6) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("store", "stage"), CASES)
def test_what_follows_ctrl_c_in_forward_backward_or_zero_grad_is_as_if_it_had_not_begun(store, stage):
    plain, _ = built()
    backward(plain, 1)
    wanted = [parameter.grad for parameter in plain.parameters()]
    model, optimizer = sharded(store, stage)

    def run() -> None:
        backward(model, 0)
        optimizer.zero_grad()

    run()
    lines = lines_of(run)
    stopped = 0
    for k in firsts(lines)[CASES.index((store, stage)) :: 2 * len(CASES)]:
        try:
            with interrupted(k):
                run()
        except KeyboardInterrupt:
            stopped += 1  # what a store finds done varies, and so does the number of lines
        assert torch.is_grad_enabled(), lines[k]
        optimizer.zero_grad()
        backward(model, 1)
        assert same([zero_core.full_gradient(p) for p in model.parameters()], wanted), lines[k]
        optimizer.zero_grad()
    assert stopped > 20
    step(model, optimizer, 1)
    stock = torch.optim.AdamW(plain.parameters(), lr=0.05)
    stock.step()
    assert same(values(model), values(plain))
    optimizer.close()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_ctrl_c_at_the_end_of_a_block_leaves_the_modes_of_autograd_as_they_were(mode, stage):
    model, optimizer = sharded("device", stage)

    def run() -> None:
        with mode():
            loss = model(BATCHES[0]).square().mean()
            loss.backward() if loss.requires_grad else None
        optimizer.zero_grad()

    lines = lines_of(run)
    for k in [k for k, line in enumerate(lines) if "grad_mode.py" in line]:
        with pytest.raises(KeyboardInterrupt), interrupted(k):
            run()
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled(), lines[k]
        optimizer.zero_grad()
    optimizer.close()


@pytest.mark.parametrize("stage", [0, 3])
def test_what_follows_ctrl_c_in_an_encoder_that_is_evaluated_is_as_if_it_had_not_begun(stage):
    """Fails if a unit whose gather was interrupted is taken for one that has memory, or stays in use."""

    def made() -> nn.Module:
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        return nn.Sequential(nn.TransformerEncoder(layer, 1), nn.Linear(4, 2)).eval()

    plain, model = made(), made()
    optimizer = zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))

    def run() -> Tensor:
        with torch.no_grad():
            return model[0](x)  # the encoder alone is no unit: its hooks hold those inside of it

    with torch.no_grad():
        wanted, whole = plain[0](x), plain(x)
    run()
    inside, stopped = [], []
    for k, line in enumerate(lines_of(run)):
        if "hooks/attach_hooks.py" in line or (inside[-1:] == [k - 1] and not line.startswith(BETWEEN)):
            inside.append(k)
    for k in inside[::5]:
        try:
            with interrupted(k):
                run()
        except KeyboardInterrupt as error:  # elsewhere than before, if less has to be gathered
            stopped.append(str(error))
        assert torch.allclose(run(), wanted, atol=1e-6), stopped
        in_wrapper = re.search(r"active_calls.py:(\d+)", stopped[-1])
        # Between two hooks, the encoder's units stay in use until a step.
        if in_wrapper is None or int(in_wrapper[1]) < inspect.getsourcelines(mended)[1]:
            assert not any(unit.users for unit in zero_core.units(model)), stopped
        with torch.no_grad():
            assert torch.allclose(model(x), whole, atol=1e-6), stopped
        zero_core.handle(model).settle()
    assert len(stopped) > 10
    optimizer.close()


@pytest.mark.parametrize(("store", "stage"), [("device", 0), ("device", 3), ("nvme", 3)])
def test_after_ctrl_c_in_a_step_it_was_made_or_was_not_or_everything_refuses(store, stage):
    plain, stock = built()
    before = values(plain)
    step(plain, stock, 0)
    allowed = [before, values(plain)]
    model, optimizer = sharded(store, stage)
    backward(model, 0)
    lines = lines_of(optimizer.step)
    optimizer.close()
    chosen, ends = firsts(lines)[5::23], []
    for k in chosen:
        model, optimizer = sharded(store, stage)
        backward(model, 0)
        with pytest.raises(KeyboardInterrupt), interrupted(k):
            optimizer.step()
        try:
            optimizer.zero_grad()
        except ZeroError as error:
            assert "load the last checkpoint" in str(error)
            with pytest.raises(ZeroError, match="some parameters are not updated"):
                model(BATCHES[0])
            with pytest.raises(ZeroError, match="some parameters are not updated"):
                optimizer.step()  # and not "call zero_grad()", which would refuse
            ends.append("refused")
        else:
            assert any(same(values(model), each) for each in allowed), lines[k]
            ends.append("went on")
        optimizer.close()
    assert set(ends) == {"refused", "went on"}


def test_what_ctrl_c_took_of_a_gradient_is_refused_until_zero_grad():
    model, optimizer = sharded("device", 3)
    backward(model, 0)  # the first of two micro-batches
    line = next(
        k for k, each in enumerate(lines_of(lambda: backward(model, 1))) if "unit_memory/unit_gradient.py" in each
    )
    optimizer.zero_grad()
    backward(model, 0)
    with pytest.raises(KeyboardInterrupt), interrupted(line):
        backward(model, 1)
    backward(model, 1)
    with pytest.raises(GradientError, match="zero_grad"):
        optimizer.step()
    optimizer.zero_grad()
    step(model, optimizer, 1)


@kit.on_ranks(2)
def test_a_rank_that_was_interrupted_refuses_where_others_may_wait_for_it():
    model, optimizer = sharded("device", 2)
    backward(model, 0)
    optimizer.zero_grad()
    if torch.distributed.get_rank() == 0:
        with pytest.raises(KeyboardInterrupt), interrupted(40):
            model(BATCHES[0])
        with pytest.raises(CollectiveError, match="end all processes, and resume from the last checkpoint"):
            model(BATCHES[0])
