#!/usr/bin/env bash
# A new Python thread multiplies matrices with another number of threads than torch.set_num_threads() says.
#
# Version: torch 2.13.0 (CPU, MKL 2024.2), Python 3.10 or newer, Linux, two cores or more.
# Expected: after torch.set_num_threads(1), every thread of the process computes with one thread.
# Found: in a thread that has just begun, OpenMP (and MKL with it) still has its own number, as many as there are cores.
#     Small operations and matrix products do not change that. The number of torch holds from the first operation over
#     elements that is large enough to be split, or from a call of torch.get_num_threads(). So asking for the number
#     changes it.
# It matters because MKL rounds some products otherwise on another number of threads: on Intel processors the last lines
#     differ (torch.addmm of 96 x 96 in float32); on AMD's they were equal. They are printed and not checked.
# What follows for users of this library: its update thread asks first. A thread of your own should, too.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy
env -u OMP_NUM_THREADS -u MKL_NUM_THREADS "$work/venv/bin/python" - <<'PYTHON'
import ctypes
import os
import re
import threading
from pathlib import Path

import torch

assert torch.__version__.startswith("2.13.0"), torch.__version__
openmp = ctypes.CDLL(re.findall(r"/\S*libgomp[-.]\S*", Path("/proc/self/maps").read_text())[0])
torch.manual_seed(0)
matrix = torch.randn(96, 96)
rows = []


def product():
    square = matrix @ matrix.T
    return torch.addmm(square, square, square, beta=-4.8, alpha=2.0)


def in_a_thread(what, first):
    def run():
        first()
        rows.append((what, openmp.omp_get_max_threads(), product()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


cores = len(os.sched_getaffinity(0))
assert cores > 1, "one core has one thread anyway"
torch.set_num_threads(1)
rows.append(("the main thread", openmp.omp_get_max_threads(), product()))
in_a_thread("a new thread", lambda: None)
in_a_thread("a new thread, after a small sum", lambda: torch.ones(8) + 1)
in_a_thread("a new thread, after a product", product)
in_a_thread("a new thread, after a large sum", lambda: torch.ones(1 << 20) + 1)
in_a_thread("a new thread, after torch.get_num_threads()", torch.get_num_threads)
for what, threads, found in rows:
    print(f"{what:45} OpenMP threads: {threads}   product as in the main thread: {torch.equal(found, rows[0][2])}")
assert [threads for _, threads, _ in rows] == [1, cores, cores, cores, 1, 1], "the behaviour has changed"
PYTHON
echo "as described"
