"""What is refused beside torch.optim.Muon, with ways out that work, and other optimizers that need whole parameters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_core
import zero_nvme
from examples.soap import SOAP
from tests import kit
from tests.chunks import small_chunks
from tests.integration.zero_offload import test_muon as muon
from tests.integration.zero_offload.test_muon import Run, apart, built, pair, parameters_of, sharded, steps
from zero_core.comm import MessageCollectives
from zero_core.errors import UnsupportedOptimizerError, ZeroError
from zero_offload import MemoryByteStore, PlacementError, TieredStore

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")


def step_once(optimizer: Any, model: nn.Module) -> None:
    steps(optimizer, model, 0, 1)
    optimizer.close()


class EqualRows:
    """Collectives of gloo without those of shards of different sizes."""

    def __init__(self, axis: Any, pool: Any) -> None:
        self._of = MessageCollectives(axis, pool)

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_rows"):
            raise AttributeError(name)
        return getattr(self._of, name)


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named])


@pytest.mark.promise("muon-refused")
@pytest.mark.parametrize("stage", [1, 2, 3])
@kit.on_ranks(2)
def test_collectives_of_equal_shards_alone_are_refused(stage: int) -> None:
    model = built()
    before = parameters_of(model)
    told = r"4 parameters of optimizer Muon and AdamW are needed whole \(layers.0.up.weight .*shards of 2 ranks "
    with pytest.raises(UnsupportedOptimizerError, match=told + ".*zero_core.comm.RowCollectives.*stage=0"):
        zero_core.shard(model, pair(model.named_parameters()), stage=stage, collectives=EqualRows)
    assert not apart(parameters_of(model), before), "nothing was changed"
    for given, options in ((pair, {"stage": 0}), (adamw, {"stage": stage})):
        model = built()
        step_once(zero_core.shard(model, given(model.named_parameters()), collectives=EqualRows, **options), model)


@pytest.mark.advice(
    "Merge the elementwise ones into one, with a group for each rate", 'pass optimizer_contract="by itself"'
)
@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.promise("muon-refused")
def test_two_elementwise_optimizers_are_refused_on_tiers(beside: bool) -> None:
    """Beside Muon, and alone."""
    model = built()
    muon, rest = pair(model.named_parameters())
    first, *others = (rest if beside else adamw(model.named_parameters())).param_groups[0]["params"]
    given = [*([muon] if beside else []), torch.optim.AdamW(others), torch.optim.SGD([first], lr=0.1)]
    with pytest.raises(
        TypeError, match="^AdamW and SGD cannot be updated on tiers together, which take one elementwise"
    ):
        zero_core.shard(model, given, store=TieredStore())
    step_once(zero_core.shard(model, given, store=TieredStore(), optimizer_contract="by itself"), model)
    model = built()
    muon, rest = pair(model.named_parameters())
    first, *others = (rest if beside else adamw(model.named_parameters())).param_groups[0]["params"]
    one = torch.optim.AdamW([{"params": others}, {"params": [first], "lr": 0.1}])
    step_once(zero_core.shard(model, [muon, one] if beside else one, store=TieredStore()), model)


@pytest.mark.advice("give it torch.optim.Optimizers, each over")
@pytest.mark.promise("muon-refused")
def test_joint_optimizers_that_cannot_be_are_refused() -> None:
    model = built()
    muon, rest = pair(model.named_parameters())
    with pytest.raises(ValueError, match="the same 4 parameters .*: give each parameter to one of them"):
        zero_core.shard(model, [muon, adamw(model.named_parameters())])
    with pytest.raises(ValueError, match="JointOptimizer.Model.: give it torch.optim.Optimizers"):
        zero_core.JointOptimizer(model)  # type: ignore[arg-type]
    (group,) = rest.param_groups
    *others, last = group["params"]
    both = zero_core.JointOptimizer(muon, torch.optim.AdamW(others))
    with pytest.raises(ValueError, match="call add_param_group of one of its `optimizers`"):
        both.add_param_group({"params": [last]})
    both.optimizers[1].add_param_group({"params": [last], "lr": 0.5})
    assert [len(group["params"]) for group in both.param_groups] == [4, len(others), 1]
    optimizer = zero_core.shard(model, both)
    for each in both.optimizers:
        with pytest.raises(ZeroError, match="was given to zero_core.shard"):
            each.step()
    step_once(optimizer, model)


@pytest.mark.advice("give ByteStores whose alignment divides")
@pytest.mark.promise("muon-refused")
def test_a_tier_whose_blocks_are_larger_than_a_matrix_begins_at_is_refused(tmp_path: Path) -> None:
    model = built()
    disk = MemoryByteStore()
    disk.alignment = 1 << 16
    with pytest.raises(
        PlacementError, match=r"updates parameter layers.0.up.weight whole.*multiples of 65536 bytes: give ByteStores"
    ):
        zero_core.shard(model, pair(model.named_parameters()), store=TieredStore("nvme", nvme=disk))
    with zero_nvme.Slab([tmp_path], direct=False, allow_memory=True) as slab:
        store = TieredStore("nvme", nvme=slab)
        step_once(zero_core.shard(model, pair(model.named_parameters()), store=store), model)


@pytest.mark.advice("give each optimizer the parameters that it had")
@pytest.mark.promise("muon-refused")
def test_a_state_that_another_optimizer_keeps_is_refused() -> None:
    for given in (pair, adamw):
        model = built()
        optimizer = zero_core.shard(model, given(model.named_parameters()), store=TieredStore())
        weight = model.get_parameter("layers.0.up.weight")
        steps(optimizer, model, 0, 1)
        if given is pair:
            with pytest.raises(UnsupportedOptimizerError, match="one of Muon and AdamW. keeps no state 'exp_avg'"):
                zero_core.set_full_state(weight, "exp_avg", torch.ones(weight.shape))
        else:
            zero_core.set_full_state(weight, "exp_avg", torch.ones(weight.shape))
            assert bool((zero_core.full_state(weight, "exp_avg") == 1).all())
        optimizer.close()


@pytest.mark.promise("muon-refused")
def test_a_matrix_with_other_strides_is_refused_and_trains_as_a_contiguous_one() -> None:
    """Plain torch multiplies a transposed matrix by another kernel, whose bits a contiguous shard cannot have."""

    def transposed(model: nn.Module) -> tuple[nn.Module, nn.Parameter]:
        name, first = next((n, p) for n, p in model.named_parameters() if p.ndim == 2 and n.startswith("layers"))
        first.data = first.data.T.contiguous().T
        assert not first.is_contiguous(), name
        return model, first

    model, first = transposed(built())
    with pytest.raises(UnsupportedOptimizerError, match=r"layers.* has the strides \(1, .* make it so with p.data"):
        zero_core.shard(model, pair(model.named_parameters()))
    first.data = first.data.contiguous()  # the way out
    optimizer = zero_core.shard(model, pair(model.named_parameters()))
    steps(optimizer, model, 0, muon.STEPS)
    elementwise, _ = transposed(built())
    step_once(zero_core.shard(elementwise, torch.optim.AdamW(elementwise.parameters())), elementwise)
    assert not apart(kit.named_values(model), muon.plain(Run(clip=None)))
    optimizer.close()


def only_matrices(model: nn.Module) -> list[torch.optim.Optimizer]:
    inside = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    others = [p for name, p in model.named_parameters() if not (p.ndim == 2 and "layers" in name)]
    return [torch.optim.Muon(inside), torch.optim.AdamW(others)]


@pytest.mark.promise("muon-refused")
def test_rows_of_stacked_experts_are_refused_for_what_is_needed_whole() -> None:
    """gpt-oss has biases of all experts in one matrix."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GptOssConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        intermediate_size=32, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=32, pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)

    with pytest.raises(
        UnsupportedOptimizerError, match=r"optimizer Muon must update .*experts\S+ as one.*expert_bytes=None"
    ):
        zero_core.shard(model, only_matrices(model), expert_bytes=1 << 12)
    optimizer = zero_core.shard(model, only_matrices(model), expert_bytes=None)
    tokens = muon.tokens_of(0) % 64
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.close()


