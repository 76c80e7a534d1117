"""Reads and writes large buffers in files: asynchronously, aligned, with checked errors.

`Slab` is disk space that is handed out in extents, `File` is a named, durable file. Both return a ticket for each read
and write, and take anything with the buffer protocol or with `data_ptr()` and `nbytes`.
"""

from zero_nvme.buffers import empty
from zero_nvme.errors import BackendUnavailable, Cancelled, ChecksumError, ForkedError, NvmeError
from zero_nvme.extents import Extent
from zero_nvme.file import File
from zero_nvme.io.io_queue import BACKENDS, Options
from zero_nvme.io.ticket import Ticket, wait_all, wait_any
from zero_nvme.slab import Slab

__version__ = "0.2.1"

__all__ = [
    "BACKENDS",
    "BackendUnavailable",
    "Cancelled",
    "ChecksumError",
    "Extent",
    "File",
    "ForkedError",
    "NvmeError",
    "Options",
    "Slab",
    "Ticket",
    "empty",
    "wait_all",
    "wait_any",
]
