"""What torchrun sets for each process, in a rank of a test's pool. The pool has joined the process group already."""

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[3]
LINES = "zero_hf"  # what the lines that adapt an example have in them


@contextmanager
def launched(**environment: str) -> Iterator[None]:
    """Inside, a Trainer or an Accelerator finds the ranks of the pool, as in a process of its own."""
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState

    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "OMP_NUM_THREADS": 1}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    values = {name: str(value) for name, value in numbers.items()} if size > 1 else {"OMP_NUM_THREADS": "1"}
    kept = mock.patch("torch.distributed.destroy_process_group")  # Trainer.end() would leave the pool's group
    with mock.patch.dict(os.environ, values | where | environment), kept:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def run_example(name: str, arguments: list[str], zero: str | None) -> None:
    """Runs examples/`name` as `python` does.

    zero: the file for ZERO_HF_CONFIG; None runs the stock script: accelerate's class, no other line that names zero_hf.
    """
    script = ROOT / "examples" / name
    environment = {"ZERO_HF_CONFIG": zero or ""}
    with launched(**environment), mock.patch.object(sys, "argv", [str(script), *arguments]):
        if zero is not None:
            runpy.run_path(str(script), run_name="__main__")
            return
        text = script.read_text().replace("from zero_hf import Accelerator", "from accelerate import Accelerator")
        stock = "".join(line for line in text.splitlines(keepends=True) if LINES not in line)
        exec(compile(stock, str(script), "exec"), {"__name__": "__main__", "__file__": str(script)})
