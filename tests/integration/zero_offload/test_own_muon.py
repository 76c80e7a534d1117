"""zero_core.Muon on every tier: fp32 or bf16, matrices and stacks of them."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("zero_optim_cpu")

import zero_core
import zero_optim_cpu
from tests import kit
from tests.integration.zero_offload import test_muon as muon
from tests.integration.zero_offload.test_muon import STEPS, Run, apart, built, pair, parameters_of

pytestmark = [pytest.mark.usefixtures("small_chunks"), pytest.mark.promise("own-muon")]


class Experts(nn.Module):
    """A toy mixture: four experts, stacked, of which each token meets all."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(muon.VOCABULARY, 32)
        self.layers = nn.Parameter(torch.randn(4, 32, 48) / 8)
        self.head = nn.Linear(48, muon.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.einsum("btm,emn->btn", self.embedding(tokens), self.layers).tanh())
        return logits


def stacked() -> nn.Module:
    torch.manual_seed(0)
    return Experts()


def both(model: nn.Module, kind: Any = zero_core.Muon, **options: Any) -> list[torch.optim.Optimizer]:
    return pair(model.named_parameters(), options, kind)


def plain(model: nn.Module, optimizers: Any) -> dict[str, Tensor]:
    muon.steps(zero_core.JointOptimizer(*optimizers) if len(optimizers) > 1 else optimizers[0], model, 0, STEPS)
    return parameters_of(model)


def with_empty(model: nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
    """The same, and groups without parameters, which change nothing."""
    matrices, vectors = both(model, **options)
    vectors.add_param_group({"params": []})
    empty: Any = {"params": []}
    return [type(matrices)([empty, matrices.param_groups[0], empty]), vectors]


CASES = [(make, place, both) for make in (built, stacked) for place in ("none", "host", "nvme", "whole")]
CASES += [(built, "none", with_empty), (built, "host", with_empty)]


@pytest.mark.parametrize("make, place, optimizers", CASES)
@pytest.mark.parametrize("orthogonal", ["float32", "bfloat16"])
def test_it_has_its_own_bits_on_every_tier(make: Any, place: str, optimizers: Any, orthogonal: str) -> None:
    expected, model = make(), make()
    expected = plain(expected, both(expected, orthogonal=orthogonal))
    mine = optimizers(model, orthogonal=orthogonal)
    optimizer = zero_core.shard(model, mine, store=muon.store_of(Run(place)), expert_bytes=None)
    plain(model, [optimizer])
    assert not apart(kit.named_values(model), expected)
    optimizer.close()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
    {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "adjust_lr_fn": "original"},
]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")
@pytest.mark.parametrize("options", OPTIONS)
def test_in_bf16_it_has_the_bits_of_torch(options: dict[str, Any]) -> None:
    model, theirs = built(), built()
    mine = plain(model, both(model, orthogonal="bfloat16", **options))
    assert not apart(mine, plain(theirs, both(theirs, torch.optim.Muon, **options)))
    model = built()
    assert apart(plain(model, both(model, **options)), mine), "fp32 would be bf16"


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")
@pytest.mark.parametrize("place", [None, "none", "host"])
def test_it_goes_on_from_the_state_dict_of_torchs(place: str | None) -> None:
    """Which has no `orthogonal`. Fails if a step then raises KeyError."""
    theirs, options = built(), {"adjust_lr_fn": "match_rms_adamw"}
    stock = both(theirs, torch.optim.Muon, **options)
    plain(theirs, stock)
    saved = copy.deepcopy([each.state_dict() for each in stock])  # torch loads the tensors themselves
    model = built()
    model.load_state_dict(theirs.state_dict())
    mine: Any = both(model, orthogonal="bfloat16")
    if place is None:
        for each, state in zip(mine, saved, strict=True):
            each.load_state_dict(state)
    else:
        mine = [zero_core.shard(model, mine, store=muon.store_of(Run(place)))]
        mine[0].load_state_dict(saved)
    plain(model, mine)
    found = parameters_of(model) if place is None else kit.named_values(model)
    assert not apart(found, plain(theirs, stock))


@pytest.mark.parametrize("shape, factor", [((6, 24), 0.5), ((24, 6), 1.0)])
def test_the_unclamped_scale_of_torch_2_15(shape: tuple[int, int], factor: float) -> None:
    """sqrt(rows / columns), where "original" has at least 1."""
    moved = []
    for scale in ("original", "spectral_unclamped"):
        p = nn.Parameter(torch.zeros(shape))
        optimizer = zero_core.Muon([p], lr=1.0, adjust_lr_fn=scale)
        p.grad = torch.linspace(-1, 1, p.numel()).view(shape).sin()
        optimizer.step()
        moved.append(p.detach())
    assert torch.allclose(moved[1], moved[0] * factor, rtol=1e-6)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")
