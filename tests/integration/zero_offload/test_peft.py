"""PEFT as people write it: get_peft_model, then shard, and everything that PEFT does with a model after that.

Each test does the same with plain PEFT. On one rank, fp32 and the default store give its bits; tiers give the same bits
as each other, and are near. On two ranks, which see half of each batch, plain PEFT is trained on all of it.
"""

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests import kit

pytest.importorskip("peft", reason="peft is not installed: nox -s tests-all")
pytest.importorskip("transformers")

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from transformers import LlamaConfig, LlamaForCausalLM

import zero_core
from tests.integration.zero_core.toys import adamw
from tests.integration.zero_offload.training import tiered
from zero_core.errors import ChangedParameterError

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.promise("peft")]

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "bias": {"bias": "lora_only"},
    "rslora": {"use_rslora": True},
    "all": {"target_modules": "all-linear", "lora_dropout": 0.1},
}
PROMPT = torch.arange(8)[None]
WEIGHTS = "adapter_model.safetensors"


def base(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, attention_bias=True)).to(dtype)


def adapter(kind: str = "lora") -> LoraConfig:
    options = {"target_modules": ["q_proj", "v_proj"], **KINDS[kind]}
    return LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **options)


def build(kind: str = "lora", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(1)
    return get_peft_model(base(dtype), adapter(kind))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Its updates are as close as its gradients; AdamW's are not, where a gradient is near 0."""
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def make_store(tier: str | None) -> Any:
    return None if tier is None else tiered(tier, tile_numel=1 << 20)


def train(model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    """Mean losses of four rows a step, of which each rank has its part."""
    rank, size = kit.world()
    model.train()
    losses = []
    for step in range(first, last):
        tokens = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(step))[rank::size]
        torch.manual_seed(step)
        loss = model(input_ids=tokens, labels=tokens).loss
        kit.step(optimizer, loss)
        total = loss.detach() / size
        if size > 1:
            dist.all_reduce(total)
        losses.append(float(total))
    model.eval()
    return losses


@torch.no_grad()
def logits(model: Any) -> Tensor:
    model.eval()
    return model(input_ids=PROMPT).logits.clone()


def a_day_with_peft(model: Any, optimizer: Any, folder: Path, first: bool = True) -> dict[str, Any]:
    """What people do with an adapter: losses by name, logits, tokens, and the folders of what was saved."""
    found: dict[str, Any] = {"losses": train(model, optimizer, 0, 2)}
    with model.disable_adapter():
        found["disabled"] = logits(model)
    model.merge_adapter()
    found["merged"] = logits(model)
    model.unmerge_adapter()
    found["losses"] += train(model, optimizer, 2, 3)
    if not dist.is_initialized():
        found["tokens"] = model.generate(input_ids=PROMPT, max_new_tokens=4, do_sample=False)
    found["losses"] += train(model, optimizer, 3, 4)
    found["trained"] = logits(model)
    model.save_pretrained(folder / "adapter", is_main_process=first)
    found["adapter"] = load_file(folder / "adapter" / WEIGHTS) if first else {}
    whole = model.merge_and_unload()
    found["unloaded"] = logits(whole)
    whole.save_pretrained(folder / "whole", is_main_process=first)
    found["whole"] = load_file(folder / "whole" / "model.safetensors") if first else {}
    return found


@functools.cache
def plain(kind: str, dtype: torch.dtype, make: Any) -> dict[str, Any]:
    model = build(kind, dtype)
    with tempfile.TemporaryDirectory() as folder:
        return a_day_with_peft(model, make(model.parameters()), Path(folder))


def sharded(kind: str, dtype: Any, make: Any, stage: int, tier: str | None, folder: Path) -> dict[str, Any]:
    model, optimizer = kit.sharded(build(kind, dtype), make, stage=stage, store=make_store(tier))
    first = kit.world()[0] == 0
    found = a_day_with_peft(model, optimizer, folder, first)
    optimizer.close()
    return found


def assert_equal(found: dict[str, Any], expected: dict[str, Any], **close: float) -> None:
    """Bit for bit, or within `close` (rtol, atol)."""
    close = close or {"rtol": 0.0, "atol": 0.0}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **close, msg=lambda text, name=name: f"{name}: {text}")


ON_ONE = [*((kind, 3, None) for kind in KINDS), ("lora", 0, None), ("dora", 1, None), ("lora", 2, None)]


