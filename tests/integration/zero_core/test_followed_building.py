"""What errors of building and sharding a model advise: each test does what one says, and that works."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_core
from tests import kit
from tests.following import adamw, advised, model, same, sgd, step, trains
from tests.integration.zero_core import test_parts as parts
from zero_core import checkpoint
from zero_core.saved_bytes import HostMemory


def deferred(build=model):
    with zero_core.deferred_init(seed=3):
        return build()


# ---- deferred_init --------------------------------------------------------------------------------------------------


def test_a_deferred_model_is_written_inside_the_context_or_after_shard():
    net = deferred()
    with torch.no_grad():
        net[0].weight.mul_(2)
    with advised("write them inside the context, or after shard() inside zero_core.gathered"):
        zero_core.shard(net, sgd(net))
    with advised("write them inside the context"):
        zero_core.TiledLinear.from_linear(net[0], out_splits=2)
    with zero_core.deferred_init(seed=3):
        inside = model()
        with torch.no_grad():
            inside[0].weight.mul_(2)
    assert zero_core.TiledLinear.from_linear(inside[0], out_splits=2) is not None
    inside, after = deferred(lambda: _doubled(model())), deferred()
    for net in (inside, after):
        zero_core.shard(net, sgd(net))
    with zero_core.gathered(after), torch.no_grad():
        after[0].weight.mul_(2)
    assert torch.equal(inside[0].weight.detach(), after[0].weight.detach())


def _doubled(net):
    with torch.no_grad():
        net[0].weight.mul_(2)
    return net


@pytest.mark.parametrize("way", ["attribute", "clone"])
def test_an_attribute_follows_a_deferred_parameter_and_a_clone_does_not(way):
    class Shows(nn.Linear):
        def __init__(self, way):
            super().__init__(4, 4)
            if way == "buffer":
                self.register_buffer("shown", self.weight.detach())
            elif way == "clone":
                self.register_buffer("shown", self.weight.detach().clone())
            else:
                self.shown = self.weight.detach()

    with advised("assign a plain attribute, `self.shown = parameter.detach()`", "memory of its own with clone()"):
        deferred(lambda: Shows("buffer"))
    net = deferred(lambda: Shows(way))
    trains(net)
    assert torch.equal(net.shown, net.weight.detach()) == (way == "attribute")


def test_a_pretrained_model_is_built_from_its_config(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=7, n_positions=4, n_embd=4, n_layer=1, n_head=1)
    saved = transformers.GPT2Model(config)
    saved.save_pretrained(tmp_path)
    with advised(
        "AutoModel.from_config(AutoConfig.from_pretrained(folder))", "zero_core.load_pretrained(model, folder)"
    ):
        deferred(lambda: transformers.AutoModel.from_pretrained(tmp_path))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    net = deferred(lambda: transformers.AutoModel.from_config(config))
    zero_core.load_pretrained(net, tmp_path)
    zero_core.shard(net, sgd(net))
    assert torch.equal(net.wte.weight.detach(), saved.wte.weight)


def test_a_deferred_model_is_moved_cast_and_run_after_the_context():
    with advised("move, cast or run the model after the context; zero_core.shard(device=...)"):
        deferred(lambda: model().to("cpu"))
    net = deferred().to(torch.bfloat16)
    zero_core.shard(net, sgd(net), device="cpu")
    assert net(torch.ones(1, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_model_on_meta_is_built_inside_the_context(tmp_path):
    def build():
        return nn.Linear(4, 1, device="meta")

    with advised("build the model inside `with zero_core.deferred_init():`"):
        zero_core.shard(build())
    from safetensors.torch import save_file

    save_file(nn.Linear(4, 1).state_dict(), tmp_path / "model.safetensors")
    with advised("build the model in zero_core.deferred_init()"):
        zero_core.load_pretrained(build(), tmp_path)
    trains(deferred(build))
    net = deferred(build)
    zero_core.load_pretrained(net, tmp_path)
    trains(net)


@pytest.mark.parametrize("fact", ["nothing initialises table", "table is only partly initialised"])
def test_a_table_is_initialised_where_it_is_built_or_by_load_pretrained(fact, tmp_path):
    class Table(nn.Module):
        def __init__(self, rows):
            super().__init__()
            self.table = nn.Parameter(torch.empty(4, 4))
            for row in range(rows):
                nn.init.ones_(self.table[row])

        def forward(self, x):
            return x @ self.table

    rows = 0 if fact.startswith("nothing") else 1
    from safetensors.torch import save_file

    save_file({"table": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    net = deferred(lambda: Table(rows))
    with advised(fact, "initialise it where the module is built, or give it values with load_pretrained"):
        zero_core.shard(net, sgd(net))
    zero_core.load_pretrained(net, tmp_path)
    for filled in (net, deferred(lambda: Table(4))):
        trains(filled)


def test_a_tensor_that_a_deferred_value_was_read_from_is_a_copy():
    values = torch.ones(4, 4)

    def build(source):
        net = nn.Linear(4, 4)
        net.load_state_dict({"weight": source, "bias": torch.zeros(4)})
        return net

    changed, copied, outside = deferred(lambda: build(values)), deferred(lambda: build(values.clone())), build(values)
    values.zero_()
    with advised("give it a copy, or build this part of the model outside"):
        zero_core.shard(changed, sgd(changed))
    for net in (copied, outside):
        zero_core.shard(net, sgd(net))
        assert torch.equal(net.weight.detach(), torch.ones(4, 4))


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


def _seeds():
    rank = dist.get_rank()
    torch.manual_seed(rank)
    with zero_core.deferred_init():
        net = nn.Linear(4, 1)
    with advised("call torch.manual_seed with one seed on every rank before, or deferred_init(seed=...)"):
        zero_core.shard(net, sgd(net))
    torch.manual_seed(7)
    with zero_core.deferred_init():
        seeded = nn.Linear(4, 1)
    torch.manual_seed(rank)
    for net in (seeded, deferred(lambda: nn.Linear(4, 1))):
        trains(net)


def _meshes():
    from torch.distributed.device_mesh import init_device_mesh

    net = model()
    advice = "give one dimension, or two (replicate, shard) with stage 1, 2 or 3"
    for shape, stage in (((2, 1, 1), 3), ((2, 1), 0)):
        with advised(advice):
            zero_core.shard(net, sgd(net), mesh=init_device_mesh("cpu", shape), stage=stage)
    for shape, stage in (((2,), 0), ((2, 1), 1), ((1, 2), 2), ((2, 1), 3)):
        trains(model(), mesh=init_device_mesh("cpu", shape), stage=stage)


def _steps_differ(folder):
    def made():
        net = model()
        return net, adamw(net)

    net, optimizer = made()
    if dist.get_rank():
        step(net, optimizer)
    with advised("give shard() an optimizer that has not stepped, or shard first and load with zero_core.checkpoint"):
        zero_core.shard(net, optimizer)
    net, optimizer = made()
    optimizer = trains(net, optimizer)
    checkpoint.save(folder, net, optimizer)
    net, optimizer = made()
    optimizer = zero_core.shard(net, optimizer)
    checkpoint.load(folder, net, optimizer)
    assert optimizer.step_count == 1
    step(net, optimizer)


def test_ranks_that_differ_do_what_is_advised(ranks, tmp_path):
    for function in (_seeds, _meshes):
        ranks(2).run(function)
    ranks(2).run(_steps_differ, tmp_path)


# ---- memory and parts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["delete", "clone"])
def test_what_cannot_follow_a_parameter_is_deleted_or_cloned(way):
    net = model()
    net.bits = net[0].weight.detach().view(torch.int32)
    with advised("delete it, or give it memory of its own with clone(), before zero_core.shard"):
        zero_core.shard(net, sgd(net))
    if way == "delete":
        del net.bits
    else:
        net.bits = net.bits.clone()
    trains(net)


def test_memory_of_another_sharded_model_is_cloned_or_shared_by_one_model():
    first, second = model(), model()
    second[0].weight.data = first[0].weight.data
    zero_core.shard(first, sgd(first))
    with advised("or shard one module that has both models, with the same parameter in both places") as raised:
        zero_core.shard(second, sgd(second))
    exec(re.findall(r"`([^`]+)`", str(raised.value))[0], {"model": second})
    trains(second)
    first, second = model(), model()
    second[0].weight = first[0].weight
    both = nn.Sequential(first, nn.Linear(1, 4), second)
    trains(both)
    assert torch.equal(first[0].weight.detach(), second[0].weight.detach())


def test_bitsandbytes_weights_are_quantised_before_shard():
    bnb = pytest.importorskip("bitsandbytes")

    for kind in (bnb.nn.Linear4bit, lambda *size: bnb.nn.Linear8bitLt(*size, has_fp16_weights=False)):
        net = nn.Sequential(kind(64, 64)).requires_grad_(False)
        with advised('call model.to("cpu"), or .to(device), before zero_core.shard'):
            zero_core.shard(net)
        zero_core.shard(net.to("cpu"))
        assert net(torch.ones(1, 64)).shape == (1, 64)


def _refused_part(change, advice):
    net = parts.build("wrapper")
    base = net[1][0].base
    change(base)
    with advised(advice):
        zero_core.shard(net, sgd(net))
    return net, base


def test_parts_that_cannot_be_cut_are_frozen_converted_or_made_anew():
    def plain(base):
        base.weight = nn.Parameter(torch.ones(parts.WIDTH, parts.WIDTH), requires_grad=False)

    def asks(base):
        base.weight.requires_grad_(True)

    def nested(base):
        base.weight.codes = parts.Scaled.of(torch.ones(parts.WIDTH, parts.WIDTH)).data

    def repacked(base):
        base.weight.quant_state = SimpleNamespace(packing_format_for_cpu=True)

    net, base = _refused_part(asks, "call requires_grad_(False) on it, or convert it to a plain parameter")
    base.weight.requires_grad_(False)
    converted = []
    for change in (asks, nested):
        converted.append(
            _refused_part(
                change,
                "convert it to a plain parameter, before"
                if change is asks
                else "convert it to a plain parameter before zero_core.shard",
            )
        )
        plain(converted[-1][1])
    _refused_part(repacked, "shard a model that was not evaluated since it was quantised")
    for each in (net, *(other for other, _ in converted), parts.build("wrapper")):
        parts.run(each, zero_core.shard(each, sgd(each)))


def test_a_class_of_parameters_that_cannot_be_cut_is_converted():
    class Opaque(torch.Tensor):
        """A wrapper that does not say what is in it."""

        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape)

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return cls(args[0])

    net = model()
    net.table = nn.Parameter(Opaque(torch.ones(2)), requires_grad=False)
    with advised("convert them to plain parameters before zero_core.shard"):
        zero_core.shard(net, sgd(net))
    del net.table
    net.table = nn.Parameter(torch.ones(2), requires_grad=False)
    trains(net)


class Half(nn.Module):
    """Two layers, of which the second one has three rows of the first one's weight."""

    def __init__(self, indexed):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.bias, self.rows = nn.Linear(4, 4), nn.Parameter(torch.ones(3)), None
        if not indexed:
            self.rows = nn.Parameter(self.a.weight.data[1:])

    def forward(self, x):
        return nn.functional.linear(self.a(x), self.a.weight[1:] if self.rows is None else self.rows, self.bias)


