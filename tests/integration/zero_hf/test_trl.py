"""TRL's DPOTrainer and GRPOTrainer through `zero_hf.sharded`: each logged number is the stock trainer's.

The reference model is sharded without an optimizer, or is the policy with its adapters switched off.
"""

import math

import pytest

pytest.importorskip("trl")

from unittest import mock

import pytest
import torch
import torch.distributed as dist
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


@pytest.mark.advice("Load it with from_pretrained of transformers")
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


TEMPLATE_WITH_CALLS = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }} {{ call.function.arguments }}{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def number(of: str) -> str:
    """Says a number.

    Args:
        of: A word.
    """
    return f"#{len(of)}"


def calling(tokenizer, ids, prefix, tools):
    """Reads a call of `number` out of every first answer of rank 0 alone, so that ranks take other numbers of turns."""
    message = {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
    if "#4" not in tokenizer.decode(prefix) and not (dist.is_initialized() and dist.get_rank()):
        message["tool_calls"] = [{"type": "function", "function": {"name": "number", "arguments": {"of": "word"}}}]
    return message


def generated(folder, output, zero, options):
    """What the trainer logged, and the evaluation after the last step."""
    options, longest, more = {"max_completion_length": 10} | options, [], {}

    def vowels(completions, completion_ids, **given):
        """Letters of which there are many, and a little for length, so that texts of one group differ in it."""
        longest.append(max(map(len, completion_ids)))
        texts = [completion[0]["content"] for completion in completions]
        return [sum(letter in "aeiou" for letter in text) / 8 + len(text) / 50 for text in texts]

    tokenizer = AutoTokenizer.from_pretrained(folder)
    with launched(), mock.patch("trl.trainer.grpo_trainer.parse_response", calling):
        if options.pop("tools", False):
            more["tools"] = [number]
            tokenizer.chat_template = TEMPLATE_WITH_CALLS
            tokenizer.response_template = {}  # what would parse an answer, in place of which `calling` stands
        if options.pop("adapters", False):
            more["peft_config"] = LoraConfig(**LORA, init_lora_weights=False)
        sizes = dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size", "num_generations"), 4)
        args = trl.GRPOConfig(output_dir=output, max_steps=3, **sizes, **USUAL, **options)
        data = Dataset.from_list([{"prompt": row["prompt"]} for row in list(pairs())[:18]])
        more |= {"train_dataset": data.select(range(16)), "eval_dataset": data.select(range(16, 18))}
        trainer_class = trl.GRPOTrainer if zero is None else zero_hf.sharded(trl.GRPOTrainer, zero)
        model = AutoModelForCausalLM.from_pretrained(folder)
        trainer = trainer_class(model, vowels, args=args, processing_class=tokenizer, **more)
        trainer.train()
        trainer.evaluate()
        trainer.end()
        return numbers(trainer), longest


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny chat model. Half of all tokens end a text, so that ranks generate different numbers of them."""

    def often_ended(made):
        made.generation_config.eos_token_id = list(range(made.config.vocab_size // 2))
        return made

    return chat_model(tmp_path_factory.mktemp("grpo"), change=often_ended)


GENERATED = {
    "no reference": {},
    "a reference": {"beta": 0.1},
    "adapters": {"beta": 0.1, "adapters": True},
    "not gathered": {"ds3_gather_for_generation": False},
    "several steps for a generation": {"steps_per_generation": 2, "num_iterations": 2},
    "accumulation": {"gradient_accumulation_steps": 2},
    "tools, which one rank calls": {"tools": True, "max_completion_length": 40, "ds3_gather_for_generation": True},
}


@pytest.mark.advice("Set ds3_gather_for_generation=True, which gathers the model while it generates")
@pytest.mark.promise("grpo")
@pytest.mark.parametrize(("case", "size"), [("no reference", 1), *((case, 2) for case in GENERATED)])
def test_every_number_of_generated_texts_is_the_stock_trainers(ranks, model, tmp_path, case, size):
    """Fails when another text is generated, or another reward, reference value or loss computed."""
    stock = ranks(size).run(generated, str(model), str(tmp_path / "stock"), None, GENERATED[case])
    assert size == 1 or stock[0][1] != stock[1][1], "both ranks generated texts of the same lengths"
    assert ("tools" in GENERATED[case]) == (stock[0][0][0].get("tools/call_frequency", 0) > 0)
    nvme = {"offload": "nvme", "nvme_paths": str(tmp_path / "{local_rank}")}
    for name, zero in {"none": {}, "nvme": nvme}.items():
        ours = ranks(size).run(generated, str(model), str(tmp_path / name), zero, GENERATED[case])
        assert [lengths for _, lengths in ours] == [lengths for _, lengths in stock]
        for found, wanted in zip(ours[0][0], stock[0][0], strict=True):
            assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)
