"""`offload_activations(tokens=)`: what acts on each token alone takes a row in parts, with the results of whole rows.

Fails if a part sees other tokens, values or random numbers than it should, if a gradient is lost, counted twice or
added in another order than is said, if an MLP is computed a third time, if its input is kept between forward and
backward, if all logits exist, or if a module that is neither known nor named takes parts.
"""

from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zero_core
from tests.integration.zero_offload.rows import Case, batch_of, build, distance
from zero_offload import ActivationError, OffloadError, offload_activations

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.promise("tokens")]
FP32 = 1e-6  # relative to a gradient's norm; measured: 6e-7
WIDTH, TOKENS = 8, 12


# -- blocks of the tests' own ------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        q, k, v = (each[:, None] for each in self.qkv(x).chunk(3, -1))
        where = torch.arange(x.shape[1])
        mask = where[:, None] >= where
        if cu_seqlens is not None:
            owner = torch.bucketize(where, cu_seqlens, right=True)
            mask = mask & (owner[:, None] == owner)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[:, 0]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    def __init__(self, other: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(WIDTH), Attention(), Mlp()
        self.other = other

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        y = x + self.attention(self.norm(x), cu_seqlens)
        y = y if self.other is None else y + self.other(y)
        return y + self.mlp(y)


class Model(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.stem, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList([block])

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        return self.layers[0](self.stem(x), **given)


def rows_of(count: int = 2, length: int = TOKENS) -> Tensor:
    return torch.randn(count, length, WIDTH, generator=torch.Generator().manual_seed(1))


def gradients(block, x, *, policy="recompute", freeze="nothing", given=None, **options) -> dict[str, Tensor]:
    """Of one step, with plain torch where there are no options. The MLP of the block is named, and the block."""
    torch.manual_seed(0)
    model = Model(block)
    for name, parameter in model.named_parameters():
        torch.manual_seed(len(name))
        nn.init.normal_(parameter, std=0.3)
        parameter.requires_grad_(freeze not in name)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not options and policy == "recompute":
        model(x, **(given or {})).square().mean().backward()
        return {name: p.grad for name, p in trained.items() if p.grad is not None}
    optimizer = zero_core.shard(model, torch.optim.SGD(list(trained.values()), lr=0.1))
    named = {"row_modules": ["layers.*"], "token_modules": ["*.mlp"] if hasattr(block, "mlp") else []}
    try:
        with offload_activations(model, policy=policy, **named | options):
            model(x, **(given or {})).square().mean().backward()
        found = {name: zero_core.full_gradient(p) for name, p in trained.items()}
        return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}
    finally:
        optimizer.close()


def test_gradients_are_added_part_by_part_from_the_first_to_the_last():
    """Bit for bit the sum in fp32 that torch computes of an MLP's parts."""
    x, block = rows_of(1), Block()
    seen: dict[str, Tensor] = {}

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        seen["input"] = args[0].detach()
        output.register_hook(lambda gradient: seen.update(gradient=gradient))

    whole = block.mlp.forward
    block.mlp.forward = lambda x: torch.cat([whole(part.contiguous()) for part in x.split(5, 1)], 1)
    handle = block.mlp.register_forward_hook(keep)
    plain = gradients(block, x)  # in parts too: where more rows are rounded otherwise, its gradient is another one
    handle.remove()
    block.mlp.forward = whole
    parameters = {f"layers.0.mlp.{name}": p for name, p in block.mlp.named_parameters()}
    for p in parameters.values():
        p.grad = None
    for part, gradient in zip(seen["input"].split(5, 1), seen["gradient"].split(5, 1), strict=True):
        block.mlp(part.contiguous()).backward(gradient)
    found = gradients(Block(), x, tokens=5)
    assert all(torch.equal(found[name], p.grad) for name, p in parameters.items())
    assert distance(found, plain) < FP32


@pytest.mark.promise("packed", "activations-advice")
def test_packed_rows_are_those_of_each_sequence_alone():
    """Llama finds sequences by position_ids: in one row, and in two rows, which rows= takes one at a time."""
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(3))
    places = torch.cat([torch.arange(5), torch.arange(7)])

    def loss_and_gradients(packed: bool, rows: int, options: dict[str, int]) -> tuple[float, dict[str, Tensor]]:
        model, _, optimizer = build(Case())
        total = 0.0
        with offload_activations(model, policy="recompute", **options):
            if packed:
                given = {"input_ids": ids[:rows], "position_ids": places.expand(rows, -1)}
                labels = ids[:rows].clone()
                labels[:, 5] = -100  # the first of a sequence has nothing before it
                loss = model(**given, labels=labels).loss
                loss.backward()
                total = float(loss.detach())
            else:
                for sequence in (piece for row in ids[:rows] for piece in row.split([5, 7])):
                    loss = model(input_ids=sequence[None], labels=sequence[None]).loss
                    loss = loss * (len(sequence) - 1) / (10 * rows)
                    loss.backward()
                    total += float(loss.detach())
            found = {name: zero_core.full_gradient(p).clone() for name, p in model.named_parameters()}
        optimizer.close()
        return total, found

    for rows in (1, 2):
        alone = loss_and_gradients(False, rows, {})
        for options in ({"tokens": 4}, {"rows": 1}, {"rows": 1, "tokens": 4}):
            packed = loss_and_gradients(True, rows, options)
            assert packed[0] == pytest.approx(alone[0], rel=1e-6)
            assert distance(packed[1], alone[1]) < 2 * FP32


