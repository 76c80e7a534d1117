#!/usr/bin/env bash
# torch.optim.Muon(nesterov=False) over bfloat16 parameters overwrites its own momentum in each step.
#
# Version: torch 2.13.0 (CPU), Python 3.10 or newer, Linux.
# Expected: with a gradient that is the same in every step, momentum_buffer goes towards that gradient: after n steps it
#     is (1 - 0.95^n) of it. So it does in float32.
# Found: in bfloat16 the buffer has a Frobenius norm of about 1 after each step, whatever the gradient is. The update is
#     orthogonalised in bfloat16; of a tensor that is bfloat16 already, the conversion is no copy, and the division by
#     its norm is in place. Without Nesterov that tensor is the momentum itself.
# What follows for users of this library: fp32 masters are what it steps, so nothing; plain torch over bf16 weights is
#     what differs.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$work/venv/bin/python" - <<'PYTHON'
import torch

assert torch.__version__.startswith("2.13.0"), torch.__version__
gradient = torch.full((4, 8), 3.0)
print("dtype            step  norm of the gradient  of the momentum  expected")
for dtype in (torch.float32, torch.bfloat16):
    weight = torch.nn.Parameter(torch.zeros(4, 8, dtype=dtype))
    optimizer = torch.optim.Muon([weight], lr=0.1, momentum=0.95, nesterov=False, weight_decay=0.0)
    for step in (1, 2, 3):
        weight.grad = gradient.to(dtype)
        optimizer.step()
        found = optimizer.state[weight]["momentum_buffer"].float().norm().item()
        expected = (1 - 0.95**step) * gradient.norm().item()
        print(f"{dtype!s:16} {step:4} {gradient.norm().item():21.3f} {found:16.3f} {expected:9.3f}")
        right = abs(found - expected) < 0.02 * expected
        assert right if dtype == torch.float32 else abs(found - 1) < 0.05 and not right, "the behaviour has changed"
PYTHON
echo "as described"
