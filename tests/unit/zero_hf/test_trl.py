"""`ShardedTRL`: what a sharded trainer of TRL's refuses, and the models that it shards without training them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl")

import peft
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer

import zero_hf
from tests.integration.zero_hf.launching import launched
from tests.integration.zero_hf.trl_runs import chat_model
from zero_hf.trainer.trl import ShardedTRL

pytestmark = pytest.mark.promise("trl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def alone():
    with launched():
        yield


def rows(*names: str) -> Dataset:
    return Dataset.from_list([dict.fromkeys(names, f"text {number}") for number in range(4)])


def dpo(folder: Path, model: Any, zero: dict[str, Any] | None = None, **options: Any) -> Any:
    fields = trl.DPOConfig.__dataclass_fields__
    given = {name: value for name, value in options.items() if name in fields}
    rest = {name: value for name, value in options.items() if name not in fields}
    args = trl.DPOConfig(str(folder / "run"), use_cpu=True, bf16=False, max_steps=1, report_to="none", **given)
    made = zero_hf.sharded(trl.DPOTrainer, zero)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return made(
        model, args=args, train_dataset=rows("prompt", "chosen", "rejected"), processing_class=tokenizer, **rest
    )


def test_only_classes_of_trl_get_what_trl_needs():
    """Fails if a plain Trainer is given methods for TRL, or a class made from one of TRL's lacks them."""

    class Own(trl.SFTTrainer):
        pass

    assert issubclass(zero_hf.sharded(trl.GRPOTrainer), ShardedTRL)
    assert issubclass(zero_hf.sharded(Own), ShardedTRL)
    assert not issubclass(zero_hf.sharded(Trainer), ShardedTRL)
    assert zero_hf.sharded(zero_hf.sharded(Own)) is zero_hf.sharded(Own)


def test_models_that_trl_loads_by_name_are_not_put_on_a_device(folder):
    """Fails if TRL gives the policy or its reference model to a GPU before they are sharded."""
    trainer = dpo(folder, str(folder))
    assert trainer.args.model_init_kwargs == {"device_map": None}
    assert {parameter.device.type for parameter in trainer.model.parameters()} == {"cpu"}


