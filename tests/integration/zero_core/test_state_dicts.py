"""`model.state_dict()` and `load_state_dict()` of a sharded model, on one rank and several.

Fails if a unit is gathered twice, a value is no copy that stays, a tie is saved twice, or a call of one rank hangs.
"""

import io
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import zero_core
from tests import kit, models
from tests.integration.zero_core import toys
from zero_core.comm import watchdog
from zero_core.errors import ChangedParameterError, CollectiveError, ShardedParameterError, StoreError, ZeroError

pytestmark = pytest.mark.promise("state-dict")


def twins(make=toys.Tied, **options):
    dense, model = kit.twins(make)
    return dense, model, zero_core.shard(model, toys.adamw(model.parameters()), **options)


def saved(state):
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    return file


def step(*pairs):
    for model, optimizer in pairs:
        kit.step(optimizer, toys.loss_of(model, toys.data(0, 0)))


@kit.on_ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_unit_is_gathered_once_and_values_are_copies(stage):
    dense, model, optimizer = twins(stage=stage)
    sent = kit.count_sent(optimizer.engine.ranks)
    state = model.state_dict()
    kit.assert_bits(state, dense.state_dict())
    shards = sum(unit.layout.shard_numel for unit in optimizer.engine.units)
    several = optimizer.engine.ranks.shard.size - 1
    assert sent["all_gather"] == shards * several, "each unit is gathered once"
    assert state["blocks.0.up.weight"].data_ptr() == state["blocks.2.up.weight"].data_ptr(), "and saved once"
    sizes = [len(saved(each).getvalue()) for each in (state, dense.state_dict())]
    assert abs(sizes[0] - sizes[1]) < 200, "in a file too"
    step((model, optimizer))
    kit.assert_bits(state, dense.state_dict())  # a copy
    part = model.blocks[1].state_dict(prefix="x.")
    assert list(part) == ["x." + name for name in dense.blocks[1].state_dict()]
    kept = model.state_dict(keep_vars=True)
    assert kept["head.bias"] is model.head.bias


class Looking(toys.Stack):
    """Takes a state dict inside its forward, when one block is in use."""

    found = None

    def run(self, block, x):
        with block.up.register_forward_hook(lambda *_: setattr(self, "found", self.state_dict())):
            return super().run(block, x)


@pytest.mark.advice("write into the parameter itself, or call load_state_dict")
@kit.on_ranks(1, 2)
def test_a_state_dict_that_is_taken_while_parameters_have_memory_stays():
    """Taken while parameters have memory, which goes: values stay, and writes into them are refused."""
    dense, model, optimizer = twins(Looking)
    expected = dense.state_dict()
    with zero_core.gathered(model.blocks[1]):
        inside = model.state_dict()
    taken = []
    with model.blocks[1].register_full_backward_pre_hook(lambda *_: taken.append(model.state_dict())):
        toys.loss_of(model, toys.data(0, 0)).backward()
    optimizer.step()
    for state in (inside, model.found, *taken):
        kit.assert_bits(state, expected)
        kit.assert_bits(torch.load(saved(state)), expected)
    with pytest.raises(ChangedParameterError, match=r"blocks.1.up.weight of a state dict was .* or call load_state_"):
        inside["blocks.1.up.weight"].zero_()
    model.load_state_dict(inside)  # as the error says
    kit.assert_bits(model.state_dict(), expected)
    assert len(taken) == 1
    model.head.register_state_dict_post_hook(lambda _, state, prefix, __: state.__delitem__(prefix + "bias"))
    with zero_core.gathered(model):
        assert "head.bias" not in model.state_dict()


@pytest.mark.promise("outside-writes")
@kit.on_ranks(1, 2)
def test_a_state_dict_loads_as_into_plain_torch():
    dense, model, optimizer = twins()
    torch.manual_seed(1)
    other = toys.Tied()
    plain = toys.adamw(dense.parameters())
    part = {name: value for name, value in other.state_dict().items() if "head" not in name}
    for each in (dense, model):
        with pytest.raises(RuntimeError, match='Missing key.*"head.weight"'):
            each.load_state_dict(part)
        assert each.load_state_dict(part | {"x": torch.ones(1)}, strict=False) == (["head.weight", "head.bias"], ["x"])
    kit.assert_bits(model.state_dict(), dense.state_dict())
    with pytest.raises(ShardedParameterError, match=r"load_state_dict\(assign=True\) .* embed.weight.*leave assign at"):
        model.load_state_dict(other.state_dict(), assign=True)
    kit.assert_bits(model.state_dict(), dense.state_dict())
    sent = kit.count_sent(optimizer.engine.ranks)
    model.load_state_dict(other.state_dict())
    assert not sent["all_gather"], "nothing is gathered to be overwritten"
    dense.load_state_dict(other.state_dict())
    step((model, optimizer), (dense, plain))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, dense.state_dict()[name])


@pytest.mark.promise("dcp-state-dicts")
@kit.on_ranks(1, 2)
def test_torchs_distributed_state_dicts_are_right():
    dense, model, _ = twins()
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    kit.assert_bits(get_model_state_dict(model), dense.state_dict())
    found = get_model_state_dict(model, options=full)
    if toys.world()[0] == 0:
        kit.assert_bits(found, dense.state_dict())
    torch.manual_seed(1)
    other = toys.Tied()
    set_model_state_dict(model, other.state_dict())
    kit.assert_bits(model.state_dict(), other.state_dict())
    set_model_state_dict(model, dense.state_dict(), options=StateDictOptions(full_state_dict=True))
    kit.assert_bits(model.state_dict(), dense.state_dict())
    if dist.is_initialized():
        mine = other.state_dict() if toys.world()[0] == 0 else {}
        set_model_state_dict(model, mine, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        kit.assert_bits(model.state_dict(), other.state_dict())


@kit.on_ranks(1, 2)
def test_transformers_save_a_sharded_model(tmp_path):
    pytest.importorskip("transformers")
    dense, _, model, _ = kit.pair(partial(models.build, "llama"), toys.adamw)
    model.save_pretrained(tmp_path, is_main_process=toys.world()[0] == 0)
    if dist.is_initialized():
        dist.barrier()
    kit.assert_bits(type(dense).from_pretrained(tmp_path).state_dict(), dense.state_dict())


@pytest.mark.promise("state-dict-alone")
@kit.on_ranks(2)
def test_a_rank_that_calls_alone_fails_soon():
    dense, model, optimizer = twins()
    if toys.world()[0] == 0:
        for call, name in ((model.state_dict, "Tied.state_dict"), (optimizer.full_state_dict, "full_state_dict")):
            text = rf"rank 0 of 2 called .*{name}\(\), and no other.*Call it on every rank, outside of `if rank == 0`"
            with mock.patch.object(watchdog, "SECONDS", 0.05), pytest.raises(CollectiveError, match=text):
                call()
    dist.barrier()
    kit.assert_bits(model.state_dict(), dense.state_dict())
    assert optimizer.full_state_dict(rank0_only=False)["step_count"] == 0, "the run goes on"
    step((model, optimizer))


def test_what_a_failed_state_dict_gathered_is_not_shown_later():
    dense, model, optimizer = twins()
    with model.head.register_state_dict_pre_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
        model.state_dict()
    with torch.no_grad():
        model.blocks[1].up.weight.fill_(2.0)
    assert float(model.blocks[1].state_dict()["up.weight"].min()) == 2.0
    step((model, optimizer))
    assert not optimizer.engine.copies.taken
    optimizer.close()
    with pytest.raises((ZeroError, StoreError), match="close"):
        model.state_dict()
