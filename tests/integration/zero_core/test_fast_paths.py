"""torch's fast path of nn.TransformerEncoder in eval mode, which zeroes padded positions, over a sharded model."""

import pytest
import torch
from torch import nn

import zero_core
from tests import kit
from tests.integration.zero_core import toys

pytestmark = pytest.mark.promise("fast-paths")

INSIDE = [nn.Linear, nn.LayerNorm]
WIDTH = 16
PADDED = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 1, 1, 1, 1]]).bool()
SCATTERED = torch.tensor([[0, 1, 0, 0, 1], [0, 0, 0, 1, 1], [0, 1, 0, 1, 1]]).bool()


def layer(**options):
    return nn.TransformerEncoderLayer(WIDTH, 2, 24, batch_first=True, **options)


class Padded(nn.Module):
    """A projection, something with a padding mask, and the mean over all positions, padded ones too."""

    def __init__(self, inner):
        super().__init__()
        self.enter, self.inner, self.head = nn.Linear(5, WIDTH), inner, nn.Linear(WIDTH, 3)

    def forward(self, x, mask=PADDED):
        x = self.enter(x)
        if isinstance(self.inner, nn.MultiheadAttention):
            x = self.inner(x, x, x, key_padding_mask=mask)[0]
        else:
            x = self.inner(x, src_key_padding_mask=mask)
        return self.head(x.mean(1))


MODELS = {
    "encoder": lambda: nn.TransformerEncoder(layer(), 3),
    "gelu and a norm": lambda: nn.TransformerEncoder(layer(activation="gelu"), 2, norm=nn.LayerNorm(WIDTH)),
    "norm first": lambda: nn.TransformerEncoder(layer(norm_first=True), 2, enable_nested_tensor=False),
    "not nested": lambda: nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False),
    "layer": layer,
    "attention": lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
}


def built(make, root):
    torch.manual_seed(0)
    return make() if root else Padded(make())


def evaluate(name, stages, units=None, root=False, frozen=False):
    """In eval mode with both masks, and after each in training mode, where no fast path is taken."""
    for stage in stages:
        dense, model = (built(MODELS[name], root).eval().requires_grad_(not frozen) for _ in range(2))
        given = None if frozen else toys.sgd(model.parameters())
        sharded = zero_core.shard(model, given, stage=stage, units=units)
        x = torch.randn(3, 5, WIDTH if root else 5, generator=torch.Generator().manual_seed(0))
        for mask in (PADDED, SCATTERED):
            keywords = {"src_key_padding_mask": mask} if root else {"mask": mask}
            for _ in range(2):
                with torch.set_grad_enabled(frozen):
                    torch.testing.assert_close(model(x, **keywords), dense(x, **keywords))
            dense.train(), model.train()
            with torch.random.fork_rng():
                expected = dense(x, **keywords)
            torch.testing.assert_close(model(x, **keywords), expected)
            dense.eval(), model.eval()
        with torch.no_grad():
            model(x, **keywords)  # no backward follows, for which units would stay
        for unit in zero_core.units(model):
            assert unit.users == 0 and (stage < 3 or not unit.residency.unsharded)
        sharded.close()


CASES = {
    **{name: {"name": name} for name in MODELS},
    **{f"{name}, units inside": {"name": name, "stages": (3,), "units": INSIDE} for name in MODELS},
    "the encoder is the model": {"name": "encoder", "stages": (1, 3), "root": True},
    "not trained": {"name": "encoder", "stages": (1, 3), "frozen": True},
}


@pytest.mark.parametrize("case", CASES)
@kit.on_ranks(1, 2)
def test_padding_in_eval_mode_is_that_of_plain_torch(size, case):
    evaluate(**{"stages": (0, 3) if size == 1 else (0, 1, 2, 3), **CASES[case]})


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ["encoder", "attention"])
@kit.on_ranks(1)
def test_gradients_in_eval_mode_with_units_inside_of_the_layers(name, frozen):
    """torch takes no fast path there. Fails if a weight that attention uses has lost its memory before backward."""
    dense, model = (built(MODELS[name], False).eval().requires_grad_(not frozen) for _ in range(2))
    given = None if frozen else toys.sgd(model.parameters())
    zero_core.shard(model, given, units=INSIDE)
    x, y = (torch.randn(3, 5, 5, generator=torch.Generator().manual_seed(0), requires_grad=True) for _ in range(2))
    model(x).square().sum().backward()
    dense(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    if not frozen:
        toys.same_gradients(model, dense)
