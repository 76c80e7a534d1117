"""The compiled module, or None if it could not be built. Everything then works through the aiofiles backend."""

try:
    from zero_nvme import _native as native
except ImportError:
    native = None  # type: ignore[assignment]

__all__ = ["native"]