@pytest.mark.parametrize("kind, stage, tier", [*ON_ONE, *((kind, 3, "host") for kind in KINDS)])
def test_one_rank_gives_the_bits_of_plain_peft(
    ranks: Any, tmp_path: Path, kind: str, stage: int, tier: str | None
) -> None:
    """Over tiers, near them."""
    arguments = kind, torch.float32, adamw
    expected = ranks(1).run(plain, *arguments)[0]
    found = ranks(1).run(sharded, *arguments, stage, tier, tmp_path)[0]
    assert_equal(found, expected, **({} if tier is None else {"rtol": 1e-4, "atol": 1e-5}))
    if tier is not None:
        assert_equal(found, ranks(1).run(sharded, *arguments, stage, "nvme", tmp_path)[0])


@pytest.mark.parametrize("tier", [None, "nvme"])
def test_a_bf16_base_with_fp32_adapters(ranks: Any, tmp_path: Path, tier: str | None) -> None:
    """PEFT keeps the adapters of a 16-bit base in fp32, so nothing but the update can differ."""
    arguments = "lora", torch.bfloat16, adamw
    found, expected = ranks(1).run(sharded, *arguments, 3, tier, tmp_path)[0], ranks(1).run(plain, *arguments)[0]
    assert {value.dtype for value in found["adapter"].values()} == {torch.float32}
    assert {value.dtype for value in found["whole"].values()} == {torch.bfloat16}
    assert_equal(found, expected, **({} if tier is None else {"rtol": 0.02, "atol": 0.02}))


TWO = [*((kind, 3, None) for kind in KINDS if kind != "all")]
TWO += [("lora", 0, None), ("dora", 1, None), ("lora", 2, None), ("dora", 3, "nvme"), ("lora", 2, "host")]


