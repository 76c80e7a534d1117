"""Makes a TrainingArguments class that hides `deepspeed` from transformers and leaves it to the sharded Trainer.

Stock TrainingArguments need DeepSpeed installed, and tell the whole process that it shards models from now on.
"""

from __future__ import annotations

import copy
import copyreg
import functools
from typing import Any

from transformers import TrainingArguments


@functools.cache
def without_deepspeed(arguments: type[Any]) -> type[Any]:
    """Returns a subclass of `arguments`, made once, in which transformers does not see `deepspeed` as it is set up."""
    if issubclass(arguments, _Arguments):
        return arguments
    names = {"__doc__": arguments.__doc__, "__module__": __name__}
    return type(f"Sharded{arguments.__name__}", (_Arguments, arguments), names)


def deepspeed_of(args: Any) -> Any:
    """Returns the path or the mapping given as `deepspeed`, or None. None too for a stock class."""
    return args.deepspeed if isinstance(args, _Arguments) else None


class _Arguments(TrainingArguments):
    def __post_init__(self) -> None:
        mine: Any = self
        given, mine.deepspeed = mine.deepspeed, None
        super().__post_init__()
        _ = self.device  # it is looked up once, and stock code would start DeepSpeed for it
        mine.deepspeed = given  # for to_dict() and dataclasses.replace()

    def __reduce__(self) -> Any:
        """Pickles as the caller's class, so training_args.bin can be read without this package."""
        given = next(base for base in type(self).__mro__ if not issubclass(base, _Arguments))
        return copyreg._reconstructor, (given, object, None), dict(self.__dict__)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = memo[id(self)] = object.__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __copy__(self) -> Any:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made
