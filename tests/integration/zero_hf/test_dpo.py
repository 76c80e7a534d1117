"""TRL's DPOTrainer through `zero_hf.sharded`: each logged number is the stock trainer's, on 1 and 2 ranks.

The reference model is sharded without an optimizer, or is the policy with its adapters switched off.
"""

import math
from pathlib import Path
from typing import Any

import pytest

from .launching import launched

pytest.importorskip("trl")

STEPS = 5
TIMES = ("epoch", "runtime", "per_second", "num_tokens")


def rows() -> Any:
    """Answers to questions, the right one chosen and the next one's rejected."""
    from examples.sft import pairs

    found = list(pairs())[:24]
    following = [*found[1:], found[0]]
    return [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": other["completion"]}
        for row, other in zip(found, following, strict=True)
    ]


def trained(folder: str, data_folder: str, zero: dict[str, Any] | None, case: str) -> list[dict[str, float]]:
    """What the trainer logged, and the evaluation after the last step."""
    import torch
    from datasets import load_from_disk
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    import zero_hf

    where = Path(folder)
    with launched():
        more: dict[str, Any] = {}
        args = DPOConfig(
            output_dir=f"{data_folder}/run",
            max_steps=STEPS,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            max_length=64,
            bf16=False,
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            precompute_ref_log_probs=case.startswith("precomputed"),
            sync_ref_model=case == "synchronised",
            ref_model_sync_steps=2,
        )
        model = AutoModelForCausalLM.from_pretrained(where / "model")
        if case == "given":
            more["ref_model"] = AutoModelForCausalLM.from_pretrained(where / "other")
        if case.endswith("adapters"):
            more["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        if case == "trained adapter":
            torch.manual_seed(0)  # TRL seeds only what it draws itself
            model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        data = load_from_disk(data_folder)
        trainer_class = DPOTrainer if zero is None else zero_hf.sharded(DPOTrainer, zero)
        trainer = trainer_class(
            model,
            args=args,
            train_dataset=data.select(range(20)),
            eval_dataset=data.select(range(20, 23)),
            processing_class=AutoTokenizer.from_pretrained(where / "model"),
            **more,
        )
        trainer.train()
        trainer.evaluate()
        history = trainer.state.log_history
        trainer.save_model(f"{data_folder}/saved")
        trainer.end()
        return [{key: value for key, value in row.items() if not any(t in key for t in TIMES)} for row in history]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with two tiny chat models, which differ."""
    import torch

    from examples.sft import tiny

    folder = tmp_path_factory.mktemp("dpo")
    for seed, name in enumerate(("model", "other")):
        torch.manual_seed(seed)
        model, tokenizer = tiny()
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


CASES = ["loaded", "given", "adapters", "trained adapter", "precomputed", "precomputed adapters", "synchronised"]


@pytest.mark.advice("load it with from_pretrained of transformers")
@pytest.mark.promise("dpo")
@pytest.mark.parametrize(("case", "size"), [("loaded", 1), *((case, 2) for case in CASES)])
def test_every_logged_number_is_the_stock_trainers(ranks, models, tmp_path, case, size):
    """Fails when the reference is not the initial policy, or sharding changes what either model computes."""
    from datasets import Dataset

    def logged(name: str, zero: dict[str, Any] | None) -> list[dict[str, float]]:
        Dataset.from_list(rows()).save_to_disk(tmp_path / name)  # TRL keeps reference values beside it
        return ranks(size).run(trained, str(models), str(tmp_path / name), zero, case)[0]

    stock = logged("stock", None)
    nvme = {"offload": "nvme", "nvme_paths": str(tmp_path / "drive-{local_rank}")}
    for name, zero in {"none": {}, "nvme": nvme}.items():
        for found, wanted in zip(logged(name, zero), stock, strict=True):
            assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.promise("dpo-deferred")
def test_adapters_that_are_not_read_yet_have_a_reference_of_their_own(models, tmp_path):
    """TRL copies them for the reference. Fails if that needs values, or the copy has others than they begin with."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    import zero_core
    import zero_hf

    def losses(trainer_class: Any, plain: bool, **zero: Any) -> list[float]:
        torch.manual_seed(0)
        with launched():
            model = zero_hf.from_pretrained(AutoModelForCausalLM, str(models / "model"), dtype=torch.float32)
            with zero_core.deferred_init():
                config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
                model = get_peft_model(model, config)
            if plain:
                zero_core.materialise(model)
            usual = {"max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "max_length": 64}
            usual |= {"bf16": False, "use_cpu": True, "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
            args = DPOConfig(output_dir=str(tmp_path / "run"), **usual)
            tokenizer = AutoTokenizer.from_pretrained(models / "model")
            data = Dataset.from_list(rows())
            trainer = trainer_class(model, args=args, train_dataset=data, processing_class=tokenizer, **zero)
            trainer.train()
            return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    wanted = losses(DPOTrainer, True)
    assert wanted[0] == pytest.approx(math.log(2), rel=1e-6) and wanted[-1] != wanted[0]
    assert losses(zero_hf.sharded(DPOTrainer), False, zero={"offload": "host"}) == pytest.approx(wanted, rel=1e-5)
