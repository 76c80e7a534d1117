"""Builds the extension, if it is not built, and prints its facts: `python -m zero_sim`."""

from __future__ import annotations

import time

import torch

from .build import folder, native


def main() -> None:
    options = native.options()
    print(f"torch {torch.__version__}, extension in {folder()}")
    print(f"{native.devices()} devices of {native.total_memory(0) / 2**30:g} GiB, 1 + 32 streams each")
    print(
        f"latency {options.latency_us} us, jitter {options.jitter_us} us, seed {options.seed}, "
        f"strict {options.strict}, races {options.races}"
    )
    x = torch.ones(64, device="sim")
    count = 2000
    start = time.perf_counter()
    for _ in range(count):
        x.add_(1)
    queued = time.perf_counter() - start
    torch.accelerator.synchronize()
    print(f"an operation takes {queued / count * 1e6:.0f} us of host time")


if __name__ == "__main__":
    main()