@pytest.mark.parametrize("kind, stage, tier", TWO)
def test_two_ranks_are_near_plain_peft_on_the_joined_batch(
    ranks: Any, tmp_path: Path, kind: str, stage: int, tier: str | None
) -> None:
    expected = dict(ranks(1).run(plain, kind, torch.float32, sgd)[0])
    expected.pop("tokens")
    found, other = ranks(2).run(sharded, kind, torch.float32, sgd, stage, tier, tmp_path)
    assert_equal(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(found["unloaded"], other["unloaded"])


@pytest.mark.advice("use model.gradient_checkpointing_enable() or torch.utils.checkpoint")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("tier", [None, "nvme"])
def test_gradient_checkpointing_with_inputs_that_require_gradients(reentrant: bool, tier: str | None) -> None:
    found = []
    for store in (False, True):
        model = build()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
        optimizer = adamw(model.parameters())
        if store:
            optimizer = zero_core.shard(model, optimizer, store=make_store(tier))
        found.append(train(model, optimizer, 0, 3))
    assert found[1] == (found[0] if tier is None else pytest.approx(found[0], rel=1e-5))


def two_adapters(shard: bool, stage: int = 3) -> list[Any]:
    """Train the one, the other, the one, both; delete one, train the other."""
    model = build()
    torch.manual_seed(2)
    model.add_adapter("other", adapter("dora"))
    model.set_requires_grad(["default", "other"])  # before shard: both will be trained
    optimizer = sgd(model.parameters())
    if shard:
        optimizer = zero_core.shard(model, optimizer, stage=stage)
    found: list[Any] = []
    for number, names in enumerate(("default", "other", "default", ["default", "other"])):
        (model.base_model if isinstance(names, list) else model).set_adapter(names)
        found += [train(model, optimizer, number, number + 1), logits(model)]
    model.set_adapter("other")
    model.delete_adapter("default")
    return [*found, train(model, optimizer, 5, 7), logits(model)]


@pytest.mark.parametrize("size, stage", [(1, 3), (1, 0), (2, 3), (2, 1)])
def test_set_adapter_between_steps_changes_what_is_trained(ranks: Any, size: int, stage: int) -> None:
    """Fails if an adapter that is not active is stepped (momentum would move it), or an active one is not."""
    close = {"rtol": 0.0, "atol": 0.0} if size == 1 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(ranks(size).run(two_adapters, True, stage)[0], two_adapters(False), **close)


def test_an_adapter_that_was_frozen_at_shard_is_used_and_not_trained(tmp_path: Path) -> None:
    """As a reference adapter is. In torch this optimizer would train it, so a forward with gradients is refused."""
    models = [build(), build()]
    for model in models:
        torch.manual_seed(2)
        model.add_adapter("reference", adapter())
    optimizer = zero_core.shard(models[0], adamw(models[0].parameters()))
    for model in models:
        model.set_adapter("reference")
    assert torch.equal(logits(models[0]), logits(models[1]))
    with pytest.raises(ChangedParameterError, match=r"lora_A\.reference\.weight .*model\.set_requires_grad"):
        models[0](input_ids=PROMPT)
    for model in models:
        model.set_adapter("default")
    assert train(models[0], optimizer, 0, 2) == train(models[1], adamw(models[1].parameters()), 0, 2)
    state = zero_core.trained_state_dict(models[0], also=lambda name: "reference" in name)
    for model, options in zip(models, ({"state_dict": state}, {}), strict=True):
        model.save_pretrained(tmp_path / str(len(options)), **options)
    for name in (WEIGHTS, f"reference/{WEIGHTS}"):
        found, expected = (load_file(tmp_path / folder / name) for folder in ("1", "0"))
        assert_equal(found, expected)


def adapters_come_and_go(folder: Path, shard: bool) -> list[Any]:
    model = PeftModel.from_pretrained(base(), folder, is_trainable=True)
    optimizer: Any = adamw(model.parameters())
    if shard:
        optimizer = zero_core.shard(model, optimizer)
    found: list[Any] = [train(model, optimizer, 0, 2)]
    model.load_adapter(folder, "loaded")
    model.add_weighted_adapter(["default", "loaded"], [0.5, 0.25], "mixed")
    for name in ("loaded", "mixed"):
        model.set_adapter(name)
        found.append(logits(model))
    model.delete_adapter("mixed")
    model.set_adapter("default")
    model.load_adapter(folder, "default", is_trainable=True)  # into what is sharded
    return [*found, logits(model), train(model, optimizer, 2, 4)]


def test_adapters_are_loaded_mixed_and_deleted_after_shard(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    found, expected = (adapters_come_and_go(tmp_path, shard) for shard in (True, False))
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


def save_on_each_rank(folder: Path) -> tuple[Any, ...]:
    """What was sent for the adapter's files and what for a step, in elements, and the logits before and after."""
    model, optimizer = kit.sharded(build, adamw)
    sent, first = kit.count_sent(zero_core.handle(model).ranks), dist.get_rank() == 0
    train(model, optimizer, 0, 1)
    step = dict(sent)
    sent.clear()
    model.save_pretrained(folder, state_dict=zero_core.trained_state_dict(model), is_main_process=first)
    saved = dict(sent)
    trained = [unit.layout.numel for unit in zero_core.units(model) if unit.trainable]
    whole = [unit.layout.numel for unit in zero_core.units(model)]
    before, merged = logits(model), model.merge_and_unload()
    zero_core.save_pretrained(merged, folder / "whole")
    after = logits(merged)
    optimizer.close()
    return step, saved, trained, whole, before, after


def test_two_ranks_send_and_save_only_adapters(ranks: Any, tmp_path: Path) -> None:
    """Fails if the base takes part in the reduce-scatter, or is gathered for the files of the adapter."""
    numel = sum(p.numel() for p in build().parameters() if p.requires_grad)
    results = ranks(2).run(save_on_each_rank, tmp_path)
    before, after = results[0][4:]
    for step, saved, trained, whole, *_ in results:
        assert step["reduce_scatter"] == sum(trained) // 2 and numel <= sum(trained) <= 1.1 * numel
        assert step["all_gather"] == sum(whole) // 2  # for the forward: it is small enough to stay for the backward
        assert set(saved) == {"all_gather"} and saved["all_gather"] <= sum(trained) * 2
    assert (tmp_path / WEIGHTS).stat().st_size < 4 * numel + 4096
    assert torch.equal(logits(PeftModel.from_pretrained(base(), tmp_path)), before)
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(tmp_path / "whole")), after)


