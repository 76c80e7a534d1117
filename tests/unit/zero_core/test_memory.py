"""The closed formulas against hand-written numbers and against each other."""

import pytest
import torch

from zero_core import memory
from zero_core.errors import StageError

PSI = 1 << 20


@pytest.mark.promise("estimate-table-1")
def test_table_1_of_the_paper() -> None:
    """7.5 billion parameters on 64 ranks: 120, 31.4, 16.6 and 1.9 GB; stage 1 has a reduced shard of gradients more."""
    psi, ranks = 7_500_000_000, 64
    rows = [memory.estimate(psi, ranks, stage, param_dtype=torch.bfloat16) for stage in (0, 1, 2, 3)]
    totals = [(r.parameters_bytes + r.gradients_bytes + r.optimizer_bytes) / 1e9 for r in rows]
    totals[1] -= 2 * psi / ranks / 1e9
    assert [round(total, 1) for total in totals] == [120.0, 31.4, 16.6, 1.9]


@pytest.mark.promise("no-sync-memory")
@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.float32, 4), (torch.bfloat16, 2)])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_no_sync_keeps_a_whole_fp32_gradient_and_sends_one(stage: int, dtype: torch.dtype, itemsize: int) -> None:
    def found(ranks: int = 4, **options: bool) -> memory.Estimate:
        return memory.estimate(PSI, ranks, stage, param_dtype=dtype, accumulate=4, **options)

    shard = PSI if stage == 0 else PSI // 4
    assert found().gradients_bytes == 4 * shard
    assert found(no_sync=True).gradients_bytes == 4 * PSI + itemsize * shard
    assert found(no_sync=True).moved.reduced_numel == found().moved.reduced_numel // 4 == PSI * 3 // 4
    assert found(1, no_sync=True) == found(1)  # one rank has nothing to hold back


@pytest.mark.promise("frozen-in-plan")
def test_frozen_parameters_have_no_gradient_no_state_and_no_master_and_are_not_reduced() -> None:
    lora = memory.estimate(PSI, 4, 3, trainable_numel=PSI // 16)
    assert (lora.moved.gathered_numel, lora.moved.reduced_numel) == (2 * PSI * 3 // 4, PSI // 16 * 3 // 4)
    for stage, gathered in ((2, PSI), (0, PSI // 16)):
        assert memory.estimate(PSI, 4, stage, trainable_numel=PSI // 16).moved.gathered_numel == gathered * 3 // 4
    assert (lora.gradients_bytes, lora.optimizer_bytes) == (4 * PSI // 64, 8 * PSI // 64)
    assert lora.parameters_bytes == PSI
    lora = memory.estimate(PSI, 4, 3, trainable_numel=PSI // 16, param_dtype=torch.bfloat16)
    assert lora.optimizer_bytes == 12 * PSI // 64
    packed = memory.estimate(PSI, 4, 3, trainable_numel=PSI // 16, frozen_dtype=torch.uint8)
    assert packed.parameters_bytes == (4 * PSI // 16 + PSI - PSI // 16) // 4


@pytest.mark.parametrize(
    ("kind", "options", "states"),
    [
        *(("AdamW", {"amsgrad": True}, 3), ("Adam", {}, 2), ("SGD", {}, 0), ("SGD", {"momentum": 0.9}, 1)),
        *(("RMSprop", {"momentum": 0.9, "centered": True}, 3), ("Adagrad", {}, 1)),
    ],
)
def test_states_of_an_optimizer_equal_what_torch_keeps(kind: str, options: dict, states: int) -> None:
    """Counted against the tensors of the parameter's shape that torch itself makes in a step."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = getattr(torch.optim, kind)([parameter], **options)
    parameter.grad = torch.ones(3)
    optimizer.step()
    kept = sum(1 for v in optimizer.state[parameter].values() if isinstance(v, torch.Tensor) and v.shape == (3,))
    assert memory.optimizer_states(optimizer) == states == kept


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(StageError, match="stage=4"):
        memory.estimate(PSI, 2, 4)
    for told, options in (("muon", {"optimizer": "muon"}), ("trainable_numel", {"trainable_numel": PSI + 1})):
        with pytest.raises(ValueError, match=told):
            memory.estimate(PSI, 2, 3, **options)
    with pytest.raises(ValueError, match="world_size=0"):
        memory.estimate(PSI, 0, 3)
