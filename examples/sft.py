"""Fine-tunes a chat model with TRL's SFTTrainer on the standard library's docstrings. No downloads.

python examples/sft.py                                   a tiny Llama with random weights
python examples/sft.py --model FOLDER                    a model and its tokenizer, as save_pretrained wrote them
torchrun --nproc_per_node 2 examples/sft.py              two ranks
"""

import argparse
import importlib
import inspect

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    set_seed,
)
from trl import SFTConfig, SFTTrainer

import zero_hf

SFTTrainer = zero_hf.sharded(SFTTrainer)  # stage and tiers: a YAML or JSON file that ZERO_HF_CONFIG names

MODULES = "argparse ast calendar collections csv functools heapq inspect itertools json random shutil statistics string"
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def pairs() -> Dataset:
    """Returns questions about functions and classes, each answered by the first paragraph of its docstring."""
    rows = []
    for module in map(importlib.import_module, MODULES.split()):
        for name, thing in sorted(vars(module).items()):
            said = inspect.getdoc(thing) if inspect.isfunction(thing) or inspect.isclass(thing) else None
            if said and thing.__module__ == module.__name__:
                question = {"role": "user", "content": f"What does {module.__name__}.{name} do?"}
                answer = {"role": "assistant", "content": " ".join(said.split("\n\n")[0].split())[:160]}
                rows.append({"prompt": [question], "completion": [answer]})
    return Dataset.from_list(rows)


def tiny() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Returns a Llama of 0.1 M parameters, and a tokenizer of single bytes."""
    special = ["<|user|>", "<|assistant|>", "<|end|>"]
    alphabet = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    bytewise.pre_tokenizer, bytewise.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytewise, eos_token="<|end|>", pad_token="<|end|>", additional_special_tokens=special[:2]
    )
    tokenizer.chat_template = TEMPLATE
    config = LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config), tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder; without it, a tiny model with random weights")
    parser.add_argument("--output", default="runs/sft")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--bf16", action="store_true", help="computes in bfloat16")
    given = parser.parse_args()

    set_seed(0)
    if given.model:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(given.model), AutoTokenizer.from_pretrained(given.model)
    else:
        model, tokenizer = tiny()
    args = SFTConfig(
        output_dir=given.output,
        max_steps=given.steps,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        max_length=96,
        bf16=given.bf16,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = SFTTrainer(model, args, train_dataset=pairs(), processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main()
