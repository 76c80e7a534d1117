"""`AveragedModel` against `torch.optim.swa_utils.AveragedModel`, and the model it leaves behind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from zero_core.errors import ZeroError

pytestmark = pytest.mark.promise("averaging")

FUNCTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "equal": dict,
    "ema": lambda: {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "one by one": lambda: {"avg_fn": get_ema_avg_fn(0.9), "use_buffers": True},
}


class Model(toys.Stack):
    """With batch statistics, which change in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


def made(kind: str = "equal") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    model.norm.num_batches_tracked = None  # torch cannot average integers
    model.embed.requires_grad_(kind == "one by one")  # which moves a constant by rounding; ours is left as it is
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("kind", list(FUNCTIONS))
@pytest.mark.parametrize("size, stage", [(1, 0), (1, 3), (2, 2), (2, 3)])
@kit.on_ranks()
def test_averages_are_torchs_bit_for_bit_and_leave_the_model_as_it_was(size, kind, stage, tmp_path) -> None:
    plain, plain_optimizer = made(kind)
    model, optimizer = made(kind)
    optimizer = zero_core.shard(model, optimizer, stage=stage)
    average, ours = AveragedModel(plain, **FUNCTIONS[kind]()), zero_core.AveragedModel(model, **FUNCTIONS[kind]())
    x = toys.data(99, 0)
    for number in range(4):
        for each, own in ((plain, plain_optimizer), (model, optimizer)):
            kit.step(own, toys.loss_of(each, toys.data(number, 0)))  # the same data on every rank
        average.update_parameters(plain)
        ours.update_parameters(model)
        for each in (plain, model, average):
            each.eval()
        with torch.no_grad():
            expected, before = average(x), model(x)
            with ours.swapped_in() as swapped:
                assert swapped is model and torch.equal(model(x), expected)
            assert torch.equal(model(x), before) and torch.equal(before, plain(x))
        for each in (plain, model, average):
            each.train()
    ours.save(str(tmp_path / "average"))
    kit.step(optimizer, toys.loss_of(model, toys.data(4, 0)))
    again = zero_core.AveragedModel(model, **FUNCTIONS[kind]())
    again.load(str(tmp_path / "average"))
    assert again.n_averaged == 4
    model.eval()
    with torch.no_grad(), again.swapped_in():
        assert torch.equal(model(x), expected)


def test_the_masters_of_bf16_parameters_are_averaged() -> None:
    """A decay of 0.999 moves a bf16 weight by less than its last bit, again and again; not so in fp32."""
    model, optimizer = kit.sharded(toys.Stack, toys.adamw, param_dtype=torch.bfloat16)
    ours, masters = zero_core.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999)), None
    for number in range(4):
        kit.step(optimizer, toys.loss_of(model, toys.data(number, 0).bfloat16()))
        ours.update_parameters()
        now = kit.values(model, master=True)
        masters = now if masters is None else [m.lerp(p, 1 - 0.999) for m, p in zip(masters, now, strict=True)]
    with ours.swapped_in(), zero_core.gathered(model, master=True):
        assert masters is not None
        assert all(torch.equal(p, m) for p, m in zip(model.parameters(), masters, strict=True))


def test_a_step_with_the_averages_swapped_in_is_told_and_so_is_a_second_swap(tmp_path: Path) -> None:
    model, optimizer = made()
    optimizer = zero_core.shard(model, optimizer)
    ours = zero_core.AveragedModel(model)
    ours.update_parameters()
    with (
        ours.swapped_in(),
        pytest.raises(ZeroError, match=r"inside its swapped_in\(\): leave the with block"),
    ):
        ours.update_parameters()
    ours.update_parameters()  # as the error says
    ours.save(tmp_path)
    told = r"trained the averages. Call step\(\) outside of the with block. AveragedModel.load\(folder\) restores"
    with pytest.raises(ZeroError, match=told), ours.swapped_in():
        kit.step(optimizer, toys.loss_of(model, toys.data(0, 0)))
    ours.load(tmp_path)
    assert ours.n_averaged == 2
    with pytest.raises(ZeroError, match=r"another model than AveragedModel\(\) did: give both the same"):
        ours.update_parameters(Model())
    ours.update_parameters(model)  # as the error says
    with pytest.raises(ZeroError, match="not both"):
        zero_core.AveragedModel(model, avg_fn=get_ema_avg_fn(0.9), multi_avg_fn=get_ema_multi_avg_fn(0.9))


def test_the_average_of_torch_is_refused_and_names_ours() -> None:
    """Fails if the refusal of a copy leaves the reader without the class that the copy was for."""
    model, optimizer = made()
    optimizer = zero_core.shard(model, optimizer)
    with pytest.raises(ZeroError, match=r"To average weights over steps, use zero_core\.AveragedModel"):
        AveragedModel(model)
    assert zero_core.AveragedModel(model) is not None