# -- others that need whole parameters ---------------------------------------------------------------------------------


@pytest.mark.promise("needs-whole")
@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="Python 3.10 has no notes")
@pytest.mark.parametrize("place", ["host", "nvme", "homes"])
def test_an_update_that_fails_says_of_which_matrix(place: str) -> None:
    class Failing(SOAP):
        needs_uncut = SOAP.needs_uncut  # of this step too

        def step(self, closure: Any = None) -> None:
            super().step()
            if any(p.numel() > 30_000 and float(state["step"]) == 3 for p, state in self.state.items()):
                raise RuntimeError("eigh did not converge")

    with small_chunks():
        model = built()
        optimizer = sharded(Run(place, clip=None), model, pair(model.named_parameters(), kind=Failing))
        with pytest.raises(RuntimeError, match="eigh did not converge") as caught:
            steps(optimizer, model, 0, muon.STEPS + 1)
        assert any("in step 3 of layers." in note for note in caught.value.__notes__)
        optimizer.close()


@pytest.mark.promise("needs-whole")
def test_an_optimizer_that_needs_only_some_parameters_whole_is_refused_on_tiers() -> None:
    model = built()
    with pytest.raises(TypeError, match="SOAP needs some parameters whole and others not"):
        zero_core.shard(model, SOAP(model.parameters()), store=TieredStore())
    step_once(zero_core.shard(model, pair(model.named_parameters(), kind=SOAP), store=TieredStore()), model)


class Counted(SOAP):
    """Keeps a number as well. `late`: and another state from the third step on."""

    needs_uncut, late = SOAP.needs_uncut, False  # of this step too

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for p, state in self.state.items():
            state["product"] = state.get("product", torch.ones(())) * 0.5
            if self.late and state["step"] > 2:
                state["late"] = torch.zeros_like(p)


class Later(Counted):
    late = True


@pytest.mark.promise("states-refused")
def test_states_that_come_later_are_refused_on_tiers() -> None:
    model = built()
    optimizer = zero_core.shard(model, pair(model.named_parameters(), kind=Later), store=TieredStore())
    steps(optimizer, model, 0, 2)
    with pytest.raises(
        Exception,
        match=r"added, removed or resized the state 'late' of parameter layers.*let the first step make all states",
    ):
        steps(optimizer, model, 2, 4)
    optimizer.close()


@pytest.mark.promise("whole-numbers")
def test_numbers_of_a_parameter_that_is_needed_whole_are_kept_on_tiers() -> None:
    model = built()
    optimizer = zero_core.shard(model, pair(model.named_parameters(), kind=Counted), store=TieredStore())
    steps(optimizer, model, 0, muon.STEPS)
    product = zero_core.full_state(model.get_parameter("layers.0.up.weight"), "product")
    assert product is not None and product.shape == () and product == 0.5**muon.STEPS
    optimizer.close()
