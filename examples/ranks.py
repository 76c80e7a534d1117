"""Trains one model on several ranks at any ZeRO stage. Each keeps its shard of parameters, gradients and states.

torchrun --nproc-per-node 2 examples/ranks.py               stage 3
torchrun --nproc-per-node 2 examples/ranks.py --stage 2     parameters on every rank until the step
"""

import argparse

import torch
import torch.distributed as dist

import zero_core


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=3, choices=range(4))
    given = parser.parse_args()

    dist.init_process_group("gloo")  # "nccl" where each rank has a GPU
    rank = dist.get_rank()
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.GELU()) for _ in range(4)]
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(128, 1))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = zero_core.shard(model, optimizer, stage=given.stage, max_grad_norm=1.0)

    torch.manual_seed(rank)  # other data on each rank
    for step in range(1, 41):
        inputs = torch.randn(32, 128)
        loss = (model(inputs) - inputs[:, :8].sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if rank == 0 and step in (1, 40):
            print(f"step {step}: mean loss {mean.item():.3f}")

    whole = model.state_dict()  # collective: every rank calls it, and has all of it
    own = sum(unit.layout.shard_numel for unit in zero_core.handle(model).units)
    if rank == 0:
        print(f"{sum(v.numel() for v in whole.values())} parameters; a rank keeps the states of {own} of them")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
