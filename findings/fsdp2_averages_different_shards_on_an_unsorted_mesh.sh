#!/usr/bin/env bash
# fully_shard on a mesh (replicate, shard) whose rows are not sorted averages gradients of different shards.
#
# Version: torch 2.13.0 (CPU, gloo, 4 ranks), Python 3.10 or newer, Linux.
# Expected: a mesh [[3, 1], [0, 2]] trains as [[0, 1], [2, 3]] does, since every rank has its own batch either way and
#     all gradients are averaged. Or an error.
# Found: weights differ from those of plain torch from the first step on, without a word. DeviceMesh sorts the ranks of
#     each process group, so in the rows ranks 1 and 0 hold the first shards and ranks 3 and 2 the second ones. The
#     columns average ranks 3 and 0, and 1 and 2: a first shard with a second one.
# What follows for users of this library: such a mesh is refused before training.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$work/train.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
batches = torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(1))
found = []
for rows in (None, [[0, 1], [2, 3]], [[3, 1], [0, 2]]):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, bias=False)
    if rows is not None:
        fully_shard(model, mesh=DeviceMesh("cpu", rows, mesh_dim_names=("replicate", "shard")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = batches.flatten(0, 1) if rows is None else batches[dist.get_rank()]
    model(batch).square().mean().backward()
    optimizer.step()
    found.append(model(batches[0]).detach().flatten())
if dist.get_rank() == 0:
    apart = [(one - found[0]).abs().max().item() for one in found[1:]]
    print(f"largest difference from plain torch after a step: sorted rows {apart[0]:.1e}, others {apart[1]:.1e}")
    sys.exit(0 if apart[0] < 1e-6 and apart[1] > 1e-3 else "the behaviour has changed")
PYTHON
"$work/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 4 "$work/train.py"
echo "as described"
