"""TRL's DPOTrainer through `zero_hf.sharded`: each logged number is the stock trainer's, on 1 and 2 ranks.

The reference model is sharded without an optimizer, or is the policy with its adapters switched off.
"""

import math

import pytest

pytest.importorskip("trl")

import torch
import trl
from datasets import Dataset, load_from_disk
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import zero_core
import zero_hf
from examples.sft import pairs

from .launching import launched
from .trl_runs import LORA, USUAL, chat_model, numbers

STEPS = 5


def rows():
    """Answers to questions, the right one chosen and the next one's rejected."""
    found = list(pairs())[:24]
    return [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": other["completion"]}
        for row, other in zip(found, [*found[1:], found[0]], strict=True)
    ]


def trained(folder, data_folder, zero, case):
    """What the trainer logged, and the evaluation after the last step."""
    kind, more = AutoModelForCausalLM, {}
    with launched():
        sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_length": 64}
        if case == "synchronised":
            sizes |= {"sync_ref_model": True, "ref_model_sync_steps": 2}
        precomputed = case.startswith("precomputed")
        output = str(data_folder / "run")
        args = trl.DPOConfig(output, max_steps=STEPS, precompute_ref_log_probs=precomputed, **sizes, **USUAL)
        model = kind.from_pretrained(folder / "model")
        if case == "given":
            more["ref_model"] = kind.from_pretrained(folder / "other")
        if case.endswith("adapters"):
            more["peft_config"] = LoraConfig(**LORA)
        if case == "trained adapter":
            torch.manual_seed(0)  # TRL seeds only what it draws itself
            model = get_peft_model(model, LoraConfig(**LORA, init_lora_weights=False))
        data = load_from_disk(data_folder)
        more |= {"train_dataset": data.select(range(20)), "eval_dataset": data.select(range(20, 23))}
        more["processing_class"] = AutoTokenizer.from_pretrained(folder / "model")
        trainer_class = trl.DPOTrainer if zero is None else zero_hf.sharded(trl.DPOTrainer, zero)
        trainer = trainer_class(model, args=args, **more)
        trainer.train()
        trainer.evaluate()
        found = numbers(trainer, "num_tokens")
        trainer.save_model(str(data_folder / "saved"))
        trainer.end()
        return found


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with two tiny chat models, which differ."""
    folder = tmp_path_factory.mktemp("dpo")
    for seed, name in enumerate(("model", "other")):
        chat_model(folder / name, seed)
    return folder


CASES = ["loaded", "given", "adapters", "trained adapter", "precomputed", "precomputed adapters", "synchronised"]


@pytest.mark.advice("load it with from_pretrained of transformers")
@pytest.mark.promise("dpo")
@pytest.mark.parametrize(("case", "size"), [("loaded", 1), *((case, 2) for case in CASES)])
def test_every_logged_number_is_the_stock_trainers(ranks, models, tmp_path, case, size):
    """Fails when the reference is not the initial policy, or sharding changes what either model computes."""

    def logged(name, zero):
        Dataset.from_list(rows()).save_to_disk(tmp_path / name)  # TRL keeps reference values beside it
        return ranks(size).run(trained, models, tmp_path / name, zero, case)[0]

    stock = logged("stock", None)
    nvme = {"offload": "nvme", "nvme_paths": str(tmp_path / "drive-{local_rank}")}
    for name, zero in {"none": {}, "nvme": nvme}.items():
        for found, wanted in zip(logged(name, zero), stock, strict=True):
            assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.promise("dpo-deferred", "from-pretrained")
def test_adapters_that_are_not_read_yet_have_a_reference_of_their_own(models, tmp_path):
    """TRL copies them for the reference. Fails if that needs values, or the copy has others than they begin with."""

    def losses(trainer_class, plain, **zero):
        torch.manual_seed(0)
        with launched():
            model = zero_hf.from_pretrained(AutoModelForCausalLM, str(models / "model"), dtype=torch.float32)
            with zero_core.deferred_init():
                model = get_peft_model(model, LoraConfig(**LORA, init_lora_weights=False))
            if plain:
                zero_core.materialise(model)
            sizes = {"max_steps": STEPS, "per_device_train_batch_size": 2, "max_length": 64}
            args = trl.DPOConfig(output_dir=str(tmp_path / "run"), **sizes, **USUAL)
            tokenizer, data = AutoTokenizer.from_pretrained(models / "model"), Dataset.from_list(rows())
            trainer = trainer_class(model, args=args, train_dataset=data, processing_class=tokenizer, **zero)
            trainer.train()
            return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    wanted = losses(trl.DPOTrainer, True)
    assert wanted[0] == pytest.approx(math.log(2), rel=1e-6) and wanted[-1] != wanted[0]
    assert losses(zero_hf.sharded(trl.DPOTrainer), False, zero={"offload": "host"}) == pytest.approx(wanted, rel=1e-5)
