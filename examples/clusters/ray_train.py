"""Trains on two workers of Ray Train: zero_core.shard inside train_loop_per_worker. A second run resumes.

python examples/clusters/ray_train.py --storage /mnt/shared/ray            two workers on CPUs, gloo
python examples/clusters/ray_train.py --storage /mnt/shared/ray --gpu      a GPU each, nccl
"""

import argparse
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchConfig, TorchTrainer, get_device

import zero_core
from zero_core import checkpoint


def train_loop_per_worker(config: dict[str, Any]) -> None:
    """Each worker runs it. Ray has made the process group: one rank a worker."""
    rank, folder = dist.get_rank(), Path(config["storage"]) / "checkpoint"
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.GELU()) for _ in range(4)]
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(128, 1)).to(device := get_device())
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = zero_core.shard(model, optimizer, max_grad_norm=1.0)  # not ray.train.torch.prepare_model
    first = 1
    if (folder / ".metadata").is_file():  # a whole one: the same file on every worker, as storage is shared
        first = checkpoint.load(folder, model, optimizer).extra + 1

    for step in range(first, config["steps"] + 1):
        torch.manual_seed(step * dist.get_world_size() + rank)  # other data on each rank, the same after a restart
        inputs = torch.randn(32, 128, device=device)
        loss = (model(inputs) - inputs[:, :8].sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            checkpoint.save(folder, model, optimizer, extra=step)  # collective; each worker writes its part
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            ray.train.report({"step": step, "loss": mean.item()})  # collective in Ray, too
            if rank == 0:
                print(f"step {step}: mean loss {mean.item():.3f}; began at step {first}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", required=True, help="a folder that all machines share")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true")
    given = parser.parse_args()
    storage = str(Path(given.storage).absolute())
    trainer = TorchTrainer(
        train_loop_per_worker,
        train_loop_config={"storage": storage, "steps": given.steps},
        torch_config=TorchConfig(backend="nccl" if given.gpu else "gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=given.workers, use_gpu=given.gpu),
        run_config=ray.train.RunConfig(
            storage_path=storage, name="run", failure_config=ray.train.FailureConfig(max_failures=3)
        ),
    )
    trainer.fit()  # raises when a worker has failed more often than max_failures


if __name__ == "__main__":
    main()
