"""`offload_activations` under `zero_core.shard`: the same losses and parameters, bit for bit, whatever the policy.

Fails if a recomputation sees other values, other random numbers, or parameters that are not there.
"""

import weakref
from contextlib import closing, nullcontext

import pytest
import torch
from torch import nn

import zero_core
from examples.own_tier import Shelf
from tests import kit, models
from tests.integration.zero_offload.training import tiered
from tests.unit.zero_offload.simulated import simulated_device, streams
from zero_offload import ActivationError, TieredStore, TorchStep, offload_activations
from zero_offload.activations import recompute as module_under_test

pytestmark = pytest.mark.promise("activation-policies")

WIDTH, LAYERS = 32, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.calls = 0

    def forward(self, x, *, scale, mask=None):
        self.calls += 1
        y = self.outer(torch.relu(self.inner(self.norm(x)))) * scale["value"]
        return x + self.dropout(y if mask is None else y * mask)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, tokens):
        x = self.embedding(tokens)
        mask = torch.ones(WIDTH, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, scale={"value": torch.tensor(0.5)}, mask=mask)
        return self.head(x)


@pytest.fixture(autouse=True)
def every_tensor_is_worthwhile(monkeypatch):
    monkeypatch.setattr(module_under_test, "SMALL_BYTES", 0)


def build(placement="host", dtype=torch.bfloat16, tiers=None):
    torch.manual_seed(0)
    model = Model()
    store = tiered(placement, step=TorchStep(), tile_numel=1 << 20, streams=streams(), tiers=tiers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, store, zero_core.shard(model, optimizer, store=store, param_dtype=dtype, max_grad_norm=1.0)


def loss_of(model, step=0):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 50, (3, 9), generator=generator)
    return nn.functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def train(policy, placement="host", steps=3, accumulate=1, tiers=None, **options):
    model, store, optimizer = build(placement, tiers=tiers)
    losses = []
    with offload_activations(model, store, policy, **options) as offloaded:
        torch.manual_seed(1)
        for step in range(steps):
            for micro_batch in range(accumulate):
                loss = loss_of(model, step * accumulate + micro_batch)
                loss.backward()
                losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
        stats = offloaded.stats()
    parameters = kit.values(model)
    optimizer.close()
    return losses, parameters, stats


def same(left, right):
    return left[0] == right[0] and all(torch.equal(a, b) for a, b in zip(left[1], right[1], strict=True))


@pytest.fixture(scope="module")
def kept():
    return train("keep")


@pytest.mark.advice("call zero_offload.offload_activations(model, policy=")
@pytest.mark.promise("device-activations-host", "device-activations-nvme")
@pytest.mark.parametrize("policy", ["recompute", "host", "nvme"])
@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("discrete", [False, True])
def test_the_same_bits_under_every_policy(kept, policy, placement, discrete):
    """With a discrete device, simulated, what is set aside and what comes back is copied as late as it may be."""
    with simulated_device() if discrete else nullcontext():
        found = train(policy, placement)
    assert same(found, kept)
    assert found[2]["recomputed"] == 3 * LAYERS
    assert (found[2]["spilled_bytes"] > 0) == (policy != "recompute")
    assert not discrete or (found[2]["host_bytes"] > 0) == (policy != "recompute")


def test_units_may_differ(kept):
    mixed = {"layers.0": "nvme", "layers.1": "host", "layers.2": "recompute", "layers.*": "keep"}
    found = train(mixed)
    assert same(found, kept)
    assert found[2]["recomputed"] == 3 * 3


@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize("policy", ["shelf", ["keep", "shelf", "nvme", "recompute", "shelf", "keep"]])
def test_activations_lie_on_a_tier_that_was_added(kept, tmp_path, policy, discrete):
    """The tier of docs/extending.md. Fails if a policy knows only the tiers that ship, or if nothing is kept there."""
    with simulated_device() if discrete else nullcontext(), closing(Shelf(tmp_path)) as shelf:
        found = train(policy, tiers={"shelf": shelf})
    assert same(found, kept)
    assert found[2]["shelf_bytes"] > 0
    assert (found[2]["nvme_bytes"] > 0) == ("nvme" in policy)


def test_extents_do_not_grow_with_steps_and_slots_not_with_depth():
    few, many = (train("nvme", steps=steps, piece_bytes=4096)[2] for steps in (2, 6))
    assert few["nvme_bytes"] == many["nvme_bytes"] > 0
    assert few["host_bytes"] == many["host_bytes"]


def test_what_forward_keeps_is_not_held_beside_its_copy():
    model, store, optimizer = build()
    with offload_activations(model, store, "nvme"):
        alive = []

        def note(block, args):
            alive.append(args[0])

        handles = [layer.register_forward_pre_hook(note) for layer in model.layers]
        loss = loss_of(model)
        inputs = [weakref.ref(x) for x in alive]
        alive.clear()
        assert all(ref() is None for ref in inputs)
        loss.backward()
        for handle in handles:
            handle.remove()
    optimizer.close()


def test_two_forwards_before_one_backward_and_a_forward_never_followed_by_one(kept):
    def run(policy):
        model, store, optimizer = build()
        with offload_activations(model, store, policy, slots=2, piece_bytes=4096):
            torch.manual_seed(1)
            loss_of(model, 7)  # its graph dies unused
            (loss_of(model, 0) + loss_of(model, 1)).backward()
            optimizer.step()
            with torch.no_grad():
                value = float(loss_of(model, 2))
        optimizer.close()
        return value

    assert run("nvme") == run("keep") == run("recompute")


