"""A TrainingArguments class whose `deepspeed` is left to the sharded Trainer. Owns that transformers does not see it.

Stock TrainingArguments need DeepSpeed installed, and tell the whole process that it shards models from now on.
"""

from __future__ import annotations

import copyreg
import functools
from typing import Any

from transformers import TrainingArguments

__all__ = ["deepspeed_of", "without_deepspeed"]


@functools.cache
def without_deepspeed(arguments: type[Any]) -> type[Any]:
    """Returns a subclass of `arguments`, made once. `deepspeed` is None in it, and deepspeed_of() gives the value."""
    if issubclass(arguments, _Arguments):
        return arguments
    names = {"__doc__": arguments.__doc__, "__module__": __name__}
    return type(f"Sharded{arguments.__name__}", (_Arguments, arguments), names)


def deepspeed_of(args: Any) -> Any:
    """Returns the path or the mapping that was given as `deepspeed`; None: none was."""
    return getattr(args, "zero_deepspeed", None)


class _Arguments(TrainingArguments):
    def __post_init__(self) -> None:
        self.zero_deepspeed, self.deepspeed = self.deepspeed, None
        super().__post_init__()

    def __reduce__(self) -> Any:
        """Pickles as the class that the caller gave, so training_args.bin is read without this package."""
        given = next(base for base in type(self).__mro__ if not issubclass(base, _Arguments))
        return copyreg._reconstructor, (given, object, None), dict(self.__dict__)  # type: ignore[attr-defined]
