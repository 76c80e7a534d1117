"""Tensors over the memory of a parameter train as in plain torch, or `shard` refuses them by name.

The twin in each test is the same model in plain torch. Fails if a tensor keeps the values from before `shard`.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from zero_core.errors import ChangedParameterError, DeferredInitError, ShardedParameterError, ZeroError
from zero_core.model.aliases import overlaps_of

pytestmark = pytest.mark.promise("shared-memory")

WIDTH = 8


class Net(nn.Module):
    """Two linears, and whatever `share` does to them; `shown` is called for a tensor that the loss uses too."""

    a: Any
    b: Any
    w: Any

    def __init__(self, share: Callable[[Any], Any] = lambda net: None, shown: Callable[[Any], Tensor] | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.shown = shown
        share(self)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.b(torch.tanh(self.a(x))))
        return y if self.shown is None else y[:, :4] + F.linear(x, self.shown(self)[:4])


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(kit.trained(model), lr=0.02)


def train(model: nn.Module, optimizer: Any, steps: int = 4) -> list[Tensor]:
    found = []
    for step in range(steps):
        loss = model(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).roll(step)).square().sum()
        found.append(kit.step(optimizer, loss))
    return [*found, *(value.clone() for value in model.state_dict().values())]


def trains_as_torch(dense: nn.Module, model: nn.Module, **options: Any) -> None:
    expected = train(dense, adam(dense))
    ours = train(model, zero_core.shard(model, adam(model), **options))
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def does(*statements: str) -> Callable[[Any], None]:
    """What the statements do to a `net`."""
    names = {"nn": nn, "torch": torch, "WIDTH": WIDTH, "SimpleNamespace": SimpleNamespace}
    return lambda net: exec("\n".join(statements), {"net": net, "model": net, **names})


attribute = does("net.w = net.a.weight.detach()")
below = does("net.b.w = net.a.weight.data")
FOLLOWING: dict[Any, Callable[[Any], Tensor]] = {
    attribute: lambda net: net.w,
    below: lambda net: net.b.w,
    does("net.kept = {'all': [net.a.weight.data, (net.b.weight.data,)]}"): lambda net: (
        net.kept["all"][0] + net.kept["all"][1][0]
    ),
    does("net.state = SimpleNamespace(w=net.a.weight.data)"): lambda net: net.state.w,
    does("net.a.weight.original = net.a.weight.data"): lambda net: net.a.weight.original,
    does(
        "net.hidden = [nn.Linear(WIDTH, WIDTH)]",
        "del net.hidden[0].weight",
        "net.hidden[0].weight = net.a.weight.detach()",
    ): lambda net: net.hidden[0].weight,
    does(
        "net.circle = [net.a.weight.detach(), net.w]  # one of them a second time",
        "net.circle += [net.circle, net, net.a.weight, net.a.weight.data.clone()]",
    ): lambda net: net.circle[0] + net.circle[1],
    does(
        "net.c = nn.Linear(2, 3)",
        "net.c.weight = nn.Parameter(net.c.weight.data.t())",
        "net.turned = net.c.weight.data",
    ): (lambda net: F.pad(net.turned, (0, WIDTH - 3, 0, 2))),
}


def share_all(net: Any) -> None:
    for share in FOLLOWING:
        share(net)


def show_all(net: Any) -> Tensor:
    return torch.stack([show(net)[:4] for show in FOLLOWING.values()]).sum(0)


@pytest.mark.parametrize(("size", "stage"), [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 3)])
@kit.on_ranks()
def test_an_attribute_over_a_parameter_follows_it(size, stage: int) -> None:
    dense, model = Net(share_all, show_all), Net(share_all, show_all)
    trains_as_torch(dense, model, stage=stage, units=[nn.Linear] if stage % 2 else None)
    for show in FOLLOWING.values():
        torch.testing.assert_close(show(model) + 0, show(dense), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_an_attribute_over_a_parameter_is_written_through(dtype: torch.dtype | None) -> None:
    """Also after a shard() that failed."""
    dense, model = Net(below), Net(below)
    with pytest.raises(toys.Refused):
        zero_core.shard(model, adam(model), store=toys.Refusing())
    for net in (dense, model):
        net.b.w.mul_(2)
    zero_core.shard(model, adam(model), stage=3, param_dtype=dtype)
    for net in (dense, model):
        net.b.w.add_(1)
        net.b.w[0].zero_()
    found = model.state_dict()["a.weight"].float()
    torch.testing.assert_close(found, dense.a.weight.detach(), rtol=0, atol=0.01 if dtype else 0)
    for master in (False, True):
        with zero_core.gathered(model, master=master), torch.no_grad():
            model.a.weight[3].fill_(7.0)
            assert model.b.w[3].eq(7).all()
            model.b.w[4].fill_(8.0 + master)
            assert model.b.w.dtype is (torch.float32 if master else model.a.weight.dtype)
        assert model.a.weight[4].eq(8 + master).all() and torch.equal(model.b.w, model.a.weight)
    with pytest.raises(ChangedParameterError, match="shares the memory of a.weight.* to the attribute that holds"):
        model.b.w.data = torch.zeros(WIDTH, WIDTH, dtype=dtype)
    kept = model.b.w
    model(torch.ones(1, WIDTH, dtype=dtype)).sum().backward()
    assert kept.grad is None and model.a.weight.grad is not None
    kept.grad = None  # the parameter's own is not dropped
    assert zero_core.full_gradient(model.a.weight).abs().sum() > 0
    with pytest.raises(ZeroError, match="not a parameter of a sharded model"):
        zero_core.full_gradient(kept)
    model.b.w = torch.zeros(WIDTH, WIDTH)
    assert model.a.weight[4].ne(0).all()


tied_data = does("net.b.weight.data = net.a.weight.data")
tied_parameter = does("net.b.weight = nn.Parameter(net.a.weight)")


tied_by_loading = does("net.b.weight = net.a.weight", "net.load_state_dict(net.state_dict(), assign=True)")
tied_part = does(
    "net.b.weight = nn.Parameter(net.a.weight.data[1:].clone())", "net.a.bias = nn.Parameter(net.b.weight[0])"
)
buffered = does("net.b.register_buffer('w', net.a.weight.data)")
two_pairs = does("net.b.weight.data = net.a.weight.data", "net.b.bias = nn.Parameter(net.a.bias.data)")
first_rows = does("net.register_buffer('w', net.a.weight.detach()[:4])")
TWO = r"b.weight \(8, 8\) and a.weight .* two parameters over the same memory"
TIE, COPY = "model.b.weight = model.a.weight", "model.b.weight.data = model.b.weight.data.clone()"
# What is done, the error, and what it advises.
REFUSED = [
    (tied_data, TWO, TIE), (tied_data, TWO, COPY), (tied_parameter, TWO, TIE), (tied_by_loading, TWO, TIE),
    (does("net.b.weight = nn.Parameter(net.a.weight.data, requires_grad=False)"),
     r"b.weight \(8, 8\) and a.weight .* over the same memory",
     "del model.b.weight; model.b.weight = model.a.weight.detach()"),
    (tied_part, r"b.weight \(7, 8\) and a.bias \(8,\) .* keep one parameter, and index it in forward", ""),
    (does("net.a.weight.data, net.b.weight.data = torch.ones(WIDTH, 2 * WIDTH).chunk(2, dim=1)"),
     r"b.weight \(8, 8\) and a.weight .* give b.weight memory of its own", COPY),
    (does("net.w = net.a.weight.data[2:7]"),
     r"the Tensor 'w' \(5, 8\) of .* memory with a.weight .* forward\(\) can index it", "del model.w"),
    (does("net.w = net.a.weight.data.t()"), r"the Tensor 'w' \(8, 8\) of .* shares memory with a.weight", ""),
    (buffered, r"the buffer b.w \(8, 8\) shares memory with the parameter a.weight",
     "del model.b.w; model.b.w = model.a.weight.detach()"),
    (first_rows, r"index the attribute in forward\(\)", "del model.w; model.w = model.a.weight.detach()"),
    (does("net.b.bias = nn.Parameter(torch.zeros(1).expand(WIDTH))"), r"b.bias \(8,\) has the strides \(0,\)",
     "model.b.bias = nn.Parameter(model.b.bias.detach().clone())"),
    (does("net.w = net.a.weight[:4]"), r"the Tensor 'w' \(4, 8\) of .* shares memory with a.weight", "del model.w"),
    (does("net.w = torch.zeros(128)", "net.a.weight.data, net.b.weight.data = net.w.view(2, WIDTH, WIDTH).unbind()"),
     r"the Tensor 'w' \(128,\) of .* shares memory with a.weight", ""),
    (does("net.w = net.a.weight.data.view(torch.int32)"),
     r"the Tensor 'w' \(8, 8\) of torch.int32 shares memory .* give the tensor memory of its own", "del model.w"),
    (two_pairs, r"b.weight .* over the same memory.*\. The same is true of b.bias and a",
     f"{COPY}; model.b.bias.data = model.b.bias.data.clone()"),
]  # fmt: skip


@pytest.mark.advice("by a tensor without a gradient", "assign one parameter to both")
@pytest.mark.parametrize(("share", "match", "advice"), REFUSED)
def test_what_would_be_trained_apart_is_refused_and_trains_as_advised(share: Any, match: str, advice: str) -> None:
    """The model is as it was. Fails if the error does not give the advice, or that does not train as torch does."""
    dense, model = Net(share), Net(share)
    before = {name: (p, p.data_ptr()) for name, p in model.named_parameters()}
    with pytest.raises(ShardedParameterError, match=match) as caught:
        zero_core.shard(model, adam(model))
    assert before == {name: (p, p.data_ptr()) for name, p in model.named_parameters()}
    assert share in (two_pairs, first_rows) or advice in ("", "del model.w") or f"`{advice}`" in str(caught.value)
    if advice:
        for net in (dense, model):
            does(advice)(net)
            net.shown = lambda net: net.w[:4] if share is first_rows else net.b.weight
        trains_as_torch(dense, model)


def test_parameters_that_are_separate_slices_of_one_memory_train_as_in_torch() -> None:
    def share(net: Any) -> None:
        memory = torch.randn(2, WIDTH, 2 * WIDTH, generator=torch.Generator().manual_seed(1))
        net.a.weight.data, net.b.weight.data = memory[0].view(2, WIDTH, WIDTH)
        net.a.bias.data, net.b.bias.data = memory[1, 0].view(2, WIDTH)
        net.apart = memory[1, 1:].detach()

    trains_as_torch(Net(share), Net(share))
    many = nn.ParameterList(nn.Parameter(row) for row in torch.zeros(300, 3, device="meta"))
    followers, _, extents = overlaps_of(many, set(map(id, many.parameters())))
    assert not followers and len(extents) == 300


def test_a_buffer_and_a_parameter_over_a_deferred_parameter_are_refused() -> None:
    """Fails if the buffer gets memory of its own, and keeps the values from before the first step."""
    with zero_core.deferred_init(seed=0):
        model = Net(tied_parameter)
    for optimizer in (adam(model), None):
        with pytest.raises(ShardedParameterError, match="b.weight .* and a.weight .* over the same memory"):
            zero_core.shard(model, optimizer)
    with pytest.raises(DeferredInitError, match="the buffer w of a Linear shares memory with a parameter"):
        with zero_core.deferred_init(seed=0):
            Net(buffered)
    with zero_core.deferred_init(seed=0):
        Net(lambda net: net.register_buffer("w", net.a.weight.detach().clone()))


def test_an_attribute_over_a_deferred_parameter_follows_it() -> None:
    models = []
    for _ in range(2):
        with zero_core.deferred_init(seed=0):
            models.append(Net(attribute, lambda net: net.w))
    made, model = models
    zero_core.materialise(made)
    dense = Net(attribute, model.shown)
    dense.load_state_dict(made.state_dict())
    with pytest.raises(toys.Refused):
        zero_core.shard(model, adam(model), store=toys.Refusing())
    trains_as_torch(dense, model)


def test_a_model_over_the_memory_of_one_that_was_sharded_is_refused() -> None:
    first, second, third = Net(), Net(), Net()
    second.load_state_dict(first.state_dict(), assign=True)
    third.w = first.b.weight.detach()
    zero_core.shard(first, adam(first))
    with pytest.raises(ShardedParameterError, match="a.weight shares memory with a.weight of another model"):
        zero_core.shard(second.requires_grad_(False))
    with pytest.raises(ShardedParameterError, match="w shares memory with b.weight of another model"):
        zero_core.shard(third, adam(third))
    for parameter in second.parameters():
        parameter.data = parameter.data.clone()
    zero_core.shard(second)
    both = nn.ModuleList([Net(), Net()])
    both[1].a.weight = both[0].a.weight
    zero_core.shard(both, adam(both))
    untrained = [Net(), Net()]
    untrained[1].load_state_dict(untrained[0].state_dict(), assign=True)
    for model in untrained:
        zero_core.shard(model)
    assert torch.equal(*(model(torch.ones(1, WIDTH)) for model in untrained))


def frozen(share: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def changed(net: Any) -> None:
        share(net)
        net.adapter = nn.Linear(WIDTH, WIDTH)
        for part in (net.a, net.b):
            part.requires_grad_(False)

    return changed


@pytest.mark.parametrize("share", [tied_data, tied_parameter, tied_by_loading])
def test_parameters_over_one_memory_that_are_not_trained_are_one(share: Any) -> None:
    """Fails if a write into one does not show in the other."""
    dense = Net(frozen(share), lambda net: net.adapter.weight)
    models = [Net(frozen(share), lambda net: net.adapter.weight) for _ in range(2)]
    x = torch.ones(2, WIDTH)
    zero_core.shard(models[0])
    trains_as_torch(dense, models[1])
    for model in (dense, *models):
        model.b.weight.data.mul_(2)
        assert torch.equal(model.a.weight, model.b.weight)
        torch.testing.assert_close(model.a(x), dense.a(x))


def test_parameters_that_are_not_trained_and_differ_are_refused() -> None:
    """Over one memory, with one more than the other: which of the two would be the one?"""

    def hooked(net: Any) -> None:
        tied_data(net)
        net.a.weight.register_hook(lambda gradient: gradient)

    def noted(net: Any) -> None:
        tied_data(net)
        net.a.weight.note, net.b.weight.note = torch.zeros(2), torch.ones(2)

    for share in (hooked, noted, tied_part):
        model = Net(share)
        with pytest.raises(ShardedParameterError, match="two parameters over the same memory"):
            zero_core.shard(model)
    model = Net(frozen(tied_data))
    with pytest.raises(ShardedParameterError, match="two parameters over the same memory"):
        zero_core.shard(model, torch.optim.SGD(model.parameters()))  # it may have values for each of them


def test_weights_of_a_recurrent_layer_over_one_memory_are_one() -> None:
    """Its own list of them follows, or it would compute with the parameter that is no longer there."""

    def build() -> nn.LSTM:
        torch.manual_seed(0)
        made = nn.LSTM(WIDTH, WIDTH, num_layers=2).requires_grad_(False)
        made.weight_ih_l1.data = made.weight_ih_l0.data
        return made

    dense, model = build(), build()
    zero_core.shard(model)
    for each in (dense, model):
        each.weight_ih_l0.data.mul_(2)
    x = torch.ones(3, 1, WIDTH)
    torch.testing.assert_close(model(x), dense(x))


def test_addresses_of_parameters_without_memory_say_which_are_tied_and_nothing_else() -> None:
    """PEFT compares those of embedding and head when it merges. Fails if one is a number, or tied ones differ."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    zero_core.shard(net, torch.optim.SGD(net.parameters(), lr=0.1))
    first, second, third = (layer.weight.data_ptr() for layer in net)
    assert first == third and hash(first) == hash(third) and first != second and first != 0
    for use in (int, hex, lambda address: address + 4, lambda address: address < 4, lambda address: address % 4):
        with pytest.raises(ShardedParameterError, match="use `with zero_core.gathered"):
            use(first)
