"""TRL's GRPOTrainer through `zero_hf.sharded`, generating with transformers: the stock trainer's texts and numbers."""

from unittest import mock

import pytest

pytest.importorskip("trl")

import torch.distributed as dist
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

import zero_hf
from examples.sft import pairs

from .launching import launched
from .trl_runs import LORA, USUAL, chat_model, numbers

STEPS = 3
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


def trained(folder, output, zero, options):
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
        args = trl.GRPOConfig(output_dir=output, max_steps=STEPS, **sizes, **USUAL, **options)
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


CASES = {
    "no reference": {},
    "a reference": {"beta": 0.1},
    "adapters": {"beta": 0.1, "adapters": True},
    "not gathered": {"ds3_gather_for_generation": False},
    "several steps for a generation": {"steps_per_generation": 2, "num_iterations": 2},
    "accumulation": {"gradient_accumulation_steps": 2},
    "tools, which one rank calls": {"tools": True, "max_completion_length": 40, "ds3_gather_for_generation": True},
}


@pytest.mark.advice("Set it to True, which gathers the model while it generates")
@pytest.mark.promise("grpo")
@pytest.mark.parametrize(("case", "size"), [("no reference", 1), *((case, 2) for case in CASES)])
def test_every_logged_number_is_the_stock_trainers(ranks, model, tmp_path, case, size):
    """Fails when another text is generated, or another reward, reference value or loss computed."""
    stock = ranks(size).run(trained, str(model), str(tmp_path / "stock"), None, CASES[case])
    assert size == 1 or stock[0][1] != stock[1][1], "both ranks generated texts of the same lengths"
    assert ("tools" in CASES[case]) == (stock[0][0][0].get("tools/call_frequency", 0) > 0)
    nvme = {"offload": "nvme", "nvme_paths": str(tmp_path / "{local_rank}")}
    for name, zero in {"none": {}, "nvme": nvme}.items():
        ours = ranks(size).run(trained, str(model), str(tmp_path / name), zero, CASES[case])
        assert [lengths for _, lengths in ours] == [lengths for _, lengths in stock]
        for found, wanted in zip(ours[0][0], stock[0][0], strict=True):
            assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)
