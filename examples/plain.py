"""Trains with parameters and optimizer states on disk. Two statements are new beside a plain script.

python examples/plain.py            a transformer of 3.3 M parameters on a table of sums, 30 steps
python examples/plain.py 300        more steps
"""

import sys
import tempfile

import torch

import zero_core
import zero_nvme
import zero_offload
import zero_optim_cpu

WIDTH, LENGTH = 256, 64


class Model(torch.nn.Module):
    """Predicts the next byte. Each block becomes a unit of its own when the model is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(256, WIDTH)
        self.place = torch.nn.Embedding(LENGTH, WIDTH)
        block = {"nhead": 4, "dim_feedforward": 4 * WIDTH, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(WIDTH, **block) for _ in range(4))
        self.head = torch.nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, length) int64 -> (batch, length, 256)."""
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


def main(steps: int = 30) -> None:
    torch.manual_seed(0)
    sums = "".join(f"{a} + {b} = {a + b}\n" for a in range(100) for b in range(100))
    text = torch.tensor(list(sums.encode()))
    model = Model()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with tempfile.TemporaryDirectory() as folder, zero_nvme.Slab([folder]) as slab:  # better: your fastest disk
        # The two new statements: the tiers, and the model put there.
        store = zero_offload.TieredStore("nvme", "host", "nvme", nvme=slab, step=zero_optim_cpu.CpuStep())
        optimizer = zero_core.shard(model, optimizer, max_grad_norm=1.0, store=store)

        for step in range(1, steps + 1):
            starts = torch.randint(0, len(text) - LENGTH, (8,)).tolist()
            batch = torch.stack([text[start : start + LENGTH + 1] for start in starts])
            loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0 or step == 1:
                print(f"step {step}: loss {loss.item():.3f}, norm {optimizer.grad_norm:.2f}")

        moved = store.stats()
        print(f"read {moved['nvme_read_bytes'] / 1e6:.0f} MB, wrote {moved['nvme_write_bytes'] / 1e6:.0f} MB")
        optimizer.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
