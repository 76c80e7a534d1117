"""Ctrl-C at a chosen line of our packages: `lines_of` tells a program's moments, `interrupted` stops it at one of them.

A moment is a line of ours that is about to be executed, on the calling thread only, as Python gives signals to no
other one. KeyboardInterrupt is raised there, inside of whatever hooks, `with` blocks and autograd are around it. Python
itself asks for signals at the entry of a function. So where a `with` block of ours is left, the moments are lines of
the `__exit__` of torch.no_grad(), of contextlib or of threading. Between a block and an `__exit__` in C there is none.

    lines = lines_of(lambda: step(model))           # ["zero_core/hooks/engine.py:96", ...], one for each moment
    for k in firsts(lines):                         # the first moment of each line
        with pytest.raises(KeyboardInterrupt), interrupted(k):
            step(model)
"""

import contextlib
import dis
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

_NAMES = ("zero_core", "zero_offload", "zero_nvme", "zero_optim_cpu", "zero_deepspeed", "zero_hf", "zero_train")
_SPECS = [spec for spec in map(importlib.util.find_spec, _NAMES) if spec is not None and spec.origin is not None]
_SOURCES = tuple(f"{Path(str(spec.origin)).parent}/" for spec in _SPECS)  # of our packages, in a tree or installed
# What `with` blocks of ours call, and waits and threads.
_AROUND = {contextlib.__file__, torch.autograd.grad_mode.__file__, threading.__file__}
_ENTERS = ("BEFORE_WITH", "SETUP_WITH", "LOAD_SPECIAL")


def lines_of(run: Callable[[], object]) -> list[str]:
    """Run it, and return its moments in their order: "zero_core/device.py:51"."""
    seen: list[str] = []
    with _traced(lambda frame: seen.append(_place(frame))):
        run()
    return seen


def firsts(lines: Sequence[str]) -> list[int]:
    """For each line, the number of the first moment in which it is executed."""
    found: dict[str, int] = {}
    for k, line in enumerate(lines):
        found.setdefault(line, k)
    return list(found.values())


@contextmanager
def interrupted(moment: int) -> Iterator[None]:
    """Inside, KeyboardInterrupt is raised once, where `lines_of` would have `lines[moment]`."""
    left = moment

    def count(frame: FrameType) -> None:
        nonlocal left
        left -= 1
        if left == -1:
            raise KeyboardInterrupt(f"at {_place(frame)}")

    with _traced(count):
        yield


@contextmanager
def _traced(at_line: Callable[[FrameType], None]) -> Iterator[None]:
    def inside(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and not _leaves(frame):
            at_line(frame)
        return inside

    def calls(frame: FrameType, event: str, argument: Any) -> Any:
        return inside if _is_ours(frame) or _is_around(frame) else None

    before = sys.gettrace()
    sys.settrace(calls)
    try:
        yield
    finally:
        sys.settrace(before)


def _is_ours(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.startswith(_SOURCES)


def _is_around(frame: FrameType) -> bool:
    return frame.f_code.co_filename in _AROUND and _is_ours(frame.f_back)


def _place(frame: FrameType) -> str:
    if _is_around(frame):
        assert frame.f_back is not None
        return f"{_place(frame.f_back)} > {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    name = frame.f_code.co_filename
    folder = next(Path(source) for source in _SOURCES if name.startswith(source))
    return f"{Path(name).relative_to(folder.parent)}:{frame.f_lineno}"


def _leaves(frame: FrameType) -> bool:
    """Whether the line is that of a `with` whose block is left: the event comes before the call of `__exit__`."""
    return any(start <= frame.f_lasti < stop for start, stop in _exits(frame.f_code))


@cache
def _exits(code: CodeType) -> list[tuple[int, int]]:
    """Where in the code `with` blocks are left: instructions of their lines which enter none."""
    enters = [each.offset for each in dis.get_instructions(code) if each.opname in _ENTERS]
    ranges = [(start, stop, line) for start, stop, line in code.co_lines() if line is not None]
    lines = {line for start, stop, line in ranges if any(start <= at < stop for at in enters)}
    return [
        (start, stop) for start, stop, line in ranges if line in lines and not any(start <= at < stop for at in enters)
    ]