def test_one_of_two_parameters_is_kept_and_indexed_in_the_forward():
    net, plain, ours = Half(False), Half(True), Half(True)
    with advised("To train one tied weight, keep one, and index it in forward(), before you build the optimizer"):
        zero_core.shard(net, sgd(net))
    optimizers = sgd(plain), zero_core.shard(ours, sgd(ours))
    for each, optimizer in zip((plain, ours), optimizers, strict=True):
        step(each, optimizer)
    same(ours, plain)


# ---- shard -----------------------------------------------------------------------------------------------------------


def test_the_module_inside_a_wrapper_is_given():
    net = nn.DataParallel(model())
    with advised("give zero_core.shard the module inside (.module), and leave the wrapper out"):
        zero_core.shard(net, sgd(net))
    trains(net.module)


def test_an_optimizer_is_built_for_each_model_of_its_parameters():
    first, second = model(), model()
    optimizer = zero_core.shard(first, sgd(first))
    with advised("this optimizer is sharded already: build a new one for another model"):
        zero_core.shard(second, optimizer)
    with advised("build it from model.parameters() of the model given to shard"):
        zero_core.shard(second, sgd(model()))
    trains(second, sgd(second))


def test_a_sharded_model_is_sharded_again_whole_and_by_itself():
    first, second = model(), model()
    optimizer = zero_core.shard(first, sgd(first))
    trains(second)
    part = next(first.children())
    with advised("call zero_core.shard on the whole"):
        zero_core.shard(part, sgd(part))
    first(torch.ones(2, 4)).sum().backward()
    with advised("would lose: call optimizer.step() or zero_grad() before"):
        zero_core.shard(first, sgd(first))
    optimizer.zero_grad()
    zero_core.sleep(first, HostMemory())
    with advised("call zero_core.wake(model) first"):
        zero_core.shard(first, sgd(first))
    zero_core.wake(first)
    with advised("use the optimizer that the last shard() returned"):
        trains_again = zero_core.shard(first, sgd(first))
        optimizer.step()
    kit.step(trains_again, first(torch.ones(2, 4)).sum())
    both = nn.Sequential(first, nn.Linear(1, 4), second)
    with advised("call zero_core.unshard on each of them first"):
        zero_core.shard(both, sgd(both))
    for each in (first, second):
        zero_core.unshard(each)
    trains(both)


