"""How far three steps of Muon move the weights with gradients clipped, and without: plain torch, ours, DeepSpeed.

    python -m tests.benchmarks.clipped_muon DIRECTORY [--ranks 2]

Muon orthogonalises its update, so the size of a gradient hardly matters to how far a step goes. A norm of a hundred,
clipped to 1, moves the weights about as far as it does unclipped. If it is the orthogonalised update that is clipped,
they move as far as the limit says. Printed is a line a case: the distance from the first weights, clipped and not, and
for ours whether every weight has the bits of plain torch. DeepSpeed is left out where it is not installed. Its Muon has
another rule for rates than torch's, so only its two distances are to be compared with each other.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

STEPS, RATE, ROWS = 3, 0.02, 32


def net() -> nn.Sequential:
    torch.manual_seed(0)
    sizes = [(64, 96), (96, 64), (64, 48)]
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in sizes))


def loss_of(model: Any, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x, y = (10 * torch.randn(ROWS, 64, generator=generator)), torch.randn(ROWS, 48, generator=generator)
    return 30 * (model(x) - y).square().mean()


def distance(values: Tensor) -> float:
    return float((values - flat(net().parameters())).norm())


def flat(values: Any) -> Tensor:
    return torch.cat([value.detach().float().flatten() for value in values])


def plain(norm: float | None) -> Tensor:
    model = net()
    muon = torch.optim.Muon(model.parameters(), lr=RATE, weight_decay=0.0)
    for step in range(STEPS):
        loss_of(model, step).backward()
        if norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        muon.step()
        muon.zero_grad()
    return flat(model.parameters())


def ours(directory: str, stage: int, tier: str) -> Callable[[float | None], Tensor]:
    import zero_core
    from zero_nvme import Slab
    from zero_offload import TieredStore, TorchStep

    def run(norm: float | None) -> Tensor:
        model = net()
        store = None
        if tier != "none":
            folder = os.path.join(directory, os.environ.get("RANK", "0"))
            os.makedirs(folder, exist_ok=True)
            slab = Slab([folder]) if tier == "nvme" else None
            store = TieredStore(tier, tier, tier, nvme=slab, step=TorchStep())
        muon = torch.optim.Muon(model.parameters(), lr=RATE, weight_decay=0.0)
        made = zero_core.shard(model, muon, stage=stage, store=store, max_grad_norm=norm)
        for step in range(STEPS):
            loss_of(model, step).backward()
            made.step()
            made.zero_grad()
        with zero_core.gathered(model):
            found = flat(model.parameters())
        made.close()
        return found

    return run


def deepspeeds(stage: int, offload: bool) -> Callable[[float | None], Tensor]:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    def run(norm: float | None) -> Tensor:
        zero: dict[str, Any] = {"stage": stage, "reduce_scatter": stage < 3}
        if offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        rates = {"lr": RATE, "momentum": 0.95, "weight_decay": 0.0}
        config = {
            "train_micro_batch_size_per_gpu": ROWS, "gradient_clipping": norm or 0.0, "zero_optimization": zero,
            "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
            "optimizer": {"type": "Muon", "params": rates},
        }  # fmt: skip
        model = net()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        for step in range(STEPS):
            engine.backward(loss_of(engine, step))
            engine.step()
        found = flat(safe_get_full_fp32_param(p) for p in model.parameters())
        engine.destroy()
        return found

    return run


def cases(directory: str) -> dict[str, Callable[[float | None], Tensor]]:
    stages = (0, 1, 2, 3)
    found = {"plain torch": plain}
    found |= {f"ours, stage {s}, {tier}": ours(directory, s, tier) for s in stages for tier in ("none", "host", "nvme")}
    try:
        import deepspeed
    except ImportError:
        return found
    deepspeed.logger.setLevel("CRITICAL")
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    places = [(stage, offload) for stage in stages[1:] for offload in (False, True)]
    return found | {
        f"DeepSpeed {deepspeed.__version__}, stage {stage}, {'cpu' if offload else 'none'}": deepspeeds(stage, offload)
        for stage, offload in places
    }


def work(directory: str) -> None:
    torch.set_num_threads(1)
    if int(os.environ["WORLD_SIZE"]) > 1:
        torch.distributed.init_process_group("gloo")
    wanted = {norm: plain(norm) for norm in (1.0, None)}
    for name, run in cases(directory).items():
        try:
            clipped, whole = run(1.0), run(None)
        except Exception as error:  # what it cannot do is a result here
            line = f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        else:
            same = torch.equal(clipped, wanted[1.0]) and torch.equal(whole, wanted[None])
            bits = f"; {'the bits of plain torch' if same else 'NOT the bits of plain torch'}" if "ours" in name else ""
            line = f"{name}: {distance(clipped):.4f} clipped, {distance(whole):.4f} not{bits}"
        if os.environ["RANK"] == "0":
            print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--ranks", type=int, default=1)
    given = parser.parse_args()
    if "RANK" in os.environ:
        return work(given.directory)
    import subprocess

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": str(given.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu"}
    world |= {"LOCAL_SIZE": str(given.ranks), "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-m", "tests.benchmarks.clipped_muon", *sys.argv[1:]]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(given.ranks)
    ]
    sys.exit(max(rank.wait() for rank in ranks))


if __name__ == "__main__":
    main()
