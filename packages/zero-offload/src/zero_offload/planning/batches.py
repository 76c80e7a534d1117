"""Describes a step's batch: tokens, micro-batches, and how many rows, and tokens of a row, are computed at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

LEAST_TOKENS = 256  # of a part that a plan chooses: smaller ones save little, and their products are slow


@dataclass(frozen=True)
class Batch:
    """One rank's batch of a step: `accumulate` micro-batches of `micro_batch` rows, `tokens` in all.

    rows: rows that a recomputed unit computes at a time, as `offload_activations(rows=)`; None: all of a micro-batch.
    tokens_at_once: tokens of a row that modules inside of such a unit compute at a time, as
    `offload_activations(tokens=)`; None: all.
    whole_logits: the loss needs the logits of all rows at once.
    """

    tokens: int = 0
    accumulate: int = 1
    micro_batch: int = 1
    rows: int | None = None
    whole_logits: bool = False
    tokens_at_once: int | None = None

    def __post_init__(self) -> None:
        if self.accumulate < 1 or self.tokens < 0:
            raise ValueError(
                f"tokens={self.tokens}, accumulate={self.accumulate}: tokens of a step, and at least one micro-batch"
                " in it"
            )
        for name in ("micro_batch", "rows", "tokens_at_once"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r} must be a whole number, 1 or more")

    @property
    def each(self) -> int:
        """Tokens of one micro-batch."""
        return self.tokens // self.accumulate

    @property
    def parts(self) -> int:
        """Parts that a recomputed unit cuts a micro-batch into."""
        return 1 if self.rows is None else -(-self.micro_batch // self.rows)

    @property
    def at_once(self) -> int:
        """Tokens that a recomputed unit computes at a time: those of the largest part."""
        return self.each if self.parts == 1 else -(-self.each * (self.rows or 1) // self.micro_batch)

    @property
    def token_parts(self) -> int:
        """Parts that modules inside of a recomputed unit cut a row into."""
        return 1 if self.tokens_at_once is None else max(1, -(-self.row_tokens // self.tokens_at_once))

    @property
    def row_tokens(self) -> int:
        """Tokens of a row."""
        return -(-self.each // self.micro_batch)

    @property
    def in_parts(self) -> bool:
        return self.parts * self.token_parts > 1

    @property
    def inside(self) -> int:
        """Tokens that a module inside of a recomputed unit computes at a time: a part of each of the rows."""
        if self.token_parts == 1:
            return self.at_once
        return min(self.rows or self.micro_batch, self.micro_batch) * (self.tokens_at_once or 1)

    def row_cuts(self) -> Iterator[Batch]:
        """This batch with a row in halves, in quarters and so on, down to parts of LEAST_TOKENS tokens or less."""
        tokens = self.row_tokens
        while tokens > LEAST_TOKENS:
            tokens = -(-tokens // 2)
            yield replace(self, tokens_at_once=tokens)

    def cuts(self) -> Iterator[Batch]:
        """This batch with all rows at once, then with half as many rows each time, down to one row."""
        yield replace(self, rows=None)
        rows = self.micro_batch
        while rows > 1:
            rows = -(-rows // 2)
            yield replace(self, rows=rows)


def batch_of(
    tokens: int,
    accumulate: int,
    micro_batch: int | None,
    rows: Any,
    tokens_at_once: Any,
    whole_logits: bool,
    activations: str | Sequence[str],
) -> Batch:
    """Builds the batch. Raises ValueError for impossible numbers, and for `rows` or `tokens_at_once` without use."""
    at_once, of_row = (None if given == "auto" else given for given in (rows, tokens_at_once))
    batch = Batch(tokens, accumulate, 1 if micro_batch is None else micro_batch, at_once, whole_logits, of_row)
    for name, given in (("rows", rows), ("tokens_at_once", tokens_at_once)):
        if given is not None and micro_batch is None:
            raise ValueError(f"{name}={given} without micro_batch: give the rows of one micro-batch as well")
        if given is not None and {"keep"} == ({activations} if isinstance(activations, str) else {*activations}):
            raise ValueError(
                f"{name}={given} needs units that are recomputed, and activations={activations!r} keeps all: give "
                f'activations="recompute", "host", "nvme" (which recompute too) or "auto", or leave {name} out'
            )
    return batch
