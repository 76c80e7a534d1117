"""How requests are cut and queued, as one record shared by Slab and File."""

from __future__ import annotations

from dataclasses import dataclass

BACKENDS = ("io_uring", "libaio", "threads", "aiofiles")  # in the order in which "auto" tries them


@dataclass(frozen=True)
class Options:
    """Each field is a keyword of Slab and File. `python -m zero_nvme tune PATH` measures good values."""

    backend: str = "auto"
    """`auto`, or one of BACKENDS; a named one that does not work here raises BackendUnavailable."""
    direct: bool | None = None
    """True: O_DIRECT or an error. False: through the page cache. None: O_DIRECT where the filesystem takes it."""
    block_bytes: int = 4 << 20
    """Requests are cut into blocks of so many bytes; also the unit of striping. A multiple of 4096."""
    inflight_bytes: int = 16 << 20
    """At most so many bytes (or one block) are with the kernel at a time, for each path."""
    depth: int = 256
    """And at most so many blocks, for each path."""
    threads: int = 8
    """Threads for each path, of the backends `threads` and `aiofiles`."""
    max_requests: int = 65536
    """Requests that may be incomplete; the next read or write then waits for one of them to complete."""

    def __post_init__(self) -> None:
        if self.backend != "auto" and self.backend not in BACKENDS:
            raise ValueError(f"backend={self.backend!r} does not exist; choose auto or one of {', '.join(BACKENDS)}")
        if self.block_bytes <= 0 or self.block_bytes % 4096 or self.block_bytes > 1 << 30:
            raise ValueError(f"block_bytes={self.block_bytes} must be a multiple of 4096, from 4096 to 1 GiB")
        for name in ("inflight_bytes", "depth", "threads", "max_requests"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if self.depth > 4096:
            raise ValueError(f"depth={self.depth} must be at most 4096")
