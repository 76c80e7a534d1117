#!/usr/bin/env bash
# transformers' speech encoders drop no layers once FSDP2 shards them, and say nothing.
#
# Version: transformers 5.24.0, torch 2.13.0 (CPU), Python 3.10 or newer.
# Expected: `layerdrop` (Fan et al. 2019) leaves out each layer with that probability while training, sharded or not. With
#     layerdrop=1.0, Wav2Vec2, HuBERT and WavLM run none (WavLM its first, which makes the positions' bias).
# Found: torch.distributed.fsdp.fully_shard marks each module with _is_fsdp_managed_module, on one rank too. The encoders
#     then run every layer, so that ranks stay in step, and the draw has no effect. They do so under DeepSpeed's stage 3
#     too. The loss is another one, and the regularisation is gone.
# What follows for users of this library: it does not set that mark, so layers are dropped as in plain torch on one rank.
#     Where ranks draw otherwise, they visit other units, which is an error by name: draw the same on every rank, or set
#     model.config.layerdrop = 0.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy transformers==5.24.0
"$work/venv/bin/python" -W ignore - "$work" <<'PYTHON'
import copy
import sys

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

assert transformers.__version__ == "5.24.0", transformers.__version__
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
sizes |= {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4), "apply_spec_augment": False}
sizes |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "layerdrop": 1.0}
still = dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"), 0.0)
found = {}
for name in ("Wav2Vec2", "Hubert", "WavLM"):
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes, **still)).train()
    audio = torch.randn(2, 1000)
    both = {"plain": model, "fully_shard": copy.deepcopy(model)}
    fully_shard(both["fully_shard"], mesh=mesh)
    for how, each in both.items():
        ran = []
        for layer in each.encoder.layers:
            layer.register_forward_pre_hook(lambda *_, ran=ran: ran.append(1))
        each(audio)
        found[name, how] = len(ran)
        print(f"{name:9} {how:12} layers run: {len(ran)} of {len(each.encoder.layers)}")
dist.destroy_process_group()
assert found == {
    ("Wav2Vec2", "plain"): 0, ("Wav2Vec2", "fully_shard"): 3,
    ("Hubert", "plain"): 0, ("Hubert", "fully_shard"): 3,
    ("WavLM", "plain"): 1, ("WavLM", "fully_shard"): 3,
}, "the behaviour has changed"
PYTHON
echo "as described"
