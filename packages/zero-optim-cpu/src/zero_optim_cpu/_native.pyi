"""Types of the native module; see cpp/bindings.cpp. Addresses are of the first element, dtypes and kinds are codes."""

from collections.abc import Sequence

def compiled_isas() -> list[str]: ...
def available_isas() -> list[str]: ...
def physical_cores() -> int: ...
def table(isa: str) -> Table: ...

class Table: ...

class Pool:
    def __init__(self, threads: int, cores: Sequence[int] = ()) -> None: ...
    @property
    def threads(self) -> int: ...

class Handle:
    """An update that runs in the background. Dropping it waits for the end."""

    def done(self) -> bool:
        """Returns whether the update has ended. Never blocks."""
    def wait(self, timeout: float | None = None) -> None:
        """Blocks until the update has ended. Raises TimeoutError after `timeout` seconds."""

class Hyper:
    def __init__(
        self,
        *,
        lr: float,
        beta1: float = 0.0,
        beta2: float = 0.0,
        eps: float = 0.0,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        dampening: float = 0.0,
        lr_decay: float = 0.0,
        step: int = 1,
        decoupled: bool = False,
        nesterov: bool = False,
        maximize: bool = False,
    ) -> None: ...

class Item:
    def __init__(
        self,
        parameter: int,
        parameter_dtype: int,
        master: int,
        states: Sequence[int],
        scales: Sequence[int],
        numel: int,
    ) -> None: ...

class Batch:
    def __init__(self, table: Table, rule: int, moments: int) -> None: ...
    def __len__(self) -> int: ...
    def add(
        self,
        item: Item,
        master: int,
        gradient: int,
        gradient_dtype: int,
        segments: Sequence[tuple[int, int, Hyper]],
    ) -> None: ...
    def check_disjoint(self) -> None: ...
    def refresh(self, gradients: Sequence[int], hypers: Sequence[Hyper]) -> None: ...
    def run(self, pool: Pool, scale: float) -> None: ...
    def start(self, pool: Pool, scale: float, keep: object) -> Handle: ...

def accumulate(pool: Pool, table: Table, into: int, values: int, dtype: int, numel: int) -> None: ...
def chunk_norms_squared(pool: Pool, table: Table, values: int, dtype: int, numel: int) -> list[float]: ...
def count_nonfinite(pool: Pool, table: Table, values: int, dtype: int, numel: int) -> int: ...
def encode(pool: Pool, item: Item, slot: int, kind: int, values: int) -> None: ...
def decode(pool: Pool, item: Item, slot: int, kind: int, values: int) -> None: ...
