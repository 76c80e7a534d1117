"""Maps `optim="adamw_8bit"` of a Trainer to torch's AdamW, whose update on the host keeps its moments in 8 bits.

Owns the names that mean this, and the settings under which they work. The states' layout is zero_optim_cpu's
`split_8bit`.

[Note: 8-bit names]
bitsandbytes quantises moments in blocks of 256 elements (Dettmers et al. 2021, arXiv 2110.02861), and its optimizers
keep them on the device. Here they are on the host or on NVMe, in blocks of 256 too, with codes of our own, and weights
of embeddings are no exception. docs/results/optim.md compares loss curves under "8-bit moments". Other optimizers of
bitsandbytes were not compared, and are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..config import ConfigError, ZeroConfig

_NAMES = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
_LAYOUT = "split_8bit"


def with_eight_bits(args: Any, config: ZeroConfig) -> ZeroConfig:
    """Returns the settings under which AdamW's moments have 8 bits, if `args.optim` asks for that; else `config`.

    Raises:
        ConfigError: the states are on the device, or `config` names another layout.
    """
    if args.optim not in _NAMES:
        return config
    name = str(getattr(args.optim, "value", args.optim))
    if config.placements["optimizer"] == "device":
        raise ConfigError(
            f"optim={name!r} keeps moments in 8 bits on the host or on NVMe, and zero= keeps them on the device: write "
            'optimizer: host (or offload: host), or optim="adamw_torch"'
        )
    if config.states not in ("fp32", _LAYOUT):
        raise ConfigError(
            f"optim={name!r} and states={config.states!r} both set the layout of states: leave states out, or write "
            'optim="adamw_torch"'
        )
    return dataclasses.replace(config, states=_LAYOUT)


@contextmanager
def torchs_adamw(args: Any) -> Iterator[None]:
    """Inside, transformers makes torch's AdamW of arguments that ask for 8-bit moments."""
    asked = args.optim
    if asked in _NAMES:
        args.optim = "adamw_torch"
    try:
        yield
    finally:
        args.optim = asked
