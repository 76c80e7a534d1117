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

pytestmark = pytest.mark.promise("shared-memory")

WIDTH = 8


class Net(nn.Module):
    """Two linears, and whatever `share` does to them; `shown` is called for a tensor that the loss uses too."""

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
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)


def train(model: nn.Module, optimizer: Any, steps: int = 4) -> list[Tensor]:
    found = []
    for step in range(steps):
        loss = model(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).roll(step)).square().sum()
        found.append(kit.step(optimizer, loss))
    return [*found, *(value.clone() for value in model.state_dict().values())]


NAMES = {"nn": nn, "torch": torch, "WIDTH": WIDTH, "SimpleNamespace": SimpleNamespace}


def does(*statements: str) -> Callable[[Any], None]:
    """What the statements do to a `net`."""

    def share(net: Any) -> None:
        for statement in statements:
            exec(statement, {"net": net, **NAMES})

    return share


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
    expected = train(dense, adam(dense))
    optimizer = zero_core.shard(model, adam(model), stage=stage, units=[nn.Linear] if stage % 2 else None)
    torch.testing.assert_close(train(model, optimizer), expected, rtol=1e-5, atol=1e-6)
    for show in FOLLOWING.values():
        torch.testing.assert_close(show(model) + 0, show(dense), rtol=1e-5, atol=1e-6)


def test_an_attribute_over_a_parameter_is_written_through() -> None:
    dense, model = Net(below), Net(below)
    zero_core.shard(model, adam(model), stage=3)
    for net in (dense, model):
        net.b.w.add_(1)
        net.b.w[0].zero_()
    assert torch.equal(model.state_dict()["a.weight"], dense.a.weight)
    for master in (False, True):
        with zero_core.gathered(model, master=master), torch.no_grad():
            model.a.weight[3].fill_(7.0)
            assert model.b.w[3].eq(7).all()  # type: ignore[index]
            model.b.w[4].fill_(8.0 + master)  # type: ignore[index]
        assert model.a.weight[4].eq(8 + master).all() and torch.equal(model.b.w, model.a.weight)  # type: ignore[arg-type]
    with pytest.raises(ChangedParameterError, match="shares the memory of a.weight.* to the attribute that holds"):
        model.b.w.data = torch.zeros(WIDTH, WIDTH)
    model.b.w = torch.zeros(WIDTH, WIDTH)
    assert model.a.weight[4].ne(0).all()


def test_an_attribute_over_a_parameter_has_no_gradient() -> None:
    """Fails if it shows or drops the parameter's own."""
    model = Net(attribute)
    zero_core.shard(model, adam(model))
    model(torch.ones(1, WIDTH)).sum().backward()
    kept: Any = model.w
    assert kept.grad is None and model.a.weight.grad is not None
    kept.grad = None
    assert zero_core.full_gradient(model.a.weight).abs().sum() > 0  # type: ignore[arg-type]
    with pytest.raises(ZeroError, match="not a parameter of a sharded model"):
        zero_core.full_gradient(kept)


def test_an_attribute_follows_the_bf16_weights_and_their_masters() -> None:
    model = Net(below)
    zero_core.shard(model, adam(model), param_dtype=torch.bfloat16)
    assert torch.equal(model.b.w, model.a.weight)  # type: ignore[arg-type]
    with zero_core.gathered(model, master=True):
        assert model.b.w.dtype == torch.float32 and torch.equal(model.b.w, model.a.weight)  # type: ignore[arg-type]


def test_a_model_that_could_not_be_sharded_still_shares() -> None:
    model = Net(below)
    with pytest.raises(toys.Refused):
        zero_core.shard(model, adam(model), store=toys.Refusing())
    model.b.w.zero_()  # type: ignore[operator]
    assert model.a.weight.eq(0).all()
    zero_core.shard(model, adam(model))
    assert model.b.w.eq(0).all()  # type: ignore[union-attr]


