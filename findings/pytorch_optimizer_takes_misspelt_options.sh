#!/usr/bin/env bash
# Optimizers of pytorch_optimizer take a misspelt option, without an error or a warning; many show it in param_groups.
#
# Version: pytorch_optimizer 4.1.0, torch 2.13.0 (CPU), Python 3.10 or newer, Linux.
# Expected: TypeError, as from a class of torch.optim. Or, as classes end in **kwargs, an option that is in no group.
# Found: of its own 110 classes that need no argument but the parameters, 109 take wieght_decay=0.5. 47 of them
#     write it into param_groups and so into checkpoints, where it looks like an option that is used. Steps are those of
#     the option's default. (Magma refuses it.)
# What follows for users of this library: `optim.options` takes an option only if the class of `optim.target`, or a
#     base class that its **kwargs lead to, names it.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$work/venv/bin/pip" install --quiet pytorch_optimizer==4.1.0
"$work/venv/bin/python" - <<'PYTHON'
import warnings

import pytorch_optimizer
import torch

warnings.simplefilter("error")


def made(kind, **options):
    return kind([torch.nn.Parameter(torch.ones(4, 4))], **options)


kinds = [kind for kind in vars(pytorch_optimizer).values() if isinstance(kind, type)]
kinds = {kind for kind in kinds if issubclass(kind, torch.optim.Optimizer) and "torch.optim" not in kind.__module__}
taken = shown = 0
refused = []
for kind in sorted(kinds, key=lambda kind: kind.__name__):
    try:
        made(kind)
    except Exception:  # needs more than parameters
        continue
    try:
        optimizer = made(kind, wieght_decay=0.5)
    except TypeError:
        refused.append(kind.__name__)
        continue
    taken += 1
    shown += optimizer.param_groups[0].get("wieght_decay") == 0.5
print(f"take the option: {taken}, of these with it in param_groups: {shown}; refuse it: {refused}")

steps = []
for options in ({}, {"wieght_decay": 0.5}, {"weight_decay": 0.5}):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = pytorch_optimizer.Lion([weight], lr=0.1, **options)
    weight.grad = torch.ones(4, 4)
    optimizer.step()
    steps.append(weight.detach()[0, 0].item())
print(f"Lion's first step: without the option {steps[0]:.4f}, misspelt {steps[1]:.4f}, spelt {steps[2]:.4f}")
assert steps[0] == steps[1] != steps[2], "the behaviour has changed"
assert (taken, shown, refused) == (109, 47, ["Magma"]), "the behaviour has changed"
PYTHON
echo "as described"
