"""What is not trained: bytes of any dtype in the shards, no gradient, and the outputs of the plain model.

Fails if such a parameter is rounded or widened, reduced or trained, or if a change that torch would show is lost.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from zero_core.errors import ChangedParameterError

KINDS = (
    torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8,
    torch.int16, torch.int64, torch.bool, torch.complex64,
)  # fmt: skip


class Adapted(nn.Module):
    """A frozen linear layer, tables of every dtype, and a small layer that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(13, 13).requires_grad_(False)
        self.adapter = nn.Linear(13, 13, bias=False)
        self.tables = nn.ParameterDict()
        for number, dtype in enumerate(KINDS):
            values = torch.randn(7 + number, 2, dtype=torch.complex64 if dtype.is_complex else torch.float32).mul(9)
            self.tables[f"t{number}"] = nn.Parameter(values.to(dtype).t(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for table in self.tables.values():
            x = x + table.to(torch.complex64).real.sum() / 100
        return torch.tanh(self.base(x) + self.adapter(x))


def build(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(Adapted() for _ in range(3)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(3)) -> list[Tensor]:
    """The same data on every rank, so that averaging over ranks changes nothing."""
    outputs = []
    for step in steps:
        output = model(torch.randn(4, 13, generator=torch.Generator().manual_seed(step)))
        kit.step(optimizer, output.square().mean())
        outputs.append(output.detach())
    return outputs


def bits(model: nn.Module, trained: bool = True) -> dict[str, Tensor]:
    """A plain model's, or those of a sharded one inside of gathered(). trained: also of what is trained."""
    named = [(n, p.detach()) for n, p in model.named_parameters() if trained or not p.requires_grad]
    return {name: values.reshape(-1).view(torch.uint8) for name, values in named}


@pytest.mark.promise("frozen-bits", "integer-parameters", "checkpoint-integers")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@kit.on_ranks(1, 2)
def test_what_is_not_trained_keeps_its_bits_and_its_dtype(size: int, stage: int, tmp_path: Path) -> None:
    """Also through a checkpoint, which has each parameter in the dtype that it is kept in. Rank 0's are everybody's."""
    plain, model = build(), build(seed=kit.world()[0])
    expected = train(plain, toys.adamw(plain.parameters()))
    optimizer = zero_core.shard(model, toys.adamw(model.parameters()), stage=stage)
    units = zero_core.units(model)
    assert {unit.dtype for unit in units if not unit.trainable} == {torch.float32, *KINDS}
    assert {slot.name.split(".")[1] for unit in units if unit.trainable for slot in unit.layout.slots} == {"adapter"}
    counted = kit.count_sent(zero_core.handle(model).ranks)
    kit.assert_bits(train(model, optimizer), expected)
    sent = dict(counted)
    with zero_core.gathered(model):
        kit.assert_bits(bits(model, trained=False), bits(plain, trained=False))

    with torch.no_grad():
        model[0].tables["t5"].fill_(3)  # int8, outside of any unit's use
        model[0].base.weight.mul_(0.5)
    zero_core.checkpoint.save(tmp_path, model, optimizer)
    again = build()
    resumed = zero_core.shard(again, toys.adamw(again.parameters()), stage=3)
    zero_core.checkpoint.load(tmp_path, again, resumed)
    with zero_core.gathered(again), zero_core.gathered(model):
        assert bool((again[0].tables["t5"] == 3).all())
        kit.assert_bits(bits(again), bits(model))
    rest = range(3, 5)
    kit.assert_bits(train(again, resumed, rest), train(model, optimizer, rest))
    optimizer.close()
    resumed.close()
    if (size, stage) == (2, 3):  # half of the padded adapters is sent by each, and nothing else is reduced
        assert sent["reduce_scatter"] == 3 * 3 * 192 // 2  # 13 * 13 elements, padded to 128 bytes on two ranks
        assert sent["all_gather"] > 3 * 2 * 3 * (192 + 13 * 14) // 2


@pytest.mark.promise("integer-parameters")
@kit.on_ranks(1, 2)
def test_a_deferred_model_has_the_values_of_a_materialised_one() -> None:
    models = []
    for _ in range(2):
        with zero_core.deferred_init(seed=3):
            models.append(build())
    plain, model = models
    zero_core.materialise(plain)
    zero_core.shard(model, toys.adamw(model.parameters()))
    assert all(unit.flat.untyped_storage().nbytes() == 0 for unit in zero_core.units(model))
    with zero_core.gathered(model):
        kit.assert_bits(bits(model), bits(plain))


@pytest.mark.promise("progressive-unfreezing")
def test_progressive_unfreezing_equals_torch() -> None:
    """Sharded while everything requires a gradient; then one block after another is thawed."""

    dense, theirs, model, ours = kit.pair(toys.Stack, toys.adamw)
    outputs: list[list[Tensor]] = [[], []]
    for each, optimizer, found in ((dense, theirs, outputs[0]), (model, ours, outputs[1])):
        each.blocks.requires_grad_(False)
        for step in range(6):
            if step % 2 == 0 and step:
                each.blocks[-step // 2].requires_grad_(True)
            found.append(each(toys.data(step, 0)))
            kit.step(optimizer, found[-1].square().mean())
    kit.assert_bits(*outputs)


@pytest.mark.promise("frozen-bits")
def test_param_dtype_leaves_integers_and_8_bit_floats_as_they_are() -> None:
    model = build()
    zero_core.shard(model, toys.adamw(model.parameters()), param_dtype=torch.bfloat16)
    found = {unit.dtype for unit in zero_core.units(model)}
    assert found == {torch.bfloat16, *(kind for kind in KINDS if not kind.is_floating_point or kind.itemsize == 1)}
    trained = [unit for unit in zero_core.units(model) if unit.trainable]
    assert {unit.store.read_state(unit.index, "master", 0, 1).dtype for unit in trained} == {torch.float32}


@pytest.mark.promise("frozen-bits")
def test_a_checkpoint_in_more_bits_is_rounded_as_masters_are(tmp_path: Path) -> None:
    """To nearest, ties away from zero, as every bf16 value of this library."""
    wide, narrow = toys.Stack(), toys.Stack().bfloat16()
    torch.nn.init.constant_(wide.head.bias, 1 + 2.0**-8)  # halfway between two values of bf16
    zero_core.shard(wide)
    zero_core.shard(narrow)
    zero_core.checkpoint.save(tmp_path / "checkpoint", wide)
    zero_core.checkpoint.load(tmp_path / "checkpoint", narrow)
    assert narrow.head.bias.tolist() == [1 + 2.0**-7] * 3


@pytest.mark.promise("no-optimizer")
@kit.on_ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_model_without_an_optimizer_has_the_plain_outputs_and_no_gradient_memory(stage: int) -> None:
    plain, model = kit.twins(toys.Stack)
    handle = zero_core.shard(model, stage=stage)
    assert isinstance(handle, zero_core.Handle) and handle is zero_core.handle(model)
    assert not any(unit.trainable for unit in handle.units)
    x, y = toys.data(0, 0), toys.data(0, 0).requires_grad_(True)
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
    plain.requires_grad_(False)
    model.requires_grad_(False)
    z = y.detach().clone().requires_grad_(True)
    plain(y).sum().backward()  # a teacher, or a discriminator that somebody else's gradient goes through
    model(z).sum().backward()
    assert y.grad is not None and z.grad is not None and torch.equal(y.grad, z.grad)
    shards = handle.store._shards  # type: ignore[attr-defined]
    assert all(shard.gradient is None and shard._own.numel() == 0 for shard in shards)
    handle.close()
    if kit.world()[1] == 1:
        handle = zero_core.shard(toys.Stack().bfloat16())
        for unit in handle.units:
            kept = handle.store.parameters(unit.index), unit.store.read_state(unit.index, "master", 0, 1)
            assert [values.dtype for values in kept] == [torch.bfloat16] * 2, "there are no masters"
            handle.store.release(unit.index)
        handle.close()


@pytest.mark.promise("data-assigned", "data-assigned-way-out")
def test_data_that_is_assigned_and_still_held_is_refused_once_one_of_the_two_changes() -> None:
    """torch would change both. Until then it is copied, as PEFT merges an adapter."""
    dense, model = kit.twins(toys.Stack)
    optimizer = zero_core.shard(model, toys.adamw(model.parameters()))
    held = torch.zeros(3)
    for each in (dense, model):
        each.head.weight.data += 1.0
        each.head.bias.data = held
        each.embed.weight.data = torch.full_like(each.embed.weight.data, 0.25)
    assert torch.equal(model(toys.data(0, 0)), dense(toys.data(0, 0)))
    held += 1
    with pytest.raises(ChangedParameterError, match=r"for head.bias copied .* the tensor has changed since"):
        model(toys.data(0, 0))
    model.head.bias.data = held
    toys.loss_of(model, toys.data(0, 0)).backward()
    told = "for head.bias copied .* a step is about to change.* or delete the tensor"
    with pytest.raises(ChangedParameterError, match=told) as raised:
        optimizer.step()
    del held, dense
    optimizer.step()
    assert raised.tb is not None  # a notebook keeps the last traceback, too
    with pytest.raises(ChangedParameterError, match=r"embed.bias and blocks.0.norm.bias.*, write p.data.copy_"):
        model.embed.bias.data = model.blocks[0].norm.bias.data