def test_activation_offloading_is_refused(folder):
    """Fails if TRL's hooks move what zero-core's units own."""
    with pytest.raises(zero_hf.ConfigError, match="offloading=True .* pass activation_checkpointing=False and zero"):
        dpo(folder, AutoModelForCausalLM.from_pretrained(folder), activation_offloading=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    host = dpo(folder, model, {"activations": "host"}, activation_checkpointing=False)
    host.train()
    assert host.zero_run.config.activations == "host"


def test_generation_by_vllm_is_refused(folder):
    """Fails if vLLM is asked to read weights that are in shards."""
    args = trl.GRPOConfig(str(folder / "run"), use_cpu=True, bf16=False, use_vllm=False, num_generations=4)
    args.use_vllm = True
    with pytest.raises(zero_hf.ConfigError, match="use_vllm=True .* Leave it out.* transformers generates"):
        zero_hf.sharded(trl.GRPOTrainer)(
            AutoModelForCausalLM.from_pretrained(folder), lambda **given: [], args=args, train_dataset=rows("prompt")
        )


@pytest.mark.advice("Leave durable or use_adaptive_entropy")
@pytest.mark.promise("trainer-override-durable")
def test_the_coefficient_of_adaptive_entropy_is_resumed_and_refused_with_durable(folder, tmp_path):
    """Fails if GRPOTrainer's _load_optimizer_and_scheduler, which reads it from the checkpoint, is not called."""
    if "use_adaptive_entropy" not in trl.GRPOConfig.__dataclass_fields__:
        pytest.skip("this version of TRL has no adaptive entropy")

    def grpo(cls: Any, steps: int, zero: Any = None, folder_of_run: Any = tmp_path, adapts: bool = True) -> Any:
        options = {"max_completion_length": 4, "num_generations": 2, "per_device_train_batch_size": 2}
        options |= {"use_cpu": True, "bf16": False, "report_to": [], "activation_checkpointing": False}
        options |= {"use_adaptive_entropy": adapts, "entropy_target": 10.0, "entropy_coef": 0.01}
        args = trl.GRPOConfig(
            str(folder_of_run), max_steps=steps, save_steps=2, logging_steps=1, entropy_coef_delta=0.01, **options
        )
        more = {"train_dataset": rows("prompt"), "processing_class": AutoTokenizer.from_pretrained(folder)}
        more |= {} if zero is None else {"zero": zero}
        model = AutoModelForCausalLM.from_pretrained(folder)
        return cls(model, lambda completions, **given: [float(len(each)) for each in completions], args=args, **more)

    found = []
    for cls in (trl.GRPOTrainer, zero_hf.sharded(trl.GRPOTrainer)):
        first, again = grpo(cls, 2), grpo(cls, 4)
        first.train()
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        losses = [line["loss"] for line in again.state.log_history if "loss" in line]
        found.append((first.entropy_coef, again.entropy_coef, losses))
    assert found[1][:2] == found[0][:2] and found[0][0] > 0.01
    assert found[1][2] == pytest.approx(found[0][2], rel=1e-4)
    nvme = {"offload": "nvme", "nvme_paths": [str(tmp_path / "nvme")], "durable": "process"}
    with pytest.raises(zero_hf.ConfigError, match="_load_optimizer_and_scheduler .* Leave durable or use_adaptive"):
        grpo(cls, 2, nvme).train()
    grpo(cls, 1, nvme, tmp_path / "fixed", adapts=False).train()


def test_turns_of_tools_are_refused_where_ranks_would_wait_for_each_other():
    """Fails if ranks that generate without the gathered model may call a tool another number of times."""
    two_ranks = SimpleNamespace(
        tools=[print], _zero_scattered=True, _zero_gathers=False, args=SimpleNamespace(world_size=2)
    )
    with pytest.raises(zero_hf.ConfigError, match="tools cannot be used with ds3_gather_for_generation=False"):
        ShardedTRL._generate(two_ranks, ["prompt"])
    for stage, ranks in ((0, 2), (3, 1)):  # each has the whole model
        whole = SimpleNamespace(zero_config=zero_hf.ZeroConfig(stage=stage), args=SimpleNamespace(world_size=ranks))
        assert not ShardedTRL._zero_scattered.fget(whole)


def test_precomputed_values_of_a_model_that_is_not_read_yet_are_refused(folder):
    """Fails if TRL hashes weights that have no values, of either model."""
    deferred = zero_hf.from_pretrained(AutoModelForCausalLM, folder)
    for models in ({"model": deferred}, {"model": AutoModelForCausalLM.from_pretrained(folder), "ref_model": deferred}):
        with pytest.raises(zero_hf.ConfigError, match="precompute_ref_log_probs=True .* has not read yet"):
            dpo(folder, **models, precompute_ref_log_probs=True)


def test_models_that_are_not_read_yet_are_trained(folder):
    """Fails if a policy, its reference model or its adapters need their values before they are sharded."""

    def losses(load: Any, reference: bool) -> list[float]:
        more: dict[str, Any] = {"ref_model": load()} if reference else {}
        if not reference:
            more["peft_config"] = peft.LoraConfig(r=2, target_modules=["q_proj"])
        trainer = dpo(folder, load(), logging_steps=1, **more)
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    for reference in (True, False):
        found = losses(lambda: zero_hf.from_pretrained(AutoModelForCausalLM, folder), reference)
        assert found == losses(lambda: AutoModelForCausalLM.from_pretrained(folder), reference) and len(found) == 1


def test_the_reference_model_and_the_policy_share_one_budget_of_host_memory(folder):
    """Fails if each of two models may take all of host_bytes."""
    zero = {"offload": "host", "host_bytes": 1 << 30}
    trainer = dpo(folder, AutoModelForCausalLM.from_pretrained(folder), zero)
    (reference,) = trainer.zero_others
    assert reference.optimizer is None
    assert reference.model is trainer.ref_model
    taken = reference.plan.total("host")
    assert 0 < taken == (1 << 30) - trainer.zero_config.host_bytes
