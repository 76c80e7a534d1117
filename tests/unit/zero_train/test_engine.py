"""What is assembled: a store where the plan needs one, none where everything stays on a device of its own."""

from contextlib import ExitStack, nullcontext

import pytest
import torch

from zero_train.errors import ConfigError
from zero_train.run import assemble, planning
from zero_train.run.ranks import Ranks
from zero_train.settings import compose


def test_assembled_without_a_store_the_device_store_runs_the_optimizer():
    """On the CPU here, by the plan of a GPU that is described: fails if the shards are handed to a tiered store."""
    described = ["hardware.device=cuda", "hardware.device_gib=8", "hardware.host_gib=8", "hardware.nvme_gib=8"]
    placed = ["offload=auto", "offload.nvme_paths=[/]"]
    composed = compose.compose(["recipe=tiny", "precision=bf16", "run.dir=unused", *placed, *described])
    draft = assemble.draft(composed)
    plan = planning.make(composed, draft.model, Ranks(), draft.step)
    with assemble.assembled(draft, plan, composed, Ranks()) as ready:
        assert ready.store is None
        assert ready.usage()["device_bytes"] == ready.resident_bytes >= plan.total("device")
        assert ready.usage()["host_bytes"] == 0


@pytest.mark.advice("; change one of them", "cannot use offload.nvme_paths={}: {}; change io.backend")
def test_a_folder_that_cannot_hold_a_slab_is_refused_with_the_keys_to_change(tmp_path):
    composed = compose.compose(["recipe=tiny", "run.dir=unused", "offload=nvme", "io.allow_memory=true"])
    with ExitStack() as stack:
        with pytest.raises(ConfigError, match="cannot use offload.nvme_paths=.*none.*; change offload.nvme_paths$"):
            assemble.make_slab(composed, [tmp_path / "none"], stack)
        assert assemble.make_slab(composed, [tmp_path], stack).backend


@pytest.mark.promise("offload-rows-key")
@pytest.mark.parametrize(
    ("words", "rows", "tokens"),
    [
        ("offload.rows=1", 1, None),
        ("offload.rows=2", None, None),
        ("", None, None),
        ("offload.tokens=16 data.sequence_length=64", None, 16),
        ("offload.tokens=64 data.sequence_length=64 offload.rows=1", 1, None),
    ],
)
def test_units_are_told_the_rows_and_tokens_only_where_they_cut_a_batch(monkeypatch, words, rows, tokens):
    """A micro-batch has two rows. Fails if the rows of the plan do not reach the units, or all of them do."""
    given = []
    monkeypatch.setattr(
        assemble.zero_offload, "offload_activations", lambda *_, **options: given.append(options) or nullcontext()
    )
    options = ["recipe=tiny", "precision=bf16", "run.dir=unused", "offload=host", "offload.activations=recompute"]
    composed = compose.compose([*options, *words.split()])
    draft = assemble.draft(composed)
    plan = planning.make(composed, draft.model, Ranks(), draft.step)
    with assemble.assembled(draft, plan, composed, Ranks()):
        pass
    assert given == [{"rows": rows, "tokens": tokens, "row_modules": [], "token_modules": []}]


@pytest.mark.promise("train-muon")
def test_muon_has_the_matrices_inside_of_the_model_and_adamw_the_rest():
    """Fails if embeddings, the head or vectors reach Muon, or a key reaches neither."""
    words = ["optim.matrix_lr=0.05", "optim.adjust_lr=match_rms_adamw", "optim.momentum=0.8", "optim.eps=1e-5"]
    composed = compose.compose(["recipe=tiny", "run.dir=unused", "optim=muon", "optim.betas=[0.8,0.7]", *words])
    model = assemble.model_of(composed)
    muon, decayed, vectors = assemble.make_optimizer(composed, model).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    found = [{names[id(p)] for p in group["params"]} for group in (muon, decayed, vectors)]
    assert sum(map(len, found)) == len(names)
    assert all("layers" in name and name.endswith("proj.weight") for name in found[0]) and len(found[0]) > 6
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in found[1]} <= {"embed_tokens", "lm_head"}
    assert (muon["lr"], muon["momentum"], muon["adjust_lr_fn"]) == (0.05, 0.8, "match_rms_adamw")
    for group, decay in ((decayed, 0.1), (vectors, 0.0)):
        given = (group["lr"], group["betas"], group["eps"], group["weight_decay"])
        assert given == (composed.optim.lr, (0.8, 0.7), 1e-5, decay)


@pytest.mark.promise("train-muon-experts")
def test_muon_has_the_matrices_of_stacked_experts_and_adamw_their_biases():
    """gpt-oss has biases of all experts in one tensor of two dimensions, which is no matrix."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16, "vocab_size": 64}
    made = transformers.GptOssConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, num_local_experts=4)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    names = {id(p): name for name, p in model.named_parameters()}
    for orthogonal in ("bfloat16", "float32"):
        given = ["recipe=tiny", "run.dir=unused", "optim=muon", f"optim.orthogonal={orthogonal}"]
        muon, *others = assemble.make_optimizer(compose.compose(given), model).param_groups
        experts = {name.rpartition(".")[2] for p in muon["params"] if "experts" in (name := names[id(p)])}
        assert experts == {"gate_up_proj", "down_proj"} and muon["orthogonal"] == orthogonal
        rest = {names[id(p)].rpartition(".")[2] for group in others for p in group["params"]}
        assert {"gate_up_proj_bias", "down_proj_bias", "sinks"} <= rest


@pytest.mark.promise("nothing-offloaded")
def test_without_offload_a_cpu_updates_as_host_memory_does(monkeypatch):
    """What stays on the device lies in host memory there: the same store, with the kernels where they are installed."""
    composed = compose.compose(["recipe=tiny", "run.dir=unused", "precision=bf16", "offload=none"])
    draft = assemble.draft(composed)
    plan = planning.make(composed, draft.model, Ranks(), draft.step)
    store = assemble.make_store(composed, draft, plan, None)
    assert store.step is draft.step is not None
    store.close()
    monkeypatch.setattr(assemble, "find_spec", lambda name: None)
    alone = assemble.draft(composed)
    assert alone.step is None and all(group["fused"] for group in alone.optimizer.param_groups)