def test_without_nesterov_a_bf16_parameter_keeps_its_momentum_as_from_torch_2_15_on() -> None:
    kept = []
    for kind in (zero_core.Muon, torch.optim.Muon):
        p = nn.Parameter(torch.zeros(8, 8, dtype=torch.bfloat16))
        optimizer = kind([p], nesterov=False)
        p.grad = torch.linspace(-1, 1, 64).view(8, 8).cos().bfloat16()
        optimizer.step()
        kept.append(optimizer.state[p]["momentum_buffer"])
    mean = torch.zeros(8, 8, dtype=torch.bfloat16).lerp_(p.grad, 1 - 0.95)
    assert torch.equal(kept[0], mean)
    before = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)
    assert torch.equal(kept[1], mean) is not before, "torch's own, which divides the momentum by its norm in place"


@pytest.mark.promise("muon-experts")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(6, 7, 5), (6, 64, 48), (3, 301, 203)])
def test_a_group_of_a_stack_has_the_bits_of_the_stack(shape: tuple[int, ...], threads: int) -> None:
    """Sizes that no vector register divides, and for which a loop over the whole stack is cut between threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    stack = nn.Parameter(torch.randn(shape, generator=generator))
    parts = slice(0, 1), slice(1, None)
    groups = [nn.Parameter(stack.detach()[part].clone()) for part in parts]
    ours, theirs = zero_core.Muon([stack], lr=0.1), zero_core.Muon(groups, lr=0.1)
    for _ in range(3):
        stack.grad = torch.randn(shape, generator=generator)
        stack.grad[0] = 0.0
        for group, part in zip(groups, parts, strict=True):
            group.grad = stack.grad[part].clone()
        ours.step()
        theirs.step()
    torch.set_num_threads(before)
    assert torch.equal(stack, torch.cat([group.detach() for group in groups]))


def test_fp32_makes_singular_values_as_the_polynomial_does() -> None:
    """In double, on the singular values alone; bf16 is a hundred times further away."""
    matrix = torch.randn(40, 24, generator=torch.Generator().manual_seed(0))
    a, b, c = coefficients = (3.4445, -4.775, 2.0315)
    values = torch.linalg.svdvals(matrix.double())
    values /= values.norm()
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5

    def off(dtype: torch.dtype) -> float:
        found = zero_core.optim.muon.newton_schulz(matrix, coefficients, steps=5, eps=1e-7, dtype=dtype)
        return float((torch.linalg.svdvals(found.double()).sort().values - values.sort().values).abs().max())

    assert off(torch.float32) < 1e-5 < 1e-3 < off(torch.bfloat16)


def train_alone(model: nn.Module, kind: Any, place: str | None = None) -> Any:
    """Matrices alone, by a schedule of rate and momentum."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(muon.is_matrix(name, parameter))
    optimizer = kind([p for p in model.parameters() if p.requires_grad])
    optimizer = zero_core.shard(model, optimizer, store=muon.store_of(Run(place))) if place else optimizer
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=6)
    for step in range(4):
        kit.step(optimizer, muon.loss_of(model, muon.tokens_of(step)))
        scheduler.step()
    return optimizer


KINDS = [zero_core.Muon, *([torch.optim.Muon] if hasattr(torch.optim, "Muon") else [])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["none", "nvme"])
def test_a_schedule_of_rate_and_momentum_is_that_of_plain_torch(place: str, kind: Any) -> None:
    theirs, model = built(), built()
    plainly, optimizer = train_alone(theirs, kind), train_alone(model, kind, place)
    assert optimizer.param_groups[0]["momentum"] == plainly.param_groups[0]["momentum"] != 0.95
    assert not apart(kit.named_values(model), parameters_of(theirs))
    optimizer.close()


@pytest.mark.parametrize("place", ["none", "nvme"])
def test_a_matrix_without_elements_is_saved_as_its_optimizer_has_it(place: str, tmp_path: Any) -> None:
    """Fails if a checkpoint has the states of both optimizers of it."""

    def made() -> tuple[Any, Any]:
        model = nn.Linear(4, 4)
        model.nothing = nn.Parameter(torch.empty(0, 3))
        pair = [zero_core.Muon([model.weight, model.nothing]), zero_optim_cpu.AdamW([model.bias], threads=1)]
        return model, zero_core.shard(model, pair, store=muon.store_of(Run(place)))

    model, optimizer = made()
    kit.step(optimizer, model(torch.ones(1, 4)).square().sum())
    zero_core.checkpoint.save(tmp_path, model, optimizer)
    found = kit.named_values(model)
    optimizer.close()
    model, optimizer = made()
    zero_core.checkpoint.load(tmp_path, model, optimizer)
    assert not apart(kit.named_values(model), found) and model.nothing.shape == (0, 3)
    optimizer.close()


@pytest.mark.advice("Muon with {}={}: choose one of {}")
def test_what_it_cannot_do_is_refused() -> None:
    vector, matrix = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ValueError, match=r"shape \(4,\): give it matrices and stacks .* to an AdamW"):
        zero_core.Muon([vector])
    for options, told in (
        ({"orthogonal": "float16"}, "choose one of float32, bfloat16"),
        ({"adjust_lr_fn": "none"}, "choose one of original, match_rms_adamw"),
        ({"momentum": -1}, "give rates of at least 0"),
    ):
        with pytest.raises(ValueError, match=told):
            zero_core.Muon([matrix], **options)
    zero_core.Muon([matrix], orthogonal="bfloat16", adjust_lr_fn="original", momentum=0)
    torch.optim.AdamW([vector])
