"""What belongs to a training loop besides backward and step: scales, schedulers, hooks, compiling, meshes, stores."""

import functools
from contextlib import nullcontext

import pytest
import torch

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from zero_core.errors import UnsupportedOptimizerError
from zero_core.gradients.loss_scaling import LossScale


@pytest.mark.promise("loss-scale")
@kit.on_ranks(1, 2)
def test_dynamic_loss_scale_halves_doubles_and_skips():
    """fp16 with a scale too large at first: steps are skipped until it fits, and change nothing."""
    scale = LossScale(2.0**24, window=3)
    options = {"param_dtype": torch.float16, "loss_scale": scale, "max_grad_norm": 1.0}
    model, optimizer = kit.sharded(toys.Stack, toys.adamw, **options)
    values, skipped = [], 0
    for step in range(24):
        before = kit.values(model)
        count = optimizer.step_count
        kit.step(optimizer, toys.loss_of(model, toys.data(step % 3, kit.world()[0]).half()))
        stepped = optimizer.step_count != count
        assert all(torch.equal(a, b) for a, b in zip(before, kit.values(model), strict=True)) != stepped
        skipped += not stepped
        values.append(scale.value)
    assert skipped >= 2
    assert max(zero_core.units(model)[0].steps) == 24 - skipped == optimizer.step_count
    assert any(b == 2 * a for a, b in zip(values, values[1:], strict=False)), values  # doubled after its window
    assert values[0] == 2.0**23


@pytest.mark.promise("gathered")
@kit.on_ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gathered_parameters_are_writable_from_one_rank(stage):
    torch.manual_seed(kit.world()[0])  # ranks differ: rank 0's model is everybody's
    model, optimizer = kit.sharded(toys.Stack(), toys.sgd, stage=stage, param_dtype=torch.bfloat16)
    expected = kit.named_values(model, master=True)
    with zero_core.gathered(model), zero_core.gathered(model.head):
        assert model.head.weight.untyped_storage().nbytes() > 0
        if kit.world()[0] == 0:
            model.head.weight.data[1] = 7.0
    expected["head.weight"][1] = 7.0
    assert model.head.weight.shape == (3, toys.WIDTH)
    assert all(unit.flat.untyped_storage().nbytes() == 0 for unit in zero_core.units(model)), "freed outside"
    found = kit.named_values(model, master=True)  # what was not written keeps all its bits
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert {value.dtype for value in found.values()} == {torch.float32}
    with pytest.raises(KeyError), zero_core.gathered(model):
        model.head.weight.data.zero_()
        raise KeyError
    assert float(model.head.weight[1].float().mean()) == 7.0
    kit.step(optimizer, toys.loss_of(model, toys.data(0, 0).bfloat16()))


@pytest.mark.promise("compiled-step")
@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_step_is_run_as_it_is(whole):
    """Traced, it would read the memory of sharded parameters."""

    dense, theirs, model, ours = kit.pair(toys.Stack, toys.adamw)

    def finish():
        ours.step()
        ours.zero_grad()

    if whole:
        told = r"leave fullgraph=True out, or call step\(\) outside of what is compiled"
        with pytest.raises(Exception, match=told):
            torch.compile(lambda: ours.step(), backend="eager", fullgraph=True)()
    ours.step = torch.compile(ours.step, backend="eager")
    finish = torch.compile(finish, backend="eager") if whole else finish
    for step in range(3):
        toys.loss_of(model, toys.data(step, 0)).backward()
        finish()
        kit.step(theirs, toys.loss_of(dense, toys.data(step, 0)))
    kit.assert_same(model, dense, rtol=1e-5, atol=1e-6)


@pytest.mark.promise("compiled-step")
def test_a_compiled_training_step():
    """Its hooks and gradients are not compiled, where version counters are others and generators are not supported."""

    def step(model, optimizer, x):
        toys.loss_of(model, x).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    dense, theirs, model, ours = kit.pair(toys.Stack, toys.adamw)
    compiled = torch.compile(step, backend="aot_eager")
    for i in range(2):
        x = toys.data(i, 0)
        torch.testing.assert_close(compiled(model, ours, x), step(dense, theirs, x))
    kit.assert_same(model, dense, rtol=1e-5, atol=1e-6)
    torch.compiler.reset()


