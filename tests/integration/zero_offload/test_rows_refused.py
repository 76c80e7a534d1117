"""Which units, norms and arguments `offload_activations(rows=)` cuts, and which it refuses by name.

Fails if a unit whose rows depend on each other is computed by rows, or one that is neither known nor named.
"""

import pytest

pytest.importorskip("transformers")

import torch
from torch import Tensor, nn

import zero_core
from tests.integration.zero_offload.rows import Adds, Block, Case, Toy, build, distance, toy_batch, toy_sharded
from zero_offload import ActivationError, TieredStore, TorchStep, offload_activations

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own, of small configurations


class Opaque:
    def __init__(self, bias: Tensor) -> None:
        self.bias = bias


@pytest.mark.promise("rows-mixed", "rows-refused")
@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("batch norm", {}, "module layers.0 writes into its buffer 'norm.num_batches_tracked' in forward"),
        ("contrast", {}, "module layers.0 mixes the rows of its input: 2 rows at once and 1 at a time give outputs"),
        ("capacity", {}, "module layers.0 mixes the rows of its input"),
        ("buffer", {}, "module layers.0 writes into its buffer 'seen' in forward"),
        ("loss", {}, r"module layers.0 returns, or stores in an attribute, a value of shape \(\)"),
        (
            "plain",
            {"bias": Opaque(torch.ones(8, 5, 16))},
            "argument 'bias' of unit layers.0 is of class Opaque with tensors of 8 rows",
        ),
        ("plain", {"bias": torch.ones(3, 5, 16)}, "runs on 8 rows, but not on 2 or fewer"),
    ],
)
def test_a_unit_whose_rows_depend_on_each_other_or_cannot_be_cut_is_refused(kind, given, message):
    model, optimizer, _ = toy_sharded(kind, rows=2)
    with pytest.raises(ActivationError, match=message):
        model(toy_batch(), **given)
    optimizer.close()


class Hidden(nn.Module):
    """Mixes the rows of a batch where outputs do not show it: behind a gate of zero, or in gradients alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.gate, self.kind = nn.Linear(16, 16), nn.Parameter(torch.zeros(())), kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "gate":
            return self.inner(x) + self.gate * (x - x.mean(0, keepdim=True))
        return Adds.apply(self.inner(x), x.mean(0).square().sum())


@pytest.mark.promise("named-modules-compared")
@pytest.mark.parametrize(
    ("kind", "named", "message"),
    [
        ("gate", (), "unit layers.0 is of class Hidden, and rows= would compute some rows"),
        ("loss", (), "set row_modules=.'layers.[*]'.. Else give the unit with layers.0 the policy 'keep'"),
        ("loss", ("layers.0",), "2 rows at once and 1 at a time give gradients of its inputs with a relative"),
    ],
)
def test_a_unit_is_cut_only_if_it_is_named_and_compared_in_gradients_too(kind, named, message):
    model = Toy()
    model.layers = nn.ModuleList([Hidden(kind)])
    model.forward = lambda x: model.layers[0](x)
    optimizer = zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with (
        offload_activations(model, policy="recompute", rows=2, row_modules=named),
        pytest.raises(ActivationError, match=message),
    ):
        model(toy_batch())
    optimizer.close()


def test_each_block_is_compared_also_where_one_of_its_class_has_passed():
    """Fails if blocks are taken to be alike because their classes are: the second has another setting."""
    model = Toy()
    model.layers.append(Block("contrast"))
    model.forward = lambda x: model.layers[1](model.layers[0](model.stem(x)))
    store = TieredStore("host", "host", "host", step=TorchStep(), tile_numel=1 << 20)
    optimizer = zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), store=store)
    offload_activations(model, store, "recompute", rows=2, row_modules=["layers.*"])
    with pytest.raises(ActivationError, match="module layers.1 mixes the rows of its input"):
        model(toy_batch())
    optimizer.close()


class CentredNorm(nn.Module):
    """Mixes the rows of a batch, which its class does not tell."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@pytest.mark.promise("rows-norm")
@pytest.mark.parametrize(
    ("kind", "given", "named", "seen"),
    [
        (nn.LayerNorm, (16,), True, {2}),
        (nn.LayerNorm, (16,), False, {8}),
        (CentredNorm, (), False, {8}),
        (nn.BatchNorm1d, (5,), False, {8}),
    ],
)
def test_a_norm_between_blocks_and_head_computes_by_rows_if_it_is_named_and_else_all(kind, given, named, seen):
    """It is in no unit but the model's own, and has no policy by which it could be told to keep."""
    sizes, gradients = [], []

    class Norm(kind):
        def forward(self, x: Tensor) -> Tensor:
            sizes.append(len(x))
            return super().forward(x)

    for rows in (None, 2):
        model = Toy()
        model.norm, model.layers[0].drop.p = Norm(*given), 0.0
        model.forward = lambda x, model=model: model.norm(model.layers[0](model.stem(x)))
        optimizer = zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
        names = ["layers.*", *["norm"][:named]]
        with offload_activations(model, policy="recompute", rows=rows, row_modules=names):
            model(toy_batch())  # what computes by rows is compared with its halves
            sizes.clear()
            model(toy_batch()).pow(3).sum().backward()
        gradients.append({name: zero_core.full_gradient(p) for name, p in model.named_parameters() if name != "scale"})
        optimizer.close()
    assert {*sizes} == seen
    assert len(sizes) == (1 if seen == {8} else 2 * 4)  # what computes the whole batch is not recomputed
    assert distance(gradients[1], gradients[0]) < 1e-4  # the mean's gradient nearly cancels


@pytest.mark.promise("rows-mixed")
def test_a_unit_that_draws_random_numbers_is_compared_in_eval_mode():
    model, optimizer, _ = toy_sharded("noise", rows=2)
    model(toy_batch()).sum().backward()
    assert model.layers[0].training
    assert model.layers[0].drop.training
    optimizer.close()


@pytest.mark.promise("rows-shared")
def test_where_the_batch_is_as_long_as_the_sequence_the_user_says_what_is_shared():
    bias = torch.randn(5, 16)
    plain = Toy().eval()
    expected = plain(toy_batch(5), bias=bias)
    model, optimizer, offloaded = toy_sharded(rows=2)
    told = r"dimension of 'bias', also 5.* is the batch. If so, pass shared=\[\] to .* pass shared=\['bias'\]"
    with pytest.raises(ActivationError, match=told):
        model.eval()(toy_batch(5), bias=bias)
    offloaded.close()
    with offload_activations(model, policy="recompute", rows=2, shared=["bias"], row_modules=["layers.*"]):
        assert torch.allclose(model(toy_batch(5), bias=bias), expected, atol=1e-6)
    optimizer.close()


@pytest.mark.promise("tokens", "rows-shared")
@pytest.mark.parametrize("option", ["rows", "tokens"])
def test_a_number_of_rows_or_tokens_that_is_none_is_refused(option):
    model, store, optimizer = build(Case())
    for number in (0, -1, 2.0, True):
        with pytest.raises(ActivationError, match=f"{option}={number!r} must be a whole number, 1 or more"):
            offload_activations(model, store, "recompute", **{option: number})
    for pattern in ("h.*", "layers.9"):
        with pytest.raises(
            ActivationError, match=f"{option[:-1]}_modules= has '{pattern}', .*: see model.named_modules"
        ):
            offload_activations(model, store, "recompute", **{option: 1, f"{option[:-1]}_modules": [pattern]})
    optimizer.close()
