"""What Slab and File have in common: registration, drain, cancel, counters, closing. Moves no bytes itself."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from zero_nvme import stats
from zero_nvme.buffers import as_memory
from zero_nvme.engine import Engine
from zero_nvme.options import Options

S = TypeVar("S", bound="Store")


class Store:
    """All methods may be called from any thread. In a forked child they raise ForkedError, close() excepted."""

    backend: str
    """The one of BACKENDS that moves the bytes."""
    reason: str
    """Why it is that one: what failed before it, or what was tried."""
    direct: bool
    """O_DIRECT, and not through the page cache."""
    options: Options
    _engine: Engine

    def register(self, buffer: Any) -> bool:
        """Registers memory with the kernel, so that I/O in it costs less CPU. It is kept alive until close().

        False where the backend, the kernel or the memlock limit does not allow it: everything works all the same, and
        stats() says why.
        """
        return self._engine.register(as_memory(buffer, writable=True))

    def drain(self, timeout: float | None = None) -> None:
        """Waits until every request is complete. Raises TimeoutError, and no request's error."""
        self._engine.drain(timeout)

    def cancel(self) -> None:
        """Drops what has not started of every request and waits for the rest; the store stays usable."""
        self._engine.cancel()

    def stats(self) -> dict[str, Any]:
        """Counters since it was opened; also after close(). See `zero_nvme.stats.summary`."""
        return stats.summary(self)

    @property
    def closed(self) -> bool:
        return self._engine.closed

    def close(self) -> None:
        """Waits for what is in flight and closes. A slab's disk space is free then; a file is not synced by it.

        Twice is fine; so is once more after a Ctrl-C that interrupted it.
        """
        self._engine.close()

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *exception: object) -> Literal[False]:
        self.close()
        return False
