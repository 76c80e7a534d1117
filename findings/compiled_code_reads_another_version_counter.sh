#!/usr/bin/env bash
# A function compiled with the backends aot_eager or inductor reads a version counter of its input that is not the input's.
#
# Version: torch 2.13.0 (CPU), Python 3.10 or newer, Linux. torch 2.15.0 does the same.
# Expected: `tensor._version` of an input is 2 after two writes in place, compiled or not. Or an error.
# Found: without a word, the comparison with 2 is false. The backend "eager" reads 2. It is read while the function is
#     traced, from a stand-in for the input, and the answer is compiled in. A hook of saved tensors that compares
#     counters, as checks for writes in place do, refuses tensors that nobody wrote to, if a whole training step is
#     compiled.
# What follows for users of this library: its hooks are never compiled, so that such a training step trains.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$work/count.py" <<'PYTHON'
import sys

import torch


def unchanged(tensor, version):
    return tensor.sum(), tensor._version == version


written = torch.zeros(3)
written.add_(1)
written.add_(1)
found = {"not compiled": unchanged(written, 2)[1]}
for backend in ("eager", "aot_eager"):
    torch.compiler.reset()
    found[backend] = torch.compile(unchanged, backend=backend)(written, 2)[1]
print("is the version 2?", found)
sys.exit(0 if list(found.values()) == [True, True, False] else "the behaviour has changed")
PYTHON
"$work/venv/bin/python" "$work/count.py"
echo "as described"
