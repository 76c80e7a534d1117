"""Each family of transformers whose blocks, MLPs and norms take parts, trained whole and in parts.

Fails if a family is listed whose rows or tokens depend on each other, whose classes have other names, or whose blocks
contain what is not listed; and if a subclass, another forward or another module inside takes parts unnamed.
"""

from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from torch import Tensor, nn

import zero_core
from tests.integration.zero_offload.rows import FP32, MODELS, SIZES, batch_of, distance
from zero_offload import ActivationError, offload_activations
from zero_offload.activations import known_modules

pytestmark = [
    pytest.mark.promise("listed-families"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own, of small configurations
]

FAMILIES = {
    family: bool(row[1]) for row in known_modules._FAMILIES for family in row[2].split()
}  # and whether tokens= cuts it
IMAGES = ("clip", "dinov2", "siglip", "vit")
PAIRS = ("bart", "mbart", "mt5", "t5", "umt5", "whisper")
_PARTS = {"clip": "clip_vision_model", "gemma3": "gemma3_text", "siglip": "siglip_vision_model"}  # of models of several


def built(family: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {
        name: size
        for name, size in SIZES.items()
        if name != "head_dim" or not family.startswith(("deepseek", "falcon"))
    }
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(_PARTS.get(family, family), **sizes))
    for module in (model.config, *model.modules()):
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or name == "p"):
                setattr(module, name, 0.0)
    return model.train()


def loss_of(output: Tensor) -> Tensor:
    """Not the mean of squares, which a norm makes constant: its gradients would be rounding alone."""
    return (output * torch.arange(output.numel()).cos().view_as(output)).mean()


def gradients(family: str, **options: int) -> dict[str, Tensor]:
    """Of three rows of seven tokens, with plain torch where there are no options."""
    model, generator = built(family), torch.Generator().manual_seed(1)
    ids = torch.randint(3, 64, (3, 7), generator=generator)
    given = {"pixel_values": torch.randn(3, 3, 16, 16, generator=generator)} if family in IMAGES else {"input_ids": ids}
    if family in PAIRS:
        given["decoder_input_ids"] = ids
    if family == "whisper":
        given["input_features"] = torch.randn(3, 8, 24, generator=generator) + 0 * given.pop("input_ids")[0, 0]
    if not options:
        loss_of(model(**given)[0]).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    optimizer = zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), expert_bytes=None)
    with offload_activations(model, **options):
        loss_of(model(**given)[0]).backward()
        found = {name: zero_core.full_gradient(p) for name, p in model.named_parameters()}
    optimizer.close()
    return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_is_listed_has_the_gradients_of_whole_batches_and_rows(family):
    """Of three rows of seven tokens, the last part is smaller."""
    parts = {"rows": 2, "tokens": 3} if FAMILIES[family] else {"rows": 2}
    assert distance(gradients(family, **parts), gradients(family)) < 10 * FP32


class Swapped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(x)


def subclassed(block: nn.Module) -> None:
    block.__class__ = type("Mine", (type(block),), {})


def replaced(block: nn.Module) -> None:
    block.mlp.act_fn = Swapped()


def patched(block: nn.Module) -> None:
    original = block.mlp.forward
    block.mlp.forward = lambda x: original(x)


@pytest.mark.advice("depends on another one there, set row_modules=[{}]")
@pytest.mark.parametrize(
    ("change", "rows", "tokens"),
    [
        (subclassed, "unit model.layers.0 is of class Mine, and rows= .* set row_modules=", ""),
        (replaced, "contains 'mlp.act_fn' of class Swapped", "has no effect in unit model.layers.0"),
        (patched, "replaces the forward of class LlamaMLP in 'mlp'", "has no effect in unit model.layers.0"),
    ],
)
def test_a_block_that_is_not_transformers_own_takes_parts_if_it_is_named(change, rows, tokens):
    batch = batch_of("llama", 3)

    def train(**options: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = MODELS["llama"]()
        change(model.model.layers[0])
        optimizer = zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
        try:
            with offload_activations(model, **options):
                model(**batch).loss.backward()
            return {name: zero_core.full_gradient(p).clone() for name, p in model.named_parameters()}
        finally:
            optimizer.close()

    expected = train()
    for option, message in {"rows": rows, "tokens": tokens}.items():
        if message:
            with pytest.raises(ActivationError, match=message):
                train(**{option: 2})
    assert distance(train(rows=2, row_modules=["model.layers.0"]), expected) < FP32
    assert distance(train(tokens=2, token_modules=["model.layers.0.mlp"]), expected) < FP32
