#!/usr/bin/env bash
# DeepSpeed drops the first of two backwards of a step (stages 1, 2), and load_module_only reads no weight at stage 3.
#
# Version: DeepSpeed 0.19.8, torch 2.13.0 (CPU, gloo, 1 rank), Python 3.10 or newer, Linux with a C++ compiler.
# Expected: engine.backward(a), engine.backward(b), engine.step() steps with the sum of both gradients, as torch does.
#     engine.load_checkpoint(folder, load_module_only=True) gives the engine the saved weights.
# Found: at stages 1 and 2 the step is that of `b` alone; at stage 0 it is that of both. At stage 3 the weights stay
#     those that the engine began with; at stages 1 and 2 they are the saved ones. Neither says a word.
# What follows for users of this library: the engine here adds up all backwards, and reads the weights at every
#     stage. So a script that makes such calls trains otherwise than it did.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy setuptools wheel ninja py-cpuinfo
"$work/venv/bin/pip" install --quiet --no-build-isolation deepspeed==0.19.8
export PATH="$work/venv/bin:$PATH" DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR="$work/extensions" RANK=0 WORLD_SIZE=1
export LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29571
"$work/venv/bin/python" - "$work/saved" <<'PYTHON'
import os
import sys

import deepspeed
import torch

deepspeed.init_distributed("gloo")


def made(stage, seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 1, bias=False)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True}
    config["zero_optimization"] = {"stage": stage}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def weights(engine):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return engine.module.weight.detach().clone()


moved, read = [], []
for stage in (0, 1, 2):
    engine = made(stage, 0)
    before = weights(engine)
    loss = engine(torch.ones(1, 3)).sum()
    engine.backward(loss, retain_graph=True)
    engine.backward(2 * loss)
    engine.step()
    moved.append((weights(engine) - before).mean().item())
for stage in (1, 2, 3):
    saved, other = made(stage, 0), made(stage, 1)
    saved.save_checkpoint(sys.argv[1], tag=f"stage{stage}")
    other.load_checkpoint(sys.argv[1], tag=f"stage{stage}", load_module_only=True)
    read.append(torch.equal(weights(saved), weights(other)))
print(f"two backwards at stages 0, 1, 2 move weights by {[round(each, 3) for each in moved]}, and torch by -1.5")
print(f"the weights are those of the checkpoint at stages 1, 2, 3: {read}", flush=True)
right = [round(each, 3) for each in moved] == [-1.5, -1.0, -1.0] and read == [True, True, False]
os._exit(0 if right else 1)  # DeepSpeed's threads do not always end
PYTHON
echo "as described"