tied_data = does("net.b.weight.data = net.a.weight.data")
tied_parameter = does("net.b.weight = nn.Parameter(net.a.weight)")
tied_frozen = does("net.b.weight = nn.Parameter(net.a.weight.data, requires_grad=False)")
tied_by_loading = does("net.b.weight = net.a.weight", "net.load_state_dict(net.state_dict(), assign=True)")
tied_part = does(
    "net.b.weight = nn.Parameter(net.a.weight.data[1:].clone())", "net.a.bias = nn.Parameter(net.b.weight[0])"
)
buffered = does("net.b.register_buffer('w', net.a.weight.data)")
expanded = does("net.b.bias = nn.Parameter(torch.zeros(1).expand(WIDTH))")
columns = does("net.a.weight.data, net.b.weight.data = torch.randn(WIDTH, 2 * WIDTH).chunk(2, dim=1)")
part = does("net.w = net.a.weight.data[2:7]")
turned = does("net.w = net.a.weight.data.t()")
computed = does("net.w = net.a.weight[:4]")
as_integers = does("net.w = net.a.weight.data.view(torch.int32)")
flat = does(
    "net.w = torch.zeros(2 * WIDTH * WIDTH)",
    "net.a.weight.data, net.b.weight.data = net.w.view(2, WIDTH, WIDTH).unbind()",
)


@pytest.mark.parametrize(
    ("share", "match"),
    [
        (tied_data, r"b.weight \(8, 8\) and a.weight .* two parameters over the same memory"),
        (tied_parameter, r"b.weight \(8, 8\) and a.weight .* two parameters over the same memory"),
        (tied_by_loading, r"b.weight \(8, 8\) and a.weight .* two parameters over the same memory"),
        (tied_frozen, r"b.weight \(8, 8\) and a.weight .* over the same memory"),
        (tied_part, r"b.weight \(7, 8\) and a.bias \(8,\) .* keep one parameter, and index it in forward"),
        (columns, r"b.weight \(8, 8\) and a.weight .* give one memory of its own"),
        (part, r"w \(5, 8\), a Tensor .* over the memory of a.weight .* index it where the values are used"),
        (turned, r"w \(8, 8\), a Tensor .* over the memory of a.weight"),
        (buffered, r"the buffer b.w \(8, 8\) lies over the memory of the parameter a.weight"),
        (expanded, r"b.bias \(8,\) has the strides \(0,\)"),
        (computed, r"w \(4, 8\), a Tensor .* over the memory of a.weight"),
        (flat, r"w \(128,\), a Tensor .* over the memory of a.weight"),
        (as_integers, r"w \(8, 8\), a Tensor of torch.int32, lies over .* give the tensor memory of its own"),
    ],
)
def test_what_would_be_trained_apart_is_refused_by_name(share: Any, match: str) -> None:
    model = Net(share)
    before = {name: (p, p.data_ptr()) for name, p in model.named_parameters()}
    with pytest.raises(ShardedParameterError, match=match):
        zero_core.shard(model, adam(model))
    assert before == {name: (p, p.data_ptr()) for name, p in model.named_parameters()}
    if share in (as_integers, computed, part):
        del model.w
        zero_core.shard(model, adam(model))


@pytest.mark.advice("or let the other show its values without a gradient", "assign one parameter to both")
@pytest.mark.parametrize(
    ("share", "advice"),
    [
        (tied_data, "model.b.weight = model.a.weight"),
        (tied_data, "model.b.weight.data = model.b.weight.data.clone()"),
        (tied_by_loading, "model.b.weight = model.a.weight"),
        (tied_frozen, "del model.b.weight; model.b.weight = model.a.weight.detach()"),
        (columns, "model.b.weight.data = model.b.weight.data.clone()"),
        (buffered, "del model.b.w; model.b.w = model.a.weight.detach()"),
        (expanded, "model.b.bias = nn.Parameter(model.b.bias.detach().clone())"),
    ],
)
def test_the_advice_against_shared_memory_works(share: Any, advice: str) -> None:
    """Fails if the error does not give the advice, or if what it gives does not train as torch does."""
    dense, model = Net(share), Net(share)
    with pytest.raises(ShardedParameterError) as caught:
        zero_core.shard(model, adam(model))
    assert f"`{advice}`" in str(caught.value)
    for net in (dense, model):
        exec(advice, {"model": net, "nn": nn})
    expected = train(dense, adam(dense))
    torch.testing.assert_close(train(model, zero_core.shard(model, adam(model))), expected, rtol=1e-5, atol=1e-6)


