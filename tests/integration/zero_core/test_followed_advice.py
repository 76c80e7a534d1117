"""What errors advise where no other test does what they say: building, checkpoints, states and stores.

Each test makes the mistake, does what its error says, and sees that it helps. Most advices are followed by the tests of
what refuses, which are marked with them.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

pytest.importorskip("zero_offload")

import zero_core
from tests.following import X, adamw, advised, backward, model, same, sgd, sharded, step, trains
from zero_core import checkpoint, full_gradient, full_state, set_full_state
from zero_core.optim.device_store import DeviceStore
from zero_core.store import ShardStore
from zero_offload import MemoryByteStore

# ---- building -------------------------------------------------------------------------------------------------------


def deferred(build=model):
    with zero_core.deferred_init(seed=3):
        return build()


def gpt2():
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2Model(transformers.GPT2Config(vocab_size=7, n_positions=4, n_embd=4, n_layer=1, n_head=1))


@pytest.mark.promise("from-pretrained-deferred")
def test_a_pretrained_model_is_built_from_its_config(tmp_path):
    saved = gpt2()
    from transformers import AutoConfig, AutoModel

    saved.save_pretrained(tmp_path)
    with advised(
        "AutoModel.from_config(AutoConfig.from_pretrained(folder))", "zero_core.load_pretrained(model, folder)"
    ):
        deferred(lambda: AutoModel.from_pretrained(tmp_path))
    net = deferred(lambda: AutoModel.from_config(AutoConfig.from_pretrained(tmp_path)))
    zero_core.load_pretrained(net, tmp_path)
    zero_core.shard(net, sgd(net))
    assert torch.equal(net.wte.weight.detach(), saved.wte.weight)


@pytest.mark.promise("from-pretrained-deferred")
def test_a_deferred_model_is_moved_cast_and_run_after_the_context():
    for use in (lambda net: net.to("cpu"), lambda net: net(X)):
        with advised("move, cast or run the model after the context; zero_core.shard(device=...)"):
            deferred(lambda use=use: use(model()))
    net = deferred().to(torch.bfloat16)
    zero_core.shard(net, sgd(net), device="cpu")
    assert net(torch.ones(1, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_loss_with_parameters_becomes_a_part_of_the_model_or_is_frozen():
    """As the losses of sentence-transformers, which its Trainer gives to the optimizer."""

    def run(way, shard):
        net, loss = model(), nn.Linear(1, 3)
        if way == "part":
            net[0].classifier = loss
        loss.requires_grad_(way != "frozen")
        optimizer = sgd(nn.ModuleList([net, loss]))
        if shard:
            optimizer = zero_core.shard(net, optimizer)
        for _ in range(2):
            loss(net(X)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in (*net[2].parameters(), *loss.parameters())]

    with advised("make its module a part of the model", "Or, if nothing trains them, freeze them before the optimizer"):
        run("", True)
    for way in ("part", "frozen"):
        torch.testing.assert_close(run(way, True), run(way, False))


def test_a_meta_tensor_is_made_inside():
    outside = torch.zeros(4, device="meta")

    def build(source):
        net = nn.Linear(4, 4)
        with torch.no_grad():
            net.bias.copy_(source())
        return net

    net = deferred(lambda: build(lambda: outside))
    with advised("a value was built from a meta tensor made outside deferred_init(); make it inside"):
        zero_core.shard(net, sgd(net))
    trains(deferred(lambda: build(lambda: torch.zeros(4, device="meta"))))


def test_bitsandbytes_weights_are_quantised_before_shard():
    bnb = pytest.importorskip("bitsandbytes")

    for kind in (bnb.nn.Linear4bit, lambda *size: bnb.nn.Linear8bitLt(*size, has_fp16_weights=False)):
        net = nn.Sequential(kind(64, 64)).requires_grad_(False)
        with advised('model.to("cpu"), or model.to(device), before zero_core.shard'):
            zero_core.shard(net)
        zero_core.shard(net.to("cpu"))
        assert net(torch.ones(1, 64)).shape == (1, 64)


def test_an_optimizer_that_memory_does_not_know_is_given_as_a_number_or_a_name():
    advice = "give its number of fp32 states, or one of: "
    with advised(advice) as raised:
        zero_core.memory.optimizer_states("mine")
    for known in (2, *str(raised.value).partition(advice)[2].split(", ")):
        assert zero_core.memory.optimizer_states(known) >= 0


@pytest.mark.advice("flatten the tokens before they are called")
def test_experts_in_groups_are_called_as_advised():
    pytest.importorskip("transformers")
    from tests.unit.zero_core import test_experts as unit
    from zero_core.moe.expert_groups import run_groups

    stock = unit.experts()
    groups, edges = unit.grouped(stock, (3, 3))
    x, index, weights = unit.batch([[0, -1]] * 6)
    with advised("flatten the tokens"):
        run_groups(groups, edges, x.unflatten(0, (2, 3)), index, weights)
    with advised("(6 of 12)", f"use the number of experts, {unit.EXPERTS}, for entries to be skipped"):
        run_groups(groups, edges, x, index, weights)
    index[index < 0] = unit.EXPERTS
    found = run_groups(groups, edges, x, index, weights)
    torch.testing.assert_close(found, stock(x, index, weights), atol=1e-5, rtol=1e-5)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_model_is_sharded_before_it_loads_or_read_by_torch(tmp_path):
    net, optimizer = sharded()
    step(net, optimizer)
    checkpoint.save(tmp_path, net, optimizer)
    net = model()
    with advised("first, and pass this model. Or use torch.distributed.checkpoint with model.state_dict()"):
        checkpoint.load(tmp_path, net)
    state = {"model": net.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    net.load_state_dict(state["model"])
    for stage in range(4):
        other, optimizer = sharded(stage=stage)
        checkpoint.load(tmp_path, other, optimizer)
        same(other, net)


def test_what_was_saved_alone_is_loaded_alone(tmp_path):
    net, optimizer = sharded()
    checkpoint.save(tmp_path, net)
    with advised("it was saved without its optimizer; load it without one"):
        checkpoint.load(tmp_path, *sharded())
    with advised("load it with scheduler=None"):
        checkpoint.load(tmp_path, net, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1))
    checkpoint.load(tmp_path, net, scheduler=None)


@pytest.mark.advice("make them numbers in its groups and save both with get_state_dict")
@pytest.mark.promise("checkpoint-other-library")
def test_options_that_are_not_read_are_saved_again_by_torch_or_left(tmp_path):
    """Fails if the moments are loaded and lr or weight decay stays the new optimizer's, in silence."""

    def made():
        net = model()
        groups = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 2e-3}]
        return net, torch.optim.AdamW(groups, lr=torch.tensor(1e-3), weight_decay=0.3, betas=(0.8, 0.9))

    def fresh():
        net = model()
        groups = [{"params": net[0].parameters()}, {"params": net[2].parameters()}]
        return net, zero_core.shard(net, torch.optim.AdamW(groups, lr=0.5))

    def save(name):
        weights, states = get_state_dict(net, ordinary)
        dcp.save({"model": weights, "optim": states}, checkpoint_id=tmp_path / name, no_dist=True)

    net, ordinary = made()
    step(net, ordinary)
    save("theirs")
    sharded_net, optimizer = fresh()
    ways_out = "into a plain model and its optimizer", "Or load the model alone, without the optimizer"
    with advised("because they are tensors", *ways_out):
        checkpoint.load(tmp_path / "theirs", sharded_net, optimizer)
    assert torch.equal(sharded_net[0].weight.detach(), model()[0].weight) and optimizer.param_groups[0]["lr"] == 0.5
    weights, unused = fresh()
    checkpoint.load(tmp_path / "theirs", weights)
    assert torch.equal(weights[0].weight.detach(), net[0].weight) and unused.param_groups[0]["lr"] == 0.5

    for group in ordinary.param_groups:
        group["lr"] = float(group["lr"])
    save("again")
    assert checkpoint.load(tmp_path / "again", sharded_net, optimizer).step == 1
    for ours, theirs in zip(optimizer.param_groups, ordinary.param_groups, strict=True):
        assert all(ours[option] == theirs[option] for option in ("lr", "weight_decay", "betas"))
    for each, own in ((sharded_net, optimizer), (net, ordinary)):
        step(each, own)
    same(sharded_net, net)