def test_the_modules_of_a_script_are_sharded_and_compiled():
    part = nn.Linear(4, 4)
    script = nn.Sequential(torch.jit.script(part), nn.Linear(4, 1))
    with advised("shard the modules that it was made of, and compile blocks with torch.compile"):
        zero_core.shard(script, sgd(script))
    net = nn.Sequential(part, nn.Linear(4, 1))
    net[0].compile(backend="eager")
    trains(net)
    torch.compiler.reset()


def test_integers_and_quantised_values_are_left_out():
    net = model()
    net.table = nn.Parameter(torch.ones(4, dtype=torch.int64), requires_grad=False)
    odd = torch.ones(2, dtype=torch.complex64)
    net.phase = nn.Parameter(odd)
    with advised("leave them to an optimizer of their own"):
        zero_core.shard(net, sgd(net))
    own = torch.optim.SGD([net.phase], lr=0.1)
    rest = torch.optim.SGD([p for n, p in net.named_parameters() if n != "phase" and p.requires_grad], lr=0.1)
    optimizer = zero_core.shard(net, rest)
    step(net, optimizer)
    own.zero_grad()

    values = torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8)
    for way in (values.dequantize(), None):
        net = model()
        net.table = nn.Parameter(values, requires_grad=False)
        with advised("dequantise it, or keep it as a buffer, before zero_core.shard"):
            zero_core.shard(net, sgd(net))
        if way is not None:
            net.table = nn.Parameter(way, requires_grad=False)
        else:
            del net.table
            net.register_buffer("table", values)
        trains(net)


