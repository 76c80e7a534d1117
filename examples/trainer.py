"""Trains a small causal language model on Python's own sources with transformers' Trainer. No downloads.

python examples/trainer.py                                    one process
torchrun --nproc_per_node 2 examples/trainer.py               two
ZERO_HF_CONFIG=zero.yaml python examples/trainer.py           with a file that says stage and tiers
"""

import argparse
import inspect
import statistics

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import zero_hf

Trainer = zero_hf.sharded(Trainer)  # stage and tiers: a YAML or JSON file that ZERO_HF_CONFIG names

LENGTH = 48  # bytes of a row


def rows(module) -> list[dict[str, torch.Tensor]]:
    """Returns the source of a module in rows of bytes as tokens, each (LENGTH,) int64."""
    text = inspect.getsource(module).encode()
    tokens = torch.tensor(list(text[: len(text) // LENGTH * LENGTH])).view(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in tokens]


def small_model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, max_position_embeddings=LENGTH, **sizes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="runs/trainer")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--bf16", action="store_true", help="computes in bfloat16")
    parser.add_argument("--resume", help="a checkpoint of an earlier run")
    given = parser.parse_args()

    set_seed(0)
    args = TrainingArguments(
        output_dir=given.output,
        max_steps=given.steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        eval_strategy="steps",
        eval_steps=given.steps // 2,
        save_strategy="steps",
        save_steps=given.steps // 2,
        save_total_limit=2,
        load_best_model_at_end=True,
        bf16=given.bf16,
        use_cpu=True,
        logging_steps=1,
        report_to="none",
    )
    trainer = Trainer(small_model(), args, train_dataset=rows(argparse), eval_dataset=rows(statistics)[:25])
    trainer.train(resume_from_checkpoint=given.resume)
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