class Part(nn.Module):
    """Has a buffer over the first rows of a parameter, which forward indexes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("part", self.linear.weight.detach()[:2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + (x @ self.part[:2].T).sum(1, keepdim=True)


def test_a_buffer_over_a_part_becomes_an_attribute_that_forward_indexes() -> None:
    values = []
    for shards in (False, True):
        model = Part()
        if shards:
            with pytest.raises(ShardedParameterError, match=r"index the attribute in forward\(\)"):
                zero_core.shard(model, adam(model))
        del model.part
        model.part = model.linear.weight.detach()
        optimizer = zero_core.shard(model, adam(model)) if shards else adam(model)
        for _ in range(3):
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        values.append(model.linear.weight.detach().clone())
    torch.testing.assert_close(values[1], values[0], rtol=1e-5, atol=1e-6)


def test_all_pairs_over_one_memory_are_named() -> None:
    """Fails if a second pair is found only when the first has memory of its own."""
    net: Any = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    for first, second in ((0, 1), (2, 3)):
        net[second].weight = nn.Parameter(net[first].weight.data)
    with pytest.raises(
        ShardedParameterError, match=r"1.weight .* over the same memory.*\. The same is true of 3.weight and 2"
    ):
        zero_core.shard(net, adam(net))
    for second in (1, 3):
        net[second].weight.data = net[second].weight.data.clone()
    zero_core.shard(net, adam(net))


def test_a_parameter_of_which_the_forward_takes_a_part_trains_as_in_torch() -> None:
    """As the error says to whoever has a second parameter over the part."""
    dense, model = (Net(shown=lambda net: net.a.weight) for _ in range(2))
    expected = train(dense, adam(dense))
    torch.testing.assert_close(train(model, zero_core.shard(model, adam(model))), expected, rtol=1e-5, atol=1e-6)


def test_parameters_that_are_separate_slices_of_one_memory_train_as_in_torch() -> None:
    def share(net: Any) -> None:
        memory = torch.randn(2, WIDTH, 2 * WIDTH, generator=torch.Generator().manual_seed(1))
        net.a.weight.data, net.b.weight.data = memory[0].view(2, WIDTH, WIDTH)
        net.a.bias.data, net.b.bias.data = memory[1, 0].view(2, WIDTH)
        net.apart = memory[1, 1:].detach()

    dense, model = Net(share), Net(share)
    expected = train(dense, adam(dense))
    torch.testing.assert_close(train(model, zero_core.shard(model, adam(model))), expected, rtol=1e-5, atol=1e-6)


def test_a_deferred_parameter_over_the_memory_of_another_is_refused() -> None:
    with zero_core.deferred_init(seed=0):
        model = Net(tied_parameter)
    with pytest.raises(ShardedParameterError, match="b.weight .* and a.weight .* over the same memory"):
        zero_core.shard(model, adam(model))
    with pytest.raises(ShardedParameterError, match="b.weight .* and a.weight .* over the same memory"):
        zero_core.shard(model)


def test_a_buffer_over_a_deferred_parameter_is_refused() -> None:
    """Fails if the buffer gets memory of its own, and keeps the values from before the first step."""
    with pytest.raises(DeferredInitError, match="the buffer w of a Linear lies over the memory of a parameter"):
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
    expected = train(dense, adam(dense))
    torch.testing.assert_close(train(model, zero_core.shard(model, adam(model))), expected, rtol=1e-5, atol=1e-6)


def test_a_model_over_the_memory_of_one_that_was_sharded_is_refused() -> None:
    first, second, third = Net(), Net(), Net()
    second.load_state_dict(first.state_dict(), assign=True)
    third.w = first.b.weight.detach()
    zero_core.shard(first, adam(first))
    with pytest.raises(ShardedParameterError, match="a.weight lies over the memory that a.weight of another model"):
        zero_core.shard(second.requires_grad_(False))
    with pytest.raises(ShardedParameterError, match="w lies over the memory that b.weight of another model"):
        zero_core.shard(third, adam(third))
    for parameter in second.parameters():
        parameter.data = parameter.data.clone()
    zero_core.shard(second)
    both = nn.ModuleList([Net(), Net()])
    both[1].a.weight = both[0].a.weight
    zero_core.shard(both, adam(both))


def test_two_models_that_share_memory_and_are_not_trained_are_sharded() -> None:
    first, second = Net(), Net()
    second.load_state_dict(first.state_dict(), assign=True)
    for model in (first, second):
        zero_core.shard(model)
    assert torch.equal(first(torch.ones(1, WIDTH)), second(torch.ones(1, WIDTH)))


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
    expected = train(dense, adam(dense))
    for ours, theirs in zip(train(models[1], zero_core.shard(models[1], adam(models[1]))), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
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
        with pytest.raises(ShardedParameterError, match="use zero_core.gathered"):
            use(first)