@pytest.mark.promise("packed", "rows-refused")
@pytest.mark.parametrize("options", [{"tokens": 5}, {"rows": 1}, {"rows": 2, "tokens": 5}])
def test_offsets_of_packed_sequences_reach_attention_whole(options):
    given = {"cu_seqlens": torch.tensor([0, 4, 9, 12])}
    plain = gradients(Block(), rows_of(1), given=given)
    assert distance(gradients(Block(), rows_of(1), given=given, **options), plain) < FP32
    assert distance(gradients(Block(), rows_of(1)), plain) > 1e-2  # what one long sequence has
    if "rows" in options:
        with pytest.raises(
            ActivationError, match="argument .cu_seqlens. has shape .4,.* cut them: pack .*Or leave rows= out"
        ):
            gradients(Block(), rows_of(3), given=given, **options)


# -- what is refused ---------------------------------------------------------------------------------------------------


class Decay(nn.Module):
    """A state space of one state a channel."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y, state = [], torch.zeros_like(x[:, 0])
        for token in self.inner(x).unbind(1):
            state = 0.5 * state + token
            y.append(state)
        return torch.stack(y, 1)


class Across(nn.Module):
    """What mixes tokens in the last dimension, where `kind` finds them."""

    def __init__(self, kind: nn.Module) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        return self.kind(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


class InOwnForward(Block):
    """Its MLP is in no module."""

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        y = x + self.attention(self.norm(x))
        return y + self.mlp.down(torch.tanh(self.mlp.up(y)))


@pytest.mark.parametrize(
    ("block", "named", "message"),
    [
        (lambda: Block(Decay()), ["*.other"], "module layers.0.other mixes the tokens of its input"),
        (lambda: Block(Across(nn.Conv1d(WIDTH, WIDTH, 3, padding=2))), ["*.other"], "layers.0.other mixes the tokens"),
        (
            lambda: Block(Across(nn.Linear(TOKENS, TOKENS))),
            ["*.other"],
            "layers.0.other runs on 12 tokens, but not on 5 or fewer",
        ),
        (Block, [], "tokens=5 has no effect in unit layers.0 of class Block.* name it with token_modules="),
        (InOwnForward, [], "tokens=5 has no effect in unit layers.0 of class InOwnForward"),
    ],
)
def test_a_named_module_that_mixes_tokens_is_refused_and_a_block_of_which_none_is_known(block, named, message):
    """What the error says works. A module that is not named computes whole rows."""
    unnamed = "if token_modules= names layers.0.other, leave it out there. Or " if named else ""
    told = f"{message}.*{unnamed}give the unit with layers.0.* the policy 'keep'.*Or leave tokens= out"
    with pytest.raises(ActivationError, match=told):
        gradients(block(), rows_of(), tokens=5, token_modules=named)
    expected = gradients(block(), rows_of())
    ways_out = ({"policy": "keep", "tokens": 5}, {"tokens": TOKENS}, {"tokens": None}, {"tokens": 5})
    for options in ways_out[: None if block is not InOwnForward else 3]:
        assert distance(gradients(block(), rows_of(), **options), expected) < FP32


# -- mixing that no comparison of values shows -------------------------------------------------------------------------


class Mixing(nn.Module):
    """A linear layer, and what `mix` adds to it or does with its input."""

    def __init__(self, mix: Any) -> None:
        super().__init__()
        self.inner, self.router, self.mix = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), mix

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self, x)


def capacity(module: Mixing, x: Tensor) -> Tensor:
    """At most ten tokens an expert, which are not exceeded at first."""
    chosen = F.one_hot(module.router(x).argmax(-1), 2)
    return module.inner(x) * (chosen.cumsum(1) * chosen <= 10).all(-1, keepdim=True)


def centred(x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True)


def test_mixing_that_no_comparison_shows_computes_whole_rows_where_it_is_not_named():
    """Its values do not matter, as a list decides."""
    expected = gradients(Block(Mixing(capacity)), rows_of())
    assert distance(gradients(Block(Mixing(capacity)), rows_of(), tokens=4), expected) < FP32


@pytest.mark.promise("named-modules-compared")
@pytest.mark.parametrize("kind", ["equal", "last"])
def test_tokens_are_tried_that_are_equal_and_at_the_end(kind):
    """Of padding, no mean differs; and what is conditioned on the maximum of a row differs where this is."""
    x = rows_of()
    if kind == "equal":
        x[:, :10] = x[:1, :1]
        block = Block(Mixing(lambda m, x: m.inner(centred(x))))
    else:
        x[:, :, 0] = 0
        x[:, 11, 0] = 9
        block = Block(Mixing(lambda m, x: m.inner(x) + (x[:, :, :1].detach().nan_to_num() > 5).any(1, keepdim=True)))
    with pytest.raises(ActivationError, match="mixes the tokens of its input"):
        gradients_on(block.other, x)


def gradients_on(module: nn.Module, x: Tensor) -> Any:
    """A module whose input is `x` itself, in a block that has an MLP besides."""

    class First(Block):
        def forward(self, y: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
            return self.mlp(y) + self.other(x + 0 * y)

    return gradients(First(module), x, tokens=4, token_modules=["*.other"])


class Switched(nn.Module):
    """Mixes tokens where a number or a submodule's mode tells it to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)

    def forward(self, x: Tensor, window: int) -> Tensor:
        mixes = window > 1 or (self.drop.training and not self.training)
        return self.drop(self.inner(centred(x) if mixes else x))