@kit.on_ranks(2)
def test_a_mesh_has_one_dimension_or_two_and_a_stage_that_takes_it():
    def shard(shape, stage):
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", shape)
        return kit.sharded(toys.Stack, mesh=mesh, stage=stage)

    for shape, stage in (((2, 1, 1), 3), ((2, 1), 0)):
        with pytest.raises(zero_core.ZeroError, match="give one dimension, or two .* with stage 1, 2 or 3"):
            shard(shape, stage)
    for shape, stage in (((2,), 0), ((2, 1), 1), ((1, 2), 2), ((2, 1), 3)):
        model, optimizer = shard(shape, stage)
        assert optimizer.engine.ranks.size == 2
        kit.step(optimizer, toys.loss_of(model, toys.data(0, 0)))


@kit.on_ranks(2)
def test_two_ranks_reduce_once_a_step_at_stage_1_and_after_no_sync():
    for stage in (1, 3):
        model, optimizer = kit.sharded(toys.Stack, toys.sgd, stage=stage)
        sent = kit.count_sent(optimizer.engine.ranks)
        with zero_core.no_sync(model) if stage == 3 else nullcontext():
            toys.loss_of(model, toys.data(0, 0)).backward()
        assert not sent["reduce_scatter"], stage
        kit.step(optimizer, toys.loss_of(model, toys.data(0, 0)))
        assert sent["reduce_scatter"] == sum(unit.layout.shard_numel for unit in zero_core.units(model)), stage


@pytest.mark.promise("step-hooks")
@pytest.mark.parametrize("late", [False, True])
def test_step_hooks_of_one_of_two_optimizers_see_its_parameters_alone(late):
    """A hook that halves gradients, registered before shard() or after it; torch calls it with its own optimizer."""

    def halve(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)

    def made(model):
        matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) is large] for large in (True, False))
        return [torch.optim.SGD(matrices, lr=0.1), torch.optim.SGD(vectors, lr=0.2)]

    dense, model = kit.twins(toys.Stack)
    theirs, given, calls = made(dense), made(model), []
    ours = [zero_core.shard(model, given)] if late else []
    for first, second in (theirs, given):
        first.register_step_pre_hook(halve)
        second.register_step_post_hook(lambda optimizer, *_: calls.append(len(optimizer.param_groups)))
    ours = ours or [zero_core.shard(model, given)]
    for step in range(2):
        for each, optimizers in ((dense, theirs), (model, ours)):
            toys.loss_of(each, toys.data(step, 0)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert calls == [1] * 4
    kit.assert_same(model, dense)


@pytest.mark.advice("register it on the optimizer that zero_core.shard returns")
@pytest.mark.promise("step-hooks")
def test_hooks_on_state_dicts_are_called_as_in_torch():
    def hooked(optimizer, calls):
        optimizer.register_state_dict_pre_hook(lambda _: calls.append("save"))
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mine": len(state["param_groups"])})
        optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append(state.pop("mine")))
        optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))

    dense, model = kit.twins(toys.Stack)
    theirs, given, found, expected = kit.sgd(dense.parameters()), kit.sgd(model.parameters()), [], []
    hooked(theirs, expected)
    hooked(given, found)
    ours = zero_core.shard(model, given)
    theirs.load_state_dict(theirs.state_dict())
    ours.load_state_dict(ours.full_state_dict())
    assert found == expected == ["save", 1, "loaded"]
    dense, model = kit.twins(toys.Stack)
    members = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    hooked(members[1], found)
    with pytest.raises(UnsupportedOptimizerError, match="a hook on the state dict of one would not be called"):
        zero_core.shard(model, members)
    assert all(map(torch.equal, model.parameters(), dense.parameters()))


@pytest.mark.promise("schedulers")
@kit.on_ranks(1, 2)
def test_schedulers_work_on_the_returned_optimizer():
    dense, theirs, model, ours = kit.pair(toys.Stack, lambda parameters: torch.optim.AdamW(parameters, lr=0.1))
    plans = [torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=8) for o in (ours, theirs)]
    for step in range(6):
        for each, optimizer, plan in zip((model, dense), (ours, theirs), plans, strict=True):
            kit.step(optimizer, toys.loss_of(each, toys.data(step, 0)))
            plan.step()
    kit.assert_same(model, dense, rtol=1e-5, atol=1e-6)


