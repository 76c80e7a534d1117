"""Trains a classifier of made-up images, in the way of DeepSpeed's CIFAR-10 tutorial.

torchrun --nproc_per_node 2 after.py --deepspeed --deepspeed_config ds_config.json --steps 50
"""

import argparse
import itertools
import json
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import zero_deepspeed as deepspeed

CLASSES = 10


class Images(Dataset):
    """1,024 images, (3, 16, 16) fp32: noise on one of ten patterns, and which one it is."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        patterns = torch.randn(CLASSES, 3, 16, 16, generator=generator)
        self.labels = torch.randint(CLASSES, (1024,), generator=generator)
        self.images = patterns[self.labels] + 0.5 * torch.randn(1024, 3, 16, 16, generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.labels[index]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classifier = nn.Sequential(nn.Linear(128, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU())
        self.head = nn.Linear(84, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.classifier(self.features(images).flatten(1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--output", type=Path, default=Path("runs/deepspeed"))
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint in --output")
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(0)
    net = Net()
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=net.parameters(), training_data=Images()
    )
    losses: list[float] = []
    if args.resume:
        _, client_state = engine.load_checkpoint(args.output)
        losses = client_state["losses"]

    while engine.global_steps < args.steps:
        done = len(losses) % len(loader)  # batches of this epoch, where a run goes on in the middle of one
        for images, labels in itertools.islice(loader, done, None):
            images, labels = images.to(engine.device), labels.to(engine.device)
            loss = nn.functional.cross_entropy(engine(images), labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if engine.was_step_applied() and engine.global_steps == args.steps // 2:
                engine.save_checkpoint(args.output, client_state={"losses": losses})
            if engine.global_steps == args.steps:
                break
    engine.save_16bit_model(args.output / "weights")
    if engine.global_rank == 0:
        (args.output / "losses.json").write_text(json.dumps(losses))
        print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}, learning rate {engine.get_lr()[0]:.2e}")


if __name__ == "__main__":
    main()
