"""Imports the compiled module, or sets it to None if it was not built. Then all I/O uses the aiofiles backend."""

try:
    from zero_nvme import _native as native
except ImportError:
    native = None  # type: ignore[assignment]

__all__ = ["native"]