class Calls(Block):
    window = 1

    def __init__(self) -> None:
        super().__init__(Switched())

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        return self.mlp(x) + self.other(x, self.window)


@pytest.mark.promise("named-modules-compared")
@pytest.mark.parametrize("change", ["number", "mode"])
def test_a_call_of_another_kind_is_compared_again(change):
    block = Calls()
    model = Model(block).eval()
    optimizer = zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = rows_of()
    with offload_activations(model, policy="recompute", tokens=4, token_modules=["*.other"]):
        model(x).sum().backward()
        if change == "number":
            block.window = 3
        else:
            block.other.drop.train()
        with pytest.raises(ActivationError, match="layers.0.other mixes the tokens"):
            model(x)
    optimizer.close()


def in_place(module: Mixing, x: Tensor) -> Tensor:
    x.mul_(2)
    return module.inner(x)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("freeze", ["nothing", "stem"])
def test_a_module_that_changes_its_input_in_place_is_refused(rows, freeze):
    for module in (Mixing(in_place), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))):
        with pytest.raises(ActivationError, match="changes one of its inputs in place, a tensor of shape"):
            gradients(Block(module), rows_of(rows), freeze=freeze, tokens=5, token_modules=["*.other"])


@pytest.mark.advice("return a copy of the input. Or {}")
def test_a_named_module_that_returns_its_input_is_refused_and_with_a_copy_it_takes_parts():
    class Same(Block):
        def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
            y = x + self.attention(self.norm(x))
            self.other(y).mul_(2)
            return y + self.mlp(y)

    class Returns(nn.Module):
        copies = False

        def forward(self, x: Tensor) -> Tensor:
            return x.clone() if self.copies else x

    named = {"tokens": 5, "token_modules": ["*.other", "*.mlp"]}
    with pytest.raises(ActivationError, match="layers.0.other returns one of its inputs.* return a copy"):
        gradients(Same(Returns()), rows_of(), **named)
    assert distance(gradients(Same(Returns()), rows_of(), tokens=5), gradients(Same(Returns()), rows_of())) < FP32
    Returns.copies = True
    assert distance(gradients(Same(Returns()), rows_of(), **named), gradients(Same(Returns()), rows_of())) < FP32


