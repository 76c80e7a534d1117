"""One training step with the state in each tier, through pytest-benchmark: `nox -s bench` saves its JSON.

Claim: none; it shows a change of step time. Rounds of one tier follow each other, so compare medians of one run only,
and take ratios for publication from the programs beside this file. With --benchmark-disable each tier takes one step.
"""

from __future__ import annotations

import tempfile

import pytest
import torch

import zero_core
import zero_nvme
import zero_offload
import zero_optim_cpu

transformers = pytest.importorskip("transformers")


def model_of(hidden_size: int, layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 64,
        vocab_size=512,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("tier", ["none", "host", "nvme"])
def test_step(benchmark, tier):
    smoke = benchmark.disabled
    model = model_of(64 if smoke else 512, 2 if smoke else 8)
    tokens = torch.randint(0, 512, (2, 32 if smoke else 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory(dir=".") as folder:  # beside the sources: /tmp may be memory
        slab = zero_nvme.Slab([folder]) if tier == "nvme" else None
        store = None
        if tier != "none":
            step = zero_optim_cpu.CpuStep()
            store = zero_offload.TieredStore(parameters=tier, optimizer=tier, nvme=slab, step=step)
        optimizer = zero_core.shard(model, optimizer, stage=3, max_grad_norm=1.0, store=store)
        losses = []

        def one_step() -> None:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))

        try:
            benchmark.pedantic(one_step, rounds=10, warmup_rounds=2)
            one_step()
            assert losses[-1] < losses[0]
        finally:
            optimizer.close()
            if slab is not None:
                slab.close()
