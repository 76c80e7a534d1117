"""Models of transformers on the simulated device: forward, backward and AdamW with the CPU's bits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

zero_sim = pytest.importorskip("zero_sim", exc_type=ImportError)
transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if name == "llama":
        config = transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=128,
            attn_implementation="eager",
        )
        return transformers.LlamaForCausalLM(config)
    config = transformers.GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=4,
        vocab_size=128,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="eager",
    )
    return transformers.GPT2LMHeadModel(config)


def trained(model: torch.nn.Module, tokens: torch.Tensor, options: dict[str, Any]) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    losses = []
    for batch in tokens:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [t.detach().cpu() for t in (*losses, *model.parameters())]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=["for", "foreach", "fused"]
)
def test_training_has_the_cpus_bits_and_never_waits(name: str, options: dict[str, bool]):
    """Fails if one kernel of a step reads too early, or if one makes the host wait where a GPU's would not."""
    here = model(name)
    there = copy.deepcopy(here).to("sim")
    tokens = torch.randint(0, 128, (3, 2, 16), generator=torch.Generator().manual_seed(1))
    expected = trained(here, tokens, options)
    tokens = tokens.to("sim")
    torch.sim.synchronize()
    zero_sim.configure(latency_us=50, jitter_us=100)
    before = zero_sim.counts()
    found = trained(there, tokens, options)
    asked = zero_sim.counts() - before
    assert all(map(torch.equal, expected, found))
    assert asked.waits.total() <= len(found)  # the copies at the end
    assert not asked.unlike_cuda
    assert not zero_sim.take_races()