def test_in_a_checkpoint_of_the_blocks_own_a_module_is_computed_whole():
    class Checkpoints(Block):
        def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
            y = x + self.attention(self.norm(x))
            return y + torch.utils.checkpoint.checkpoint(self.mlp, y, use_reentrant=False)

    expected = gradients(Checkpoints(), rows_of())
    assert distance(gradients(Checkpoints(), rows_of(), tokens=5), expected) < FP32
    model = Model(Checkpoints())
    optimizer = zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with offload_activations(model, tokens=5, token_modules=["*.mlp"]) as activations:
        model(rows_of()).sum().backward()
        assert activations.stats()["delegated"]
    optimizer.close()


def test_a_matrix_as_wide_as_a_row_is_long_is_not_cut_along_its_width():
    class Flat(Block):
        def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
            y = x + self.attention(self.norm(x))
            return self.mlp(y + self.other(y.reshape(-1, WIDTH)).view_as(y))

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.inner = nn.Parameter(torch.zeros(())), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            shapes.add(tuple(x.shape))
            return self.inner(x.cumsum(0) * self.scale)

    x, shapes = rows_of(length=WIDTH), set()
    blocks = [Flat(Sums()) for _ in range(2)]
    named = {"token_modules": ["*.other", "*.mlp"]}
    assert distance(gradients(blocks[0], x, tokens=3, **named), gradients(blocks[1], x)) < FP32
    assert shapes == {(2 * WIDTH, WIDTH)}


class Overwrites(Block):
    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        y = self.attention(self.norm(x)) * 2
        z = self.mlp(y)
        return torch.tanh(y.add_(z))


def test_an_input_that_is_changed_in_place_is_refused():
    """Torch allows it where the MLP is frozen, and so its linear layers do not keep their input."""
    gradients(Overwrites(), rows_of(), freeze="mlp")
    with pytest.raises(OffloadError, match="an input of module layers.0.mlp was changed in place"):
        gradients(Overwrites(), rows_of(), freeze="mlp", tokens=5)


@pytest.mark.advice("{}=True with {}=")
@pytest.mark.parametrize("option", ["rows", "tokens"])
def test_what_parts_would_record_is_refused(option):
    """Attention takes no parts by tokens."""
    model, store, optimizer = build(Case("mixtral"))
    model.set_attn_implementation("eager")  # another one returns no attentions
    with offload_activations(model, store, "recompute", **{option: 2}):
        for name in ("output_attentions", "output_router_logits"):
            if (option, name) == ("tokens", "output_attentions"):
                found = model(**batch_of("mixtral", 2), output_attentions=True)
                assert [each.shape for each in found.attentions] == [(2, 4, 7, 7)] * 2
                continue
            with pytest.raises(ActivationError, match=f"pass {name}=False, or leave {option}= out"):
                model(**batch_of("mixtral", 2), **{name: True})
            assert model(**batch_of("mixtral", 2), **{name: False}).loss
    with offload_activations(model, store, "recompute"):
        assert len(model(**batch_of("mixtral", 2), output_router_logits=True).router_logits) == 2
    optimizer.close()


@pytest.mark.promise("rows-refused")
def test_hidden_states_that_are_no_rows_of_tokens_and_units_inside_of_units_are_refused():
    with pytest.raises(ActivationError, match=r"hidden states of shape \(2, 3, 12, 8\), and tokens= can only split"):
        gradients(Mlp(), torch.randn(2, 3, TOKENS, WIDTH), tokens=5)
    model = Model(Block())
    zero_core.tile_linear(model, 100)
    optimizer = zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ActivationError, match="leave tokens= out. Or, if .* leave zero_core.tile_linear out. Or, if"):
        offload_activations(model, None, {"layers.0": "recompute"}, tokens=2)
    optimizer.close()
