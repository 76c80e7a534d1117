"""What DeepSpeed trains and what this library goes on with: tied, frozen, with buffers, in two groups."""

import os
import subprocess
import sys

import torch
from torch import nn
from torch.nn import functional

ROWS, TOKENS, VOCABULARY = 8, 6, 33
SAVED_AFTER, STEPS = 5, 15
SCHEDULE = {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, "warmup_num_steps": 20}


class Model(nn.Module):
    """Sizes that no number of ranks divides. The head is the embedding; `frozen` is not trained."""

    def __init__(self, width: int = 18) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.up = nn.Linear(width, 37)
        self.norm = nn.LayerNorm(37)
        self.frozen = nn.Linear(37, 37).requires_grad_(False)
        self.down = nn.Linear(37, width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mean", torch.zeros(37))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, tokens, targets):
        hidden = self.norm(torch.relu(self.up(self.embedding(tokens).mean(1))))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(hidden.mean(0).to(self.mean.dtype), alpha=0.1)
            self.seen.add_(1)
        hidden = self.down(torch.relu(self.frozen(hidden)))
        return functional.cross_entropy(self.head(hidden).float(), targets)


def groups(model: nn.Module, decay: float = 0.1) -> list[dict]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]


def rows(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of the step's batch."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator)
    targets = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    mine = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    return tokens[mine], targets[mine]


def torchrun(size: int, *words: object) -> None:
    """A script in `size` processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    given = [*command, *map(str, words)]
    done = subprocess.run(given, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