def test_processes_that_never_met_are_met_or_alone(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    net = model()
    with advised("Call torch.distributed.init_process_group() before", "remove WORLD_SIZE from the environment"):
        zero_core.shard(net, sgd(net))
    monkeypatch.delenv("WORLD_SIZE")
    trains(net)


def test_updates_in_backward_go_with_the_stages_that_are_named():
    net = model()
    with advised("use stage 0, 2 or 3"):
        zero_core.shard(net, sgd(net), stage=1, update_in_backward=True)
    for stage in (0, 2, 3):
        trains(model(), stage=stage, update_in_backward=True)


def test_a_device_that_is_not_there_is_left_out():
    missing = next(kind for kind in ("xpu", "cuda") if not torch.get_device_module(kind).is_available())
    net = model()
    with advised("leave device out to compute on the CPU"):
        zero_core.shard(net, sgd(net), device=missing)
    trains(net)


def test_an_optimizer_that_memory_does_not_know_is_given_as_a_number_or_a_name():
    advice = "give its number of fp32 states, or one of: "
    with advised(advice) as raised:
        zero_core.memory.optimizer_states("mine")
    for known in (2, *str(raised.value).partition(advice)[2].split(", ")):
        assert zero_core.memory.optimizer_states(known) >= 0


def test_experts_in_groups_are_called_as_advised():
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    from zero_core.building.experts import find_stacks, make_groups, run_groups

    config = transformers.Qwen3MoeConfig(hidden_size=16, moe_intermediate_size=8, num_experts=4)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    stock = Qwen3MoeExperts(config)
    for parameter in stock.parameters():
        nn.init.normal_(parameter)
    edges = [(0, 2), (2, 4)]
    groups = make_groups(find_stacks(stock)[""], edges)
    x, index, weights = torch.randn(2, 3, 16), torch.tensor([[0, -1]] * 6), torch.ones(6, 2)
    with pytest.raises(zero_core.ZeroError, match="flatten the tokens"):
        run_groups(groups, edges, x, index, weights)
    x = x.flatten(0, 1)
    with pytest.raises(
        zero_core.ZeroError, match="6 of 12 entries .* give slots that are not used an index of 4 or more"
    ):
        run_groups(groups, edges, x, index, weights)
    index[index < 0] = 4
    found = run_groups(groups, edges, x, index, weights)
    torch.testing.assert_close(found, stock(x, index, weights), atol=1e-5, rtol=1e-5)
