"""Trains a small causal language model on Python's own sources with accelerate. No downloads.

python examples/accelerate_loop.py                                          one process
torchrun --nproc_per_node 2 examples/accelerate_loop.py                     two
ZERO_HF_CONFIG=zero.yaml python examples/accelerate_loop.py                 with a file that says stage and tiers
"""

import argparse
import inspect
import json
import statistics
from pathlib import Path

import torch
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

from zero_hf import Accelerator  # in place of `from accelerate import Accelerator`: the one line that adapts the script

LENGTH = 48  # bytes of a row


def rows(count: int) -> list[torch.Tensor]:
    """Returns `count` rows of bytes as tokens, each (LENGTH,) int64."""
    text = inspect.getsource(statistics).encode() + inspect.getsource(argparse).encode()
    return list(torch.tensor(list(text[: count * LENGTH])).view(count, LENGTH))


def small_model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, max_position_embeddings=LENGTH, **sizes))


def evaluate(accelerator: Accelerator, model: torch.nn.Module, data: DataLoader) -> float:
    """Returns the mean loss of a row. The last batch may be smaller."""
    model.eval()
    losses = []
    for batch in data:
        with torch.no_grad():
            logits = model(input_ids=batch).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none").mean(1)
        losses.append(accelerator.gather_for_metrics(loss))
    model.train()
    return torch.cat(losses).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/accelerate_loop"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--resume", help="a folder that save_state wrote")
    parser.add_argument("--mixed_precision", choices=["no", "bf16"], default="no")
    given = parser.parse_args()

    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        mixed_precision=given.mixed_precision,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),  # a resumed run shuffles alike
        cpu=True,
    )
    set_seed(0)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 10, given.steps * accelerator.num_processes)
    batches = given.steps * accelerator.gradient_accumulation_steps * accelerator.num_processes
    train = DataLoader(rows(2 * batches), batch_size=2, shuffle=True)
    test = DataLoader(rows(27), batch_size=4)
    model, optimizer, train, test, scheduler = accelerator.prepare(model, optimizer, train, test, scheduler)

    done = 0
    if given.resume:
        accelerator.load_state(given.resume)
        done = accelerator.step
    losses: list[float] = []
    for batch in accelerator.skip_first_batches(train, done):
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().view(1)).mean().item())
        if done + len(losses) == batches // accelerator.num_processes // 2:
            accelerator.save_state(str(given.output / "half"))

    found = evaluate(accelerator, model, test)
    accelerator.print(f"loss of training {losses[0]:.4f} to {losses[-1]:.4f}, of the test {found:.4f}")
    if accelerator.is_main_process:
        given.output.mkdir(parents=True, exist_ok=True)
        (given.output / "losses.json").write_text(json.dumps({"train": losses, "test": found}))
    accelerator.save_model(model, str(given.output / "model"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
