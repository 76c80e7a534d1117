"""Tiled linears against `nn.Linear`."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zero_core
from tests import kit, models
from tests.integration.zero_core import checkpoint_runs as runs
from zero_core import load_pretrained, save_pretrained
from zero_core.errors import DeferredInitError, ZeroError
from zero_core.model.deferred_init import deferred_init
from zero_core.model.initial_values import Initialiser, materialise
from zero_core.model.tiled_linear import TiledLinear, tile_linear


@pytest.mark.promise("tiled-linear")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("in_splits", [1, 2, 5, 32])
@pytest.mark.parametrize("out_splits", [1, 2, 5, 32])
def test_forward_and_gradients_equal_the_linear(out_splits: int, in_splits: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=bias, dtype=torch.float64)
    tiled = TiledLinear.from_linear(linear, out_splits=out_splits, in_splits=in_splits)
    x, y = (torch.randn(3, 7, 64, dtype=torch.float64).requires_grad_() for _ in range(2))
    y.data.copy_(x.data)
    expected, got = linear(x), tiled(y)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (got * weights).sum().backward()
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-12, atol=1e-12)
    for tile, (low, high), (start, stop) in tiled.placed():
        torch.testing.assert_close(tile.weight.grad, linear.weight.grad[low:high, start:stop], rtol=1e-12, atol=1e-12)
        assert (tile.bias is not None) == (bias and start == 0)
        if tile.bias is not None:
            torch.testing.assert_close(tile.bias.grad, linear.bias.grad[low:high], rtol=1e-12, atol=1e-12)


def test_tiling_draws_no_random_numbers_and_keeps_hooks_and_replaced_forwards() -> None:
    torch.manual_seed(0)
    model, seen = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 64)), []
    handle = model[0].register_forward_hook(lambda module, args, output: seen.append(type(module)))
    model[1].forward = lambda x: nn.functional.linear(x, model[1].weight)
    before = torch.get_rng_state()
    assert tile_linear(model, 100) == ("0",)
    assert torch.equal(torch.get_rng_state(), before)
    model(torch.ones(2, 16))
    handle.remove()
    model(torch.ones(2, 16))
    assert seen == [TiledLinear]


def test_fresh_tiles_are_initialised_as_the_whole_layer() -> None:
    torch.manual_seed(1)
    tiled = TiledLinear(1024, 256, out_splits=4, in_splits=8)
    bound = 1 / 1024**0.5
    for parameter in tiled.parameters():
        assert parameter.abs().max() <= bound
    weights = torch.cat([tile.weight.flatten() for tile in tiled.tiles])
    assert abs(weights.std().item() - bound / 3**0.5) < 0.02 * bound


def test_tile_linear_replaces_large_layers_only() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Sequential(nn.Linear(64, 8)), nn.Linear(8, 4))
    model[3].weight.requires_grad_(False)
    model.eval()
    expected, x = copy.deepcopy(model), torch.randn(5, 16)
    assert tile_linear(model, 200) == ("0", "2.0")
    assert len(model[0].tiles) == 6 and len(model[2][0].tiles) == 3
    assert all(t.weight.numel() <= 200 for m in (model[0], model[2][0]) for t in m.tiles)
    assert not model[0].training
    torch.testing.assert_close(model(x), expected(x))
    assert tile_linear(model, 200) == ()
    tied = nn.ModuleDict({"embedding": nn.Embedding(32, 8), "head": nn.Linear(8, 32, bias=False)})
    tied["head"].weight = tied["embedding"].weight
    assert tile_linear(tied, 16) == () and tied["head"].weight is tied["embedding"].weight


INITIALISERS = {
    "default": lambda weight: None,
    "normal": lambda weight: nn.init.normal_(weight, 0.5, 0.02),
    "truncated": lambda weight: nn.init.trunc_normal_(weight, std=0.02),
    "scaled": lambda weight: weight.data.mul_(3.0).add_(1.0),
    "orthogonal": nn.init.orthogonal_,  # no element has a value of its own
    "a row": lambda weight: weight.data[3].zero_(),
}


@pytest.mark.promise("deferred-tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("initialise", INITIALISERS)
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_deferred_tiles_are_the_slices_of_the_layer(where: str, initialise: str, dtype: torch.dtype) -> None:
    """Bit for bit, asked for in any order: 53 columns, so that no tile begins where torch begins to draw a block."""
    if initialise == "orthogonal" and dtype is torch.bfloat16:
        pytest.skip("torch has no QR of it")
    for out_splits, in_splits in ((2, 1), (5, 1), (1, 4), (4, 3)):
        with deferred_init(seed=3):
            linear = nn.Linear(53, 37, dtype=dtype)
            INITIALISERS[initialise](linear.weight)
            if where == "inside":
                tiled = TiledLinear.from_linear(linear, out_splits=out_splits, in_splits=in_splits)
        if where == "outside":
            tiled = TiledLinear.from_linear(linear, out_splits=out_splits, in_splits=in_splits)
        weight, bias = (Initialiser(linear).values(p) for p in linear.parameters())
        assert not weight.isnan().any() and weight.std() > 0
        initialiser = Initialiser(tiled)
        placed = tiled.placed()
        for tile, (low, high), (start, stop) in (*placed, *reversed(placed), *placed[1::2]):
            assert torch.equal(initialiser.values(tile.weight), weight[low:high, start:stop])
            if tile.bias is not None:
                assert torch.equal(initialiser.values(tile.bias), bias[low:high])


@pytest.mark.promise("deferred-tiles-cast")
def test_a_deferred_layer_keeps_its_cast_and_its_file_in_tiles(tmp_path: Path) -> None:
    """What was done to it between deferred_init() and tile_linear() is not undone, and what cannot be kept is told."""

    def built() -> nn.Module:
        with deferred_init(seed=3):
            return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    cast, expected = built().bfloat16(), built()
    tile_linear(cast, 16)
    materialise(cast)
    materialise(expected)
    tiles = torch.cat([tile.weight for tile in cast[0].tiles])
    assert tiles.dtype is torch.bfloat16 and torch.equal(tiles, expected[0].weight.bfloat16())

    with torch.no_grad():
        expected[0].weight.add_(1.0)
    save_pretrained(expected, tmp_path)
    loaded = built()
    load_pretrained(loaded, tmp_path)
    tile_linear(loaded, 16)
    materialise(loaded)
    assert torch.equal(torch.cat([tile.weight for tile in loaded[0].tiles]), expected[0].weight)

    written = built()
    with torch.no_grad():
        written[0].weight.mul_(2.0)
    TiledLinear.from_linear(written[1], out_splits=2)  # the same recording
    with pytest.raises(DeferredInitError, match="values written into 0.weight after the with block"):
        materialise(written)
    with pytest.raises(DeferredInitError, match="values written into 'weight' of a Linear after"):
        tile_linear(written, 16)


class Sizes(TorchDispatchMode):
    """Elements of the largest tensor that an operation made, and how many were drawn."""

    largest = drawn = decompositions = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype is torch.float32:
            self.largest = max(self.largest, result.untyped_storage().nbytes() // 4)
            if "uniform_" in str(function) or "normal_" in str(function):
                self.drawn += result.numel()
        self.decompositions += "linalg_qr" in str(function)
        return result


@pytest.mark.promise("deferred-tiles-memory")
@pytest.mark.parametrize("initialise", ["default", "normal", "orthogonal"])
def test_tiles_of_a_deferred_layer_are_made_without_the_layer(initialise: str) -> None:
    """Every element is drawn once, and nothing larger than a tile is made; the whole once where there is no other way.

    Once for each of 16 tiles, a layer of 12288 x 12288 took 17 s instead of 7.
    """
    with deferred_init(seed=3):
        model = nn.Sequential(nn.Linear(256, 256, bias=False))
        INITIALISERS[initialise](model[0].weight)
        tile_linear(model, 4096)
    initialiser, sizes = Initialiser(model), Sizes()
    with sizes:
        for parameter in model.parameters():
            initialiser.values(parameter)
    assert len(model[0].tiles) == 16
    if initialise == "orthogonal":
        assert sizes.decompositions == 1
    else:
        assert sizes.drawn < 1.02 * 256 * 256 and sizes.largest <= 4096 + 32


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="out_splits=9"):
        TiledLinear(8, 8, out_splits=9)
    with pytest.raises(ValueError, match="threshold=0"):
        tile_linear(nn.Sequential(), 0)
    with pytest.raises(ZeroError, match="from_linear"):
        tile_linear(nn.Linear(4, 4), 1)
    with pytest.raises(DeferredInitError, match="is on the meta device: build it inside deferred_init"):
        tile_linear(nn.Sequential(nn.Linear(8, 8, device="meta")), 16)
    with zero_core.deferred_init():
        tile_linear(nn.Sequential(nn.Linear(8, 8)), 16)


@pytest.mark.promise("tiles-are-units")
@kit.on_ranks(1, 2)
def test_tiles_are_units_and_change_no_number() -> None:
    """Three steps of a Llama, its large linears tiled or not."""
    pytest.importorskip("transformers")
    largest, losses = [], []
    for threshold in (0, 600):
        torch.manual_seed(0)
        model = models.build("llama")
        assert not threshold or len(tile_linear(model, threshold)) > 6
        optimizer = zero_core.shard(model, runs.adamw(model.parameters()), stage=3, max_grad_norm=runs.CLIP)
        losses.append(runs.train(model, optimizer, 0, 3))
        largest.append(max(sum(p.numel() for p in unit.parameters) for unit in zero_core.units(model)))
        optimizer.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-6) and largest[1] < largest[0] / 2