@pytest.mark.promise("pickles-folder")
def test_a_folder_of_pickles_is_saved_again_by_transformers(tmp_path):
    net = gpt2()
    torch.save(net.state_dict(), tmp_path / "pytorch_model.bin")
    with advised("Or make them with save_pretrained() of transformers"):
        zero_core.load_pretrained(net, tmp_path)
    net.save_pretrained(tmp_path)
    zero_core.load_pretrained(net, tmp_path)


# ---- optimizers and stores -------------------------------------------------------------------------------------------


def test_parameters_that_are_looked_up_become_a_group():
    class Slower(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        slow = id(p) in self.slow or group.get("slow")
                        p.data.add_(p.grad, alpha=-group["lr"] / (2 if slow else 1))

    def made(by_group):
        net = model()
        parts = [{"params": net[0].parameters(), "slow": True}, {"params": net[2].parameters()}]
        optimizer = Slower(parts if by_group else net.parameters(), lr=0.1)
        optimizer.slow = set() if by_group else {id(p) for p in net[0].parameters()}
        return net, optimizer

    net, optimizer = made(False)
    with advised("mark parameters by an option of their group, as", "which step() reads in self.param_groups"):
        zero_core.shard(net, optimizer)
    step(net, optimizer)
    grouped, optimizer = made(True)
    step(grouped, zero_core.shard(grouped, optimizer))
    same(grouped, net)


def test_a_loss_that_overflows_in_fp16_is_trained_in_bf16():
    for dtype in (torch.float16, torch.bfloat16):
        scale = zero_core.LossScale(1.0, fails_at_minimum=True) if dtype is torch.float16 else None
        net = model().to(dtype)
        optimizer = zero_core.shard(net, sgd(net), loss_scale=scale)
        optimizer.scale_loss(net(X.to(dtype)).sum() * 1e6).backward()
        told = "Lower the learning rate, look for the loss that is not finite, or train in bf16"
        with nullcontext() if scale is None else advised(told):
            optimizer.step()


def test_each_shard_gets_a_device_store_of_its_own():
    store = DeviceStore()
    sharded(store=store)
    with advised("DeviceStore.attach called twice: make a new DeviceStore for each zero_core.shard"):
        sharded(store=store)
    step(*sharded(store=DeviceStore()))


class Failing(MemoryByteStore):
    fails = True

    def read(self, *args, **kwargs):
        if self.fails:
            raise OSError("the disk is away")
        return super().read(*args, **kwargs)


def test_a_store_that_cannot_sleep_or_wake_gets_what_it_lacks():
    net, optimizer = sharded()
    step(net, optimizer)
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    with advised("Nothing is lost and the store is awake: make room, or give sleep(to=) another ByteStore"):
        zero_core.sleep(net, MemoryByteStore(capacity_bytes=16))
    failing = Failing()
    zero_core.sleep(net, failing)
    with advised("call zero_core.wake(model), or wake() of the store"):
        net(X)
    with advised("call wake() again when the cause is gone", "close() it and resume from the last checkpoint"):
        zero_core.wake(net)
    failing.fails = False
    zero_core.wake(net)
    assert all(torch.equal(value, expected[name]) for name, value in net.state_dict().items())
    zero_core.sleep(net, MemoryByteStore())
    zero_core.handle(net).store.wake()
    step(net, optimizer)


@pytest.mark.advice("give it all that zero_core.ShardStore has")
@pytest.mark.promise("store-lacks-method")
def test_a_store_is_given_all_that_is_called():
    """The rest has defaults, as a store has that lends its memory and does no more."""
    all_of_it = [name for name in vars(ShardStore) if not name.startswith("_")]
    needed = all_of_it[: all_of_it.index("swaps_in")]

    class Plain:
        def __init__(self, *names):
            self.store, self.names = DeviceStore(), names

        def __getattr__(self, name):
            if name in ("store", "names") or name not in self.names:
                raise AttributeError(name)
            return getattr(self.store, name)

    with advised("a Plain, has no update, wait: give it all that zero_core.ShardStore has"):
        sharded(store=Plain(*(name for name in needed if name not in ("update", "wait"))))
    net, optimizer = sharded(store=Plain(*needed))
    step(net, optimizer)
    plain = model()
    step(plain, adamw(plain))
    same(net, plain)
    backward(net)
    with advised("a Plain, has no read_gradient: give it all that zero_core.ShardStore has"):
        full_gradient(net[0].weight)
    net, _ = sharded(store=Plain(*needed, "read_gradient"))
    backward(net)
    plain = model()
    backward(plain)
    assert torch.equal(full_gradient(net[0].weight), plain[0].weight.grad)


def test_a_gradient_is_read_from_a_store_after_a_backward():
    net, optimizer = sharded()
    step(net, optimizer)
    store = zero_core.handle(net).store
    with advised("run a backward before reading or writing"):
        store.read_gradient(0, 0, 4)
    backward(net)
    full_gradient(net[0].weight)
    assert store.read_gradient(0, 0, 4).shape == (4,)


def test_a_state_is_written_with_the_options_that_keep_it():
    def made(momentum):
        net = model()
        groups = [{"params": net[0].parameters(), "momentum": 0.9}, {"params": net[2].parameters()}]
        return net, zero_core.shard(net, torch.optim.SGD(groups, lr=0.1, momentum=momentum), store=DeviceStore())

    net, optimizer = made(0.0)
    step(net, optimizer)
    values = torch.ones(1, 4)
    with advised("give the group the options it was saved with"):
        set_full_state(net[2].weight, "momentum_buffer", values)
    net, optimizer = made(0.9)
    step(net, optimizer)
    set_full_state(net[2].weight, "momentum_buffer", values)
    assert torch.equal(full_state(net[2].weight, "momentum_buffer"), values)
