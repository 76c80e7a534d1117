"""What the tests of TRL's trainers share: a tiny chat model, arguments, and the numbers that a trainer logged."""

import torch

from examples.sft import tiny

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
USUAL = {"learning_rate": 1e-3, "bf16": False, "use_cpu": True, "logging_steps": 1, "save_strategy": "no"}
USUAL |= {"report_to": "none"}
TIMES = ("epoch", "runtime", "per_second", "step_time", "profiling")


def chat_model(folder, seed=0, change=lambda model: model):
    """The folder, with a model of 0.1 M parameters that chats, and its tokenizer."""
    torch.manual_seed(seed)
    model, tokenizer = tiny()
    change(model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def numbers(trainer, *but):
    """The rows of its log, without times."""
    history = trainer.state.log_history
    return [{key: value for key, value in row.items() if not any(t in key for t in (*TIMES, *but))} for row in history]