@pytest.mark.promise("generation-gathered")
@kit.on_ranks(2)
def test_generation_of_unequal_length():
    pytest.importorskip("transformers")
    from tests import models

    model = kit.sharded(models.build("llama"), toys.sgd)[0]
    tokens, options = models.batch(0, 0), {"do_sample": False, "pad_token_id": 0}
    with zero_core.gathered(model):  # no collective inside: ranks may differ
        mine = model.generate(tokens, max_new_tokens=2 + 3 * kit.world()[0], **options)
    together = model.generate(tokens, max_new_tokens=2, **options)
    assert torch.equal(mine[:, : together.shape[1]], together)


@pytest.mark.advice("compile the blocks (for block in")
@pytest.mark.promise("compiled-blocks")
@kit.on_ranks(1, 2)
def test_blocks_compiled_one_by_one():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # what an earlier test has left in this rank

    class Compiled(toys.Stack):
        def make_block(self):
            block = toys.Block()
            block.compile(backend="aot_eager")
            return block

    toys.train(Compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.promise("hybrid-mesh")
@kit.on_ranks(4)
@pytest.mark.parametrize("stage", [1, 3])
def test_hybrid_sharding_on_a_mesh_of_two_dimensions(stage):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    toys.train(toys.Routed, stage=stage, mesh=mesh, micro=2)
    model, _ = toys.train(functools.partial(toys.Stack, 2), stage=stage, mesh=mesh)
    assert zero_core.units(model)[0].layout.shard_count == 2
    with pytest.raises(zero_core.ZeroError, match="mesh of 2 ranks in a world of 4: it must hold every rank"):
        kit.sharded(toys.Stack, mesh=mesh["shard"], stage=stage)
    mesh = torch.distributed.device_mesh.DeviceMesh("cpu", [[3, 1], [0, 2]])
    with pytest.raises(zero_core.ZeroError, match=r"^mesh \[\[3, 1\], \[0, 2\]\]: .* sort each row$"):
        kit.sharded(toys.Stack, mesh=mesh, stage=stage)
    mesh = torch.distributed.device_mesh.DeviceMesh("cpu", [[1, 3], [0, 2]])
    toys.train(functools.partial(toys.Stack, 2), stage=stage, mesh=mesh)


def listening(prefetch_bytes, updates_later=True):
    """A store that also notes which block was computed, a model in it and its optimizer, and the blocks' units."""
    store = toys.Noting()
    store.updates_later = updates_later
    model, optimizer = kit.sharded(toys.Stack(5), toys.sgd, store=store, prefetch_bytes=prefetch_bytes)
    for number, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *given, number=number: store.calls.append(("computed", number)))
    kit.step(optimizer, toys.loss_of(model, toys.data(0, 0)))
    store.calls.clear()
    return store, model, optimizer, [unit.index for unit in zero_core.units(model) if unit.name.startswith("blocks.")]


@pytest.mark.promise("ranks-wait-one-ahead")
@kit.on_ranks(2)
def test_on_several_ranks_the_store_hears_of_the_unit_after_the_one_gathered_ahead():
    store, model, _, blocks = listening(prefetch_bytes=1)
    toys.loss_of(model, toys.data(1, 0)).backward()
    for block in blocks[2:]:
        assert store.calls.index(("prefetch", block)) < store.calls.index(("parameters", block)), store.calls


@pytest.mark.promise("ranks-wait-one-ahead")
@kit.on_ranks(2)
def test_on_several_ranks_a_forward_after_a_step_waits_for_one_update_ahead():
    """Fails if it asks for all that prefetch_bytes allow: the first block would wait for every block's update. Fails
    also if a rank decides by its own store how far it gathers ahead."""
    for alike in (True, False):
        store, model, optimizer, blocks = listening(1 << 30, updates_later=alike or kit.world()[0] == 0)
        toys.loss_of(model, toys.data(1, 0)).backward()
        for number, block in enumerate(blocks[2:] if alike else ()):
            assert store.calls.index(("computed", number)) < store.calls.index(("parameters", block)), store.calls
        found = [None, None]
        torch.distributed.all_gather_object(found, store.calls)
        assert found[0] == found[1]
        store.calls.clear()
        kit.step(optimizer, toys.loss_of(model, toys.data(1, 1)))
        asked = [call for call in store.calls if call[1] in blocks]
        assert asked[: len(blocks)] == [("parameters", block) for block in blocks]  # no step since: all at once
