"""What the planner reads from a model is what `shard` gives a store."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import zero_core
import zero_offload
from tests import models
from zero_core.optim.device_store import DeviceStore
from zero_offload.planning.model_sizes import ModelSizes


class Mixed(nn.Module):
    """Its own unit has parameters of two dtypes, so it is two; and one of its children is called "root"."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.half_scale = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.root = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))


class Watched(DeviceStore):
    def attach(self, shards, *arguments, **options) -> None:
        self.specs = shards
        super().attach(shards, *arguments, **options)


class Quantised(nn.Module):
    """A linear layer with a table of integers, as quantised weights are kept, and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.table = nn.Parameter(torch.arange(4 << 20).remainder(8).to(torch.int8), requires_grad=False)
        self.flag = nn.Parameter(torch.tensor(True), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.table[:8] * self.flag


@pytest.mark.promise("frozen-in-plan")
def test_a_parameter_that_is_not_trained_costs_its_bytes_and_no_more() -> None:
    """4 MiB of int8: no gradient, no master, no states, and no more in another dtype of the model's."""
    model = Quantised()
    everything = {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme"}
    planned = zero_offload.plan(model, parameter_dtype=torch.float32, **everything)
    trained = [p for p in model.parameters() if p.requires_grad]
    numel, table = sum(p.numel() for p in trained), 4 << 20
    assert table <= planned.bytes_of("nvme", "parameters") < table + 4 * numel + 1024
    for kind in ("gradients", "optimizer"):
        assert planned.bytes_of("nvme", kind) < 16 * numel + 4096 * 8

    store = zero_offload.TieredStore(**everything, nvme=zero_offload.MemoryByteStore())
    sharded = zero_core.shard(model, torch.optim.SGD(trained, lr=0.1), store=store)
    held = store.describe().held
    assert held["nvme", "parameters"] == planned.bytes_of("nvme", "parameters")
    assert sum(unit.trained_numel for unit in ModelSizes.of(model).units) == numel
    sharded.close()


@pytest.mark.promise("plan-units")
def test_the_units_that_enclose_the_others_are_those_of_the_model_itself_whatever_their_names() -> None:
    """By name, "root:bfloat16" would be missed, and a child called "root" taken for the model."""
    model, store = Mixed(), Watched()
    planned = [(unit.name, unit.encloses) for unit in ModelSizes.of(model).units]
    zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), store=store).close()
    assert planned == [(spec.name, spec.encloses) for spec in store.specs]
    assert sorted(planned)[-3:] == [("root", False), ("root", True), ("root:bfloat16", True)]


class FourBit(nn.Parameter):
    """As bitsandbytes' Params4bit: two values a byte, and a scale for each 64 of them beside it."""

    quant_state: SimpleNamespace


def four_bit(inputs: int, outputs: int) -> nn.Linear:
    linear, count = nn.Linear(inputs, outputs, bias=False), inputs * outputs
    weight = FourBit(torch.empty(count // 2, 1, dtype=torch.uint8), requires_grad=False)
    weight.quant_state = SimpleNamespace(absmax=torch.empty(count // 64))
    linear.weight = weight
    return linear


class FourBitBlock(nn.Module):
    """The linears of a Llama block, and an adapter."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({name: four_bit(hidden, hidden) for name in "qkvo"})
        self.gate, self.up = four_bit(hidden, inner), four_bit(hidden, inner)
        self.down, self.adapter = four_bit(inner, hidden), nn.Linear(hidden, 16, bias=False)


class FourBitLlama(nn.Module):
    """Of the 3 B Llama of the benchmarks, on meta: nothing is allocated."""

    def __init__(self, hidden: int = 2560, inner: int = 8960, layers: int = 32, vocabulary: int = 8192) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=hidden, intermediate_size=inner, vocab_size=vocabulary)
        with torch.device("meta"):
            self.embedding = nn.Embedding(vocabulary, hidden, dtype=torch.bfloat16).requires_grad_(False)
            self.layers = nn.ModuleList(FourBitBlock(hidden, inner) for _ in range(layers))
            self.head = nn.Linear(hidden, vocabulary, bias=False, dtype=torch.bfloat16).requires_grad_(False)


@pytest.mark.promise("quantised")
def test_a_4_bit_base_of_3_billion_parameters_takes_at_most_0_6_bytes_of_each() -> None:
    """Fails if the packed bytes are counted in the dtype that the model is computed in, or not at all."""
    model = FourBitLlama()
    matrices = 32 * (4 * 2560**2 + 3 * 2560 * 8960)
    numel = matrices + 2 * 8192 * 2560
    frozen = FourBitLlama()
    for block in frozen.layers:
        del block.adapter
    planned = zero_offload.plan(frozen, parameters="nvme", gradients="device", optimizer="device", tokens=1)
    assert 0.5 < planned.bytes_of("nvme", "parameters") / numel <= 0.6
    sizes, plain = ModelSizes.of(model), ModelSizes.of(frozen)
    assert numel - 8192 * 2560 == plain.compute_numel  # what is looked up is not multiplied; what is packed is unpacked
    assert sizes.compute_numel - plain.compute_numel == 32 * 16 * 2560
    assert sizes.saved_bytes_per_token == 24 * 2560 + 8 * 8960  # recognised as a gated block


@pytest.mark.promise("experts-recomputed")
def test_a_token_of_a_mixture_meets_its_experts_alone() -> None:
    """2 of 4 experts, of width 32 and inner width 40. A block that recomputes ends before them, as it saves nothing."""
    model = models.build("moe")
    unmet = sum(p.numel() // 2 for p in model.parameters() if p.dim() == 3)
    sizes = ModelSizes.of(model, expert_bytes=1)
    assert sizes.compute_numel == sizes.numel - model.get_input_embeddings().weight.numel() - unmet
    assert sizes.saved_bytes_per_token == 24 * 32 + 2 * (4 * 32 + 6 * 40)
    assert [unit.again for unit in sizes.units if unit.depth] == 2 * 4 * [False]
