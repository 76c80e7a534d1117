"""A mixture of experts from files into groups, without a whole stack of experts in memory."""

import pytest
import torch

import zero_core
import zero_hf
from tests.integration.zero_core import mixtures
from tests.integration.zero_core.mixtures import GROUP, STACKS, adamw, grouped
from zero_core.checkpoint.pretrained import FileValues
from zero_core.checkpoint.safetensors import Reader


@pytest.mark.promise("from-pretrained-experts")
@pytest.mark.parametrize("stacked", [True, False])
def test_from_pretrained_reads_one_group_of_experts_at_a_time(tmp_path, monkeypatch, stacked):
    """stacked: files hold the stacks, as zero_core writes them; else each expert apart, as transformers does."""
    from transformers import AutoModelForCausalLM

    stock = mixtures.qwen()
    zero_core.save_pretrained(stock, tmp_path) if stacked else stock.save_pretrained(tmp_path)
    values, pieces = [], []
    for kind, sizes in ((FileValues, values), (Reader, pieces)):
        read = kind.read

        def counting(self, *given, read=read, sizes=sizes):
            sizes.append(given[-1] - given[-2])
            return read(self, *given)

        monkeypatch.setattr(kind, "read", counting)
    model = zero_hf.from_pretrained(AutoModelForCausalLM, tmp_path, attn_implementation="eager")
    assert not values and not pieces
    run = zero_hf.shard(model, adamw(model.parameters()), zero_hf.ZeroConfig(offload="host", expert_bytes=GROUP))
    assert run.plan.store.held == run.store.describe().held
    stack = stock.get_parameter(f"{STACKS[0]}.gate_up_proj")
    assert len(grouped(model)) == 8
    assert max(values) == stack.numel() // 4
    assert sum(pieces) == sum(p.numel() for p in stock.parameters())  # each value once
    with zero_core.gathered(model):
        assert all(map(torch.equal, model.parameters(), stock.parameters()))
    run.close()
