"""A ByteStore that is as slow as a drive of given rates."""

import threading
import time
from typing import Any


class RatedTicket:
    """Done when the request is, and not before `due` (seconds of time.perf_counter)."""

    def __init__(self, inner: Any, due: float) -> None:
        self._inner, self._due = inner, due

    def done(self) -> bool:
        return time.perf_counter() >= self._due and self._inner.done()

    def wait(self, timeout: float | None = None) -> None:
        self._inner.wait(timeout)
        left = self._due - time.perf_counter()
        if timeout is not None and left > timeout:
            raise TimeoutError(f"the request is not done after {timeout} seconds")
        time.sleep(max(0.0, left))


class RatedByteStore:
    """Passes everything to `inner`. Reads queue behind reads and writes behind writes, at so many GB/s each."""

    def __init__(self, inner: Any, read_gbps: float, write_gbps: float) -> None:
        self._inner = inner
        self._rates = {"read": read_gbps * 1e9, "write": write_gbps * 1e9}
        self._busy = dict.fromkeys(self._rates, 0.0)  # until when
        self._lock = threading.Lock()
        self.alignment = inner.alignment
        self.reserve, self.allocate, self.free, self.close = inner.reserve, inner.allocate, inner.free, inner.close

    def read(self, extent: Any, buffer: Any, offset: int = 0) -> RatedTicket:
        return self._rated("read", self._inner.read(extent, buffer, offset), buffer.nbytes)

    def write(self, extent: Any, buffer: Any, offset: int = 0) -> RatedTicket:
        return self._rated("write", self._inner.write(extent, buffer, offset), buffer.nbytes)

    def _rated(self, kind: str, ticket: Any, nbytes: int) -> RatedTicket:
        with self._lock:
            self._busy[kind] = max(time.perf_counter(), self._busy[kind]) + nbytes / self._rates[kind]
            return RatedTicket(ticket, self._busy[kind])