def test_enclosing_hooks_keep_their_say():
    model, store, optimizer = build()
    packed = []
    with offload_activations(model, store, "host") as offloaded:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x.shape) or x, lambda x: x):
            loss = loss_of(model)
        loss.backward()
        assert offloaded.stats()["delegated"] == LAYERS
        assert offloaded.stats()["recomputed"] == 0
    assert packed
    optimizer.close()


@pytest.mark.promise("compiled-blocks")
@pytest.mark.parametrize(
    ("what", "rows", "runs"),  # of a block in two steps; by rows, there is a comparison first
    [("block", None, 4), ("block", 1, 11), ("sharded block", None, 4), ("forward", None, 4)],
)
def test_blocks_are_compiled_in_both_runs_and_what_is_around_them_is_not(what, rows, runs):
    graphs, ran = [], []

    def recording(graph, inputs):
        graphs.append(graph.code)
        return lambda *given: ran.append(graph) or graph(*given)

    def train(backend):
        model, losses = models.build("llama", use_cache=False), []
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = zero_core.shard(model, adamw) if what == "sharded block" else None
        for block in model.model.layers:
            if what == "forward":
                block.forward = torch.compile(block.forward, backend=backend)
            else:
                block.compile(backend=backend)
        optimizer = optimizer or zero_core.shard(model, adamw)
        with offload_activations(model, rows=rows), closing(optimizer):
            for step in range(2):
                losses.append(models.loss(model, models.batch(step, 0)))
                kit.step(optimizer, losses[-1])
        return [loss.item() for loss in losses]

    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    assert train(recording) == train(lambda graph, inputs: graph)
    assert len(ran) == runs * 3 and all("scaled_dot_product" in graph for graph in graphs)
    assert not torch._dynamo.utils.counters["graph_break"]
    torch.compiler.reset()


def test_blocks_that_share_a_parameter_follow_together():
    def run(policy):
        torch.manual_seed(0)
        model = Model()
        model.layers[2].inner.weight = model.layers[0].inner.weight
        store = TieredStore(step=TorchStep(), tile_numel=1 << 20)
        optimizer = zero_core.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), store=store)
        with offload_activations(model, store, policy) as offloaded:
            torch.manual_seed(1)
            for step in range(2):
                kit.step(optimizer, loss_of(model, step))
            last = float(loss_of(model, 9).detach())
            counted = offloaded.stats()["recomputed"]
        optimizer.close()
        return last, counted

    kept, found = run("keep"), run("recompute")
    assert found == (kept[0], 2 * LAYERS)


@pytest.mark.advice(". Name one of: {}")
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("disk", "'disk' is not an activation policy; policies are keep, recompute, host, nvme"),
        ({"layer.*": "host"}, "no unit matches 'layer.\\*' of policy=. Name one of: embedding, layers.0"),
        (["keep"], "policy= lists 1 policies for 6.*: give one per unit, or one for all"),
        ({"layers.*": "away"}, "'away' is not an activation policy"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(policy, message):
    model, store, optimizer = build()
    with pytest.raises(ActivationError, match=message):
        offload_activations(model, store, policy)
    optimizer.close()


def test_a_forward_that_the_class_is_given_later_is_the_one_that_runs(monkeypatch):
    model, store, optimizer = build()
    with offload_activations(model, store, "recompute"):
        monkeypatch.setattr(Block, "forward", lambda self, x, *, scale, mask=None: 2 * x)
        kit.step(optimizer, (model(torch.arange(4)) ** 2).sum())
        x = model.embedding(torch.arange(4))
        assert torch.equal(model.layers[0](x, scale={}), 2 * x)
    optimizer.close()


def test_nvme_without_one_self_checkpointing_and_caches_are_refused():
    model, store, optimizer = build()
    with pytest.raises(ActivationError, match=r"is None.*: pass the model's TieredStore\(nvme=...\) as"):
        offload_activations(model, None, "nvme")
    offload_activations(model, store, "nvme").close()
    model.layers[1].gradient_checkpointing = True
    with pytest.raises(ActivationError, match="layers.1 checkpoints its .*call model.gradient_checkpointing_disable"):
        offload_activations(model, store, "recompute")
    model.layers[1].gradient_checkpointing = False
    with offload_activations(model, store, "recompute"), pytest.raises(ActivationError, match="use_cache=False"):
        model.layers[0](torch.ones(1, WIDTH), scale={"value": 1}, past_key_values=object())
    optimizer.close()


def test_an_input_is_changed_out_of_place():
    def run(change):
        model, store, optimizer = build()
        with offload_activations(model, store, "recompute"):
            x = model.embedding(torch.arange(4))
            y = model.layers[0](x, scale={"value": 1})
            with torch.no_grad():
                change(x)
            y.sum().backward()
        optimizer.close()

    with pytest.raises(
        RuntimeError,
        match="input of module layers.0 was .*: change a copy of the input. Or give the unit with layers.0 the policy",
    ):
        run(lambda x: x.add_(1))
    run(lambda x: x.add(1))
