"""What is not trained: bytes of any dtype in the shards, no gradient, and the outputs of the plain model.

Fails if such a parameter is rounded or widened on its way, takes part in a reduction, is trained after all, or if a
change that torch would show is lost in silence.
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


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapted() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def data(step: int) -> Tensor:
    return torch.randn(4, 13, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(3)) -> list[Tensor]:
    """The same data on every rank, so that averaging over ranks changes nothing."""
    outputs = []
    for step in steps:
        output = model(data(step))
        kit.step(optimizer, output.square().mean())
        outputs.append(output.detach())
    return outputs


def as_it_is(parameter: Tensor) -> Tensor:
    return parameter.detach().clone().reshape(-1).view(torch.uint8)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.promise("frozen-bits", "integer-parameters")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@kit.on_ranks(1, 2)
def test_what_is_not_trained_keeps_its_bits_and_its_dtype(size: int, stage: int, tmp_path: Path) -> None:
    """Also through a checkpoint, which has each parameter in the dtype that it is kept in. Rank 0's are everybody's."""
    folder = str(tmp_path / "checkpoint")
    plain, model = build(), build(seed=kit.world()[0])
    base = {name: as_it_is(p) for name, p in plain.named_parameters() if not p.requires_grad}
    expected = train(plain, adamw(plain))
    optimizer = zero_core.shard(model, adamw(model), stage=stage)
    units = zero_core.units(model)
    assert {unit.dtype for unit in units if not unit.trainable} == {torch.float32, *KINDS}
    assert {slot.name.split(".")[2] for unit in units if unit.trainable for slot in unit.layout.slots} == {"adapter"}
    counted = kit.count_sent(zero_core.handle(model).ranks)
    outputs = train(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    sent = dict(counted)
    with zero_core.gathered(model):
        found = {name: as_it_is(p) for name, p in model.named_parameters()}
    assert all(torch.equal(found[name], bits) for name, bits in base.items())

    with torch.no_grad():
        model.blocks[0].tables["t5"].fill_(3)  # int8, outside of any unit's use
        model.blocks[0].base.weight.mul_(0.5)
    zero_core.checkpoint.save(folder, model, optimizer)
    again = build()
    resumed = zero_core.shard(again, adamw(again), stage=3)
    zero_core.checkpoint.load(folder, again, resumed)
    with zero_core.gathered(again), zero_core.gathered(model):
        assert bool((again.blocks[0].tables["t5"] == 3).all())
        for one, other in zip(again.parameters(), model.parameters(), strict=True):
            assert torch.equal(as_it_is(one), as_it_is(other))
    rest = range(3, 5)
    assert all(
        torch.equal(a, b) for a, b in zip(train(model, optimizer, rest), train(again, resumed, rest), strict=True)
    )
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
            models.append(Model())
    plain, model = models
    zero_core.materialise(plain)
    zero_core.shard(model, adamw(model))
    assert all(unit.flat.untyped_storage().nbytes() == 0 for unit in zero_core.units(model))
    for ours, theirs in zip(kit.values(model), plain.parameters(), strict=True):
        assert torch.equal(as_it_is(ours), as_it_is(theirs))


@pytest.mark.promise("progressive-unfreezing")
def test_progressive_unfreezing_equals_torch() -> None:
    """Sharded while everything requires a gradient; then one block after another is thawed."""

    def run(sharded: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = toys.Stack()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = zero_core.shard(model, optimizer) if sharded else optimizer
        model.blocks.requires_grad_(False)
        outputs = []
        for step in range(6):
            if step % 2 == 0 and step:
                model.blocks[-step // 2].requires_grad_(True)
            output = model(toys.data(step, 0))
            kit.step(optimizer, output.square().mean())
            outputs.append(output.detach())
        return outputs

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


@pytest.mark.promise("frozen-bits")
def test_param_dtype_leaves_integers_and_8_bit_floats_as_they_are() -> None:
    model = build()
    optimizer = zero_core.shard(model, adamw(model), param_dtype=torch.bfloat16)
    found = {unit.dtype for unit in zero_core.units(model)}
    assert found == {torch.bfloat16, *(kind for kind in KINDS if not kind.is_floating_point or kind.itemsize == 1)}
    masters = {
        unit.store.read_state(unit.index, "master", 0, 1).dtype for unit in zero_core.units(model) if unit.trainable
    }
    assert masters == {torch.float32}
    optimizer.close()


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


# -- a model without an optimizer --------------------------------------------------------------------------------------


@pytest.mark.promise("no-optimizer")
@kit.on_ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_model_without_an_optimizer_has_the_plain_outputs_and_no_gradient_memory(stage: int) -> None:
    plain, model = toys.Stack(), toys.Stack()
    model.load_state_dict(plain.state_dict())
    with torch.no_grad():
        for p in (*plain.parameters(), *model.parameters()):
            torch.distributed.broadcast(p, 0) if torch.distributed.is_initialized() else None
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


@pytest.mark.promise("no-optimizer")
def test_bf16_parameters_of_a_model_without_an_optimizer_have_no_masters() -> None:
    model = toys.Stack().bfloat16()
    handle = zero_core.shard(model)
    for unit in handle.units:
        lent = handle.store.parameters(unit.index)
        assert (
            lent.dtype == torch.bfloat16 and unit.store.read_state(unit.index, "master", 0, 1).dtype == torch.bfloat16
        )
        handle.store.release(unit.index)
    handle.close()


# -- p.data = tensor ---------------------------------------------------------------------------------------------------


@pytest.mark.promise("data-assigned")
def test_data_that_is_assigned_is_copied() -> None:
    """As PEFT merges an adapter, and as averaged weights are swapped in for evaluation."""
    plain, model = toys.Stack(), toys.Stack()
    model.load_state_dict(plain.state_dict())
    optimizer = zero_core.shard(model, toys.adamw(model.parameters()))
    for each in (plain, model):
        each.head.weight.data += 1.0
        each.head.bias.data = each.head.bias.data * 2 + 1
        each.embed.weight.data = torch.full_like(each.embed.weight.data, 0.25)
    x = toys.data(0, 0)
    assert torch.equal(model(x), plain(x))
    kit.step(optimizer, toys.loss_of(model, x))


@pytest.mark.promise("data-assigned", "data-assigned-way-out")
def test_data_that_is_assigned_and_still_held_is_refused_once_one_of_the_two_changes() -> None:
    """torch would change both."""
    model, optimizer = kit.sharded(toys.Stack, toys.adamw)
    held = torch.zeros(3)
    model.head.bias.data = held
    assert torch.equal(model(toys.data(0, 0)), model(toys.data(0, 0)))
    held += 1
    with pytest.raises(ChangedParameterError, match=r"head.bias was given a tensor .* it was written since"):
        model(toys.data(0, 0))
    model.head.bias.data = held
    toys.loss_of(model, toys.data(0, 0)).backward()
    told = "head.bias was given a tensor .* a step is about to change.* or delete the tensor"
    with pytest.raises(ChangedParameterError, match=told) as raised:
        optimizer.step()
    del held
    optimizer.step()
    assert raised.tb is not None  # a notebook keeps the last traceback, too
    with pytest.raises(ChangedParameterError, match=r"was given a view of .* share memory: write p.data.copy_"):
        model.embed.bias.data = model.blocks[0].norm.bias.data
