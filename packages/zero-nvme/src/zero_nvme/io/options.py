"""Defines the options that Slab and File share: how requests are cut into blocks and queued."""

from __future__ import annotations

from dataclasses import dataclass

from zero_nvme.extension import native

BACKENDS = (*(native.backends() if native is not None else ()), "aiofiles")  # as "auto" tries them


@dataclass(frozen=True)
class Options:
    """Each field is a keyword of Slab and File. `python -m zero_nvme tune PATH` measures good values."""

    backend: str = "auto"
    """`auto`, or one of BACKENDS. Raises BackendUnavailable if the named one does not work here."""
    direct: bool | None = None
    """True: use O_DIRECT or fail. False: use the page cache. None: use O_DIRECT if the filesystem supports it."""
    block_bytes: int = 4 << 20
    """The size that requests are cut into, and the unit of striping. A multiple of 4096."""
    inflight_bytes: int = 16 << 20
    """The most bytes in flight at a time on each path. One block is always allowed."""
    depth: int = 256
    """The most blocks in flight at a time on each path."""
    threads: int = 8
    """The threads of each path, for the backends `threads` and `aiofiles`."""
    max_requests: int = 65536
    """The most requests that may be incomplete. The next read or write waits until one of them completes."""

    def __post_init__(self) -> None:
        unknown = self.backend not in ("auto", *BACKENDS)
        if unknown and native is not None:  # else the probe says that the extension, which knows the names, is missing
            raise ValueError(f"backend={self.backend!r} does not exist; choose auto or one of {', '.join(BACKENDS)}")
        if self.block_bytes <= 0 or self.block_bytes % 4096 or self.block_bytes > 1 << 30:
            raise ValueError(f"block_bytes={self.block_bytes} must be a multiple of 4096, from 4096 to 1 GiB")
        for name in ("inflight_bytes", "depth", "threads", "max_requests"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if self.depth > 4096:
            raise ValueError(f"depth={self.depth} must be at most 4096")
