"""Tiled linears against `nn.Linear`."""

import copy

import pytest
import torch
from torch import nn

from zero_core.deferred import deferred_init
from zero_core.errors import DeferredInitError, ZeroError
from zero_core.init import materialise
from zero_core.tiling import TiledLinear, tile_linear


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


def test_uneven_splits_cover_everything_once() -> None:
    tiled = TiledLinear(10, 7, out_splits=3, in_splits=4)
    assert sum(p.numel() for p in tiled.parameters()) == 77
    covered = torch.zeros(7, 10)
    for _, (low, high), (start, stop) in tiled.placed():
        covered[low:high, start:stop] += 1
    assert torch.equal(covered, torch.ones(7, 10))


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


def test_a_row_larger_than_the_threshold_is_a_tile_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(100, 3))
    tile_linear(model, 10)
    assert [tuple(t.weight.shape) for t in model[0].tiles] == [(1, 100)] * 3


def test_tied_weights_are_left_whole() -> None:
    model = nn.Module()
    model.embedding, model.head = nn.Embedding(32, 8), nn.Linear(8, 32, bias=False)
    model.head.weight = model.embedding.weight
    assert tile_linear(model, 16) == ()
    assert model.head.weight is model.embedding.weight


def test_frozen_stays_frozen() -> None:
    linear = nn.Linear(8, 8)
    linear.weight.requires_grad_(False)
    tiled = TiledLinear.from_linear(linear, out_splits=2)
    assert [p.requires_grad for p in tiled.tiles[0].parameters()] == [False, True]


def test_deferred_layers_stay_deferred() -> None:
    with deferred_init(seed=3):
        model = nn.Sequential(nn.Linear(64, 64))
    tile_linear(model, 1024)
    assert len(model[0].tiles) == 4 and all(p.is_meta for p in model.parameters())
    materialise(model)
    assert all(0 < p.abs().max() <= 1 / 8 for p in model.parameters())
    first, second = model[0].tiles[0].weight, model[0].tiles[1].weight
    assert not torch.equal(first, second)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="out_splits=9"):
        TiledLinear(8, 8, out_splits=9)
    with pytest.raises(ValueError, match="threshold=0"):
        tile_linear(nn.Sequential(), 0)
    with pytest.raises(ZeroError, match="from_linear"):
        tile_linear(nn.Linear(4, 4), 1)
    with pytest.raises(DeferredInitError, match="Linear is on meta"):
        tile_linear(nn.Sequential(nn.Linear(8, 8, device="meta")), 16)
