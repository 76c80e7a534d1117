"""Runs in processes of its own, started by torchrun: DeepSpeed trains, saves a checkpoint and goes on.

Its arguments are a folder and a JSON of runs by name, whose keys `run` reads. Each run leaves its checkpoint in
FOLDER/NAME, and next to it NAME.json with the losses of the steps after it, and NAME.pt with what DeepSpeed itself says
of each parameter.
"""

import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from model import ROWS, SAVED_AFTER, SCHEDULE, STEPS, Model, groups, rows

CPU = get_accelerator()
CPU.is_fp16_supported = lambda: True  # torch computes in fp16 on CPUs; DeepSpeed asks before it tries
CPU.supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]


def run(folder: Path, name: str, given: dict) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model(given.get("width", 18))
    config = {
        "train_micro_batch_size_per_gpu": ROWS // size,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": given["stage"], **given.get("zero", {})},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **given.get("config", {}),
    }
    optimizer = None
    if "torch" in given:
        options = dict(given["torch"])
        optimizer = getattr(torch.optim, options.pop("type"))(
            groups(model)[: given.get("groups")], **options
        )  # DeepSpeed's Adagrad has one
    else:
        config["optimizer"] = given.get("optimizer", {"type": "AdamW", "params": {"lr": 1e-3}})
        config["scheduler"] = {"type": "WarmupLR", "params": SCHEDULE}
    if given.get("offload"):
        config["zero_optimization"]["offload_optimizer"] = given["offload"]
    if given.get("dtype") == "bf16":
        config["bf16"] = {"enabled": True}
    if given.get("dtype") == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 4}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=groups(model), config=config)

    def step(index: int) -> float:
        loss = engine(*rows(index, rank, size))
        engine.backward(loss)
        engine.step()
        total = loss.detach().float().clone()
        dist.all_reduce(total)
        return float(total / size)

    for index in range(SAVED_AFTER):
        step(index)
    state = {"epoch": 3, "order": torch.arange(3)}
    engine.save_checkpoint(
        str(folder / name), client_state=state, exclude_frozen_parameters=given.get("exclude", False)
    )
    truth = {}
    for called, parameter in model.named_parameters():
        if parameter.requires_grad and "torch" not in given:
            keys = ("exp_avg", "exp_avg_sq") if given["stage"] == 3 else ()  # at 1 and 2 not linked for FusedAdam
            states = [safe_get_full_optimizer_state(parameter, key) for key in keys]
            truth[called] = [v.detach().clone() for v in (safe_get_full_fp32_param(parameter), *states)]
    losses = [step(index) for index in range(SAVED_AFTER, STEPS)]
    dist.barrier()
    if rank == 0:
        scale = getattr(engine.optimizer, "loss_scale", 1.0)
        found = {"losses": losses, "lr": engine.get_lr(), "scale": scale, "skipped": engine.skipped_steps}
        (folder / f"{name}.json").write_text(json.dumps(found))
        torch.save(truth, folder / f"{name}.pt")
    dist.barrier()


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    for name, given in json.loads(sys.argv[2]).items():
        run(Path(sys.argv[1]), name, given)
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed's threads do not always end
