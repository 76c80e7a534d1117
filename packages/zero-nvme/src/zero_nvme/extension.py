"""The compiled part, or None where it could not be built: everything then works through the aiofiles backend."""

try:
    from zero_nvme import _native as native
except ImportError:
    native = None  # type: ignore[assignment]

__all__ = ["native"]
