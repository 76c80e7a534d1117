"""Names the tiers and their order. Owns no bytes.

Not here: transfers to and from tiers (in memory/transfers.py), the tier of each tile (in layout/tile.py), who
holds which buffer (in memory/slots.py).

[Note: Tiers are data]
The tiers of a store are a list of names from fast to slow: "device", "host", then one name for each `ByteStore` that it
was given. "device" and "host" lend memory, in which a tile is used in place. Every other tier is `stored`: a tile is
read into a buffer of host memory, used there, and written back. Code asks `Tier.stored`, not for names, to tell which.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar


class Tier(str):
    """The name of a tier. A tile's tier never changes while a store is attached."""

    DEVICE: ClassVar[Tier]
    HOST: ClassVar[Tier]
    NVME: ClassVar[Tier]

    @property
    def value(self) -> str:
        """The name alone."""
        return str(self)

    @property
    def stored(self) -> bool:
        """Whether it is a ByteStore, with reads and writes; else it lends memory."""
        return self not in (Tier.DEVICE, Tier.HOST)

    @property
    def argument(self) -> str:
        """The argument of TieredStore that gives a stored tier, for an error."""
        given = "nvme=" if self == Tier.NVME else f'tiers={{"{self}": ...}}'
        return f"{given}, a ByteStore such as zero_nvme.Slab([path])"


Tier.DEVICE, Tier.HOST, Tier.NVME = Tier("device"), Tier("host"), Tier("nvme")
TIERS = (Tier.DEVICE, Tier.HOST, Tier.NVME)


def tiers_with(stored: Iterable[str]) -> tuple[Tier, ...]:
    """All tiers, fast to slow, with the `stored` ones between "host" and "nvme", unless "nvme" is one of them."""
    return tuple(dict.fromkeys((*TIERS[:2], *map(Tier, stored), Tier.NVME)))
