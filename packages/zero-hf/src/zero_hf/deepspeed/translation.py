"""Calls `from_deepspeed` and `translate` of zero-deepspeed with a ZeroConfig as `Translation.zero`."""

from functools import partial

from zero_deepspeed import translation
from zero_deepspeed.translation import Row, Translation, loaded

from ..config import ZeroConfig

__all__ = ["Row", "Translation", "from_deepspeed", "loaded", "translate"]

from_deepspeed = partial(translation.from_deepspeed, settings=ZeroConfig)
translate = partial(translation.translate, settings=ZeroConfig)
