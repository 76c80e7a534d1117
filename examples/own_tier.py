"""Keeps values on a tier of your own: each extent is a file of a folder, such as one on a network filesystem.

python examples/own_tier.py [FOLDER]

A tier is a class with the seven members of `zero_offload.ByteStore`. TieredStore takes it under any name. For
zero-train, `TIER` is all that a file conf/tier/shelf.yaml needs. tests/integration/test_examples.py runs the shipped
conformance suite on this class, and compares a model's bits with those of host memory.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import zero_core
from zero_offload import TieredStore

TIER = """# @package _global_
offload:
  tiers:
    shelf:
      _target_: examples.own_tier.Shelf
      folder: /mnt/network/zero
hardware:
  tiers:
    shelf: {gib: 500, read_gbps: 0.5, write_gbps: 0.5}
"""


@dataclass(frozen=True)
class File:
    """An extent. It is open from `allocate` to `free`; its name is gone at once, so a killed run leaves nothing."""

    descriptor: int
    offset_bytes: int  # as if all extents followed one another; it only has to be unique and aligned
    nbytes: int


class Pending:
    """A request that a thread works on."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def done(self) -> bool:
        """Returns whether the request has ended, with or without an error."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the request has ended, and raises its error if it failed."""
        self._future.result(timeout)


class Shelf:
    """Bytes in files of `folder`, moved by `threads` threads. An error reaches whoever waits for the request."""

    alignment = 4096

    def __init__(self, folder: str, threads: int = 4) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="shelf")
        self._lock = threading.Lock()
        self._next = 0
        self._open: set[int] = set()

    def reserve(self, total_bytes: int) -> None:
        """Raises OSError now if the filesystem has less free, rather than in the middle of a run."""
        found = os.statvfs(self._folder)
        if total_bytes > found.f_bavail * found.f_frsize:
            free = found.f_bavail * found.f_frsize
            raise OSError(f"{self._folder}: {total_bytes} bytes are wanted and {free} are free; choose another folder")

    def allocate(self, nbytes: int) -> File:
        """Creates a file of at least `nbytes`."""
        nbytes = -(-nbytes // self.alignment) * self.alignment
        descriptor, name = tempfile.mkstemp(dir=self._folder)
        os.unlink(name)
        os.truncate(descriptor, nbytes)
        with self._lock:
            extent = File(descriptor, self._next, nbytes)
            self._next += nbytes
            self._open.add(descriptor)
        return extent

    def free(self, extent: File) -> None:
        """Closes the file, which gives its space back."""
        with self._lock:
            self._open.remove(extent.descriptor)
        os.close(extent.descriptor)

    def read(self, extent: File, buffer: Any, offset: int = 0) -> Pending:
        """Fills `buffer` from the file, in a thread."""
        return self._start(os.preadv, extent, buffer, offset)

    def write(self, extent: File, buffer: Any, offset: int = 0) -> Pending:
        """Writes `buffer` to the file, in a thread."""
        return self._start(os.pwritev, extent, buffer, offset)

    def close(self) -> None:
        """Waits for requests in flight, and closes every file. May be called twice."""
        self._pool.shutdown()
        while self._open:
            os.close(self._open.pop())

    def _start(self, call: Any, extent: File, buffer: Any, offset: int) -> Pending:
        data = memoryview(as_bytes(buffer))
        if offset < 0 or offset + len(data) > extent.nbytes:
            raise ValueError(f"{len(data)} bytes at {offset} of an extent of {extent.nbytes}")
        return Pending(self._pool.submit(moved, call, extent.descriptor, data, offset))


def as_bytes(buffer: Any) -> Any:
    """Returns the bytes of a contiguous CPU tensor of any dtype, or of an object with the buffer protocol."""
    if isinstance(buffer, torch.Tensor):
        return buffer.detach().flatten().view(torch.uint8).numpy()
    return memoryview(buffer).cast("B")


def moved(call: Any, descriptor: int, data: memoryview, offset: int) -> None:
    """Calls preadv or pwritev until all of `data` has moved: each call may move less."""
    while data:
        count = call(descriptor, [data], offset)
        if count == 0:
            raise OSError(f"the file ends at {offset}, {len(data)} bytes early")
        data, offset = data[count:], offset + count


def main(folder: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shelf = Shelf(folder)
    store = TieredStore("host", "host", {"host": 0.5, "shelf": 0.5}, tiers={"shelf": shelf})
    optimizer = zero_core.shard(model, optimizer, store=store)
    for step in range(60):
        inputs = torch.randn(32, 8)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, 59):
            print(f"step {step + 1}: loss {loss.item():.3f}")
    store.sleep()  # until now the states of so small a model have stayed in their slots of host memory
    print(f"written to the shelf: {store.stats()['shelf_write_bytes']} bytes")
    optimizer.close()
    shelf.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(temporary)