def begin(folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    model, optimizer = kit.sharded(build("dora"), adamw)
    train(model, optimizer, 0, 2)
    zero_core.checkpoint.save(folder, model, optimizer, trained_only=True)
    state = zero_core.trained_state_dict(model)
    return train(model, optimizer, 2, 4), state


def resume(folder: Path, tier: str | None) -> tuple[list[float], dict[str, Tensor]]:
    model, optimizer = kit.sharded(build("dora"), adamw, store=make_store(tier))
    zero_core.checkpoint.load(folder, model, optimizer)
    state = zero_core.trained_state_dict(model)
    return train(model, optimizer, 2, 4), state


@pytest.mark.promise("trained-only")
@pytest.mark.parametrize("size, then, tier", [(1, 1, None), (2, 2, None), (2, 1, "nvme"), (1, 2, "host")])
def test_a_run_resumes_from_a_checkpoint_of_its_adapters(
    ranks: Any, tmp_path: Path, size: int, then: int, tier: str | None
) -> None:
    expected, state = ranks(size).run(begin, tmp_path)[0]
    found, restored = ranks(then).run(resume, tmp_path, tier)[0]
    assert_equal(restored, state)
    assert found == (expected if size == then else pytest.approx(expected, rel=1e-5))
    saved = {name for name in FileSystemReader(tmp_path).read_metadata().state_dict_metadata if name[:6] == "model."}
    assert saved == {f"model.{name}" for name in state}


def test_a_checkpoint_after_an_adapter_was_deleted_or_added(tmp_path: Path) -> None:
    models = [build(), build()]
    for model in models:
        model.add_adapter("other", adapter())
        model.set_requires_grad(["default", "other"])
    optimizers = [zero_core.shard(model, adamw(model.parameters())) for model in models]
    for model in models:
        model.delete_adapter("other")
        torch.manual_seed(7 + (model is models[1]))
        model.add_adapter("added", adapter())
    train(models[0], optimizers[0], 0, 1)
    zero_core.checkpoint.save(tmp_path, models[0], optimizers[0], trained_only=True)
    zero_core.checkpoint.load(tmp_path, models[1], optimizers[1])
    for name in ("default", "added"):
        for model in models:
            model.set_adapter(name)
        assert torch.equal(logits(models[0]), logits(models[1]))


@pytest.mark.parametrize("kind", ["lora", "dora", "modules_to_save"])
def test_a_deferred_base_from_files_takes_adapters(tmp_path: Path, kind: str) -> None:
    base().save_pretrained(tmp_path)
    config = adapter(kind)
    config.init_lora_weights = True
    with zero_core.deferred_init(seed=1):
        model = LlamaForCausalLM(LlamaForCausalLM.config_class.from_pretrained(tmp_path))
        zero_core.load_pretrained(model, tmp_path)
        model = get_peft_model(model, config)
    assert all(parameter.is_meta for parameter in model.parameters())
    optimizer = zero_core.shard(model, adamw(model.parameters()))
    twin = get_peft_model(base(), config)
    drawn = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(torch.equal(drawn[name], value) for name, value in twin.state_dict().items() if "lora_A" not in name)
    twin.load_state_dict(drawn)
    assert train(model, optimizer, 0, 2) == train(twin, adamw(twin.parameters()), 0, 2)


IA3 = {"target_modules": ["q_proj"], "feedforward_modules": [], "task_type": "CAUSAL_LM"}
METHODS = {
    "ia3": ("IA3Config", IA3),
    "vera": ("VeraConfig", {"r": 4, "target_modules": ["q_proj"]}),
    "loha": ("LoHaConfig", {"r": 4, "target_modules": ["q_proj"]}),
    "oft": ("OFTConfig", {"oft_block_size": 8, "r": 0, "target_modules": ["q_proj"]}),
    "layer norms": ("LNTuningConfig", {"target_modules": ["input_layernorm"]}),
    "tokens": ("LoraConfig", {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}),
}


@pytest.mark.parametrize("method", METHODS)
def test_other_methods_of_peft(tmp_path: Path, method: str) -> None:
    import peft

    kind, options = METHODS[method]
    found = []
    for shard in (False, True):
        torch.manual_seed(1)
        model = get_peft_model(base(), getattr(peft, kind)(**options))
        optimizer: Any = adamw(model.parameters())
        if shard:
            optimizer = zero_core.shard(model, optimizer)
        losses = train(model, optimizer, 0, 2)
        model.save_pretrained(tmp_path / str(shard))
        found.append((losses, load_file(tmp_path / str(shard) / WEIGHTS)))
    assert found[0][0] == found[1][0]
    assert_equal(found[1][1], found[0][1])
