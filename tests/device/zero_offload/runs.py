"""What the device tests of TieredStore train: blocks of several tiles each, over any placement."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

import zero_core
from tests.chunks import small_chunks
from tests.device.zero_core.runs import NormMayWait, Wide, loss_of, swapping
from tests.unit.zero_offload.simulated import simulated_device, streams
from zero_offload import MemoryByteStore, TieredStore, TorchStep, offload_activations
from zero_offload.layout import tile as tiles

KINDS = ("parameters", "gradients", "optimizer")
STEPS = 3
Sized = tuple[int, int, int]  # width, blocks, rows of a batch


def of_all(**shares: float) -> dict[str, Any]:
    return {kind: dict(shares) for kind in KINDS}


def classic(below: str) -> dict[str, Any]:
    """Parameters stay on the device, all else is updated below."""
    return {"parameters": "device", "gradients": below, "optimizer": below}


BELOW: dict[str, Any] = {  # nothing is updated on the device: all of these have the same bits
    "host": "host",
    "nvme": "nvme",
    "halves": of_all(host=0.5, nvme=0.5),
    "parameters on nvme": {"parameters": "nvme", "gradients": "host", "optimizer": "nvme"},
    "classic": classic("host"),
    "classic nvme": classic("nvme"),
    "parameters in part": classic("host") | {"parameters": {"device": 0.4, "host": 0.3, "nvme": 0.3}},
}
MIXED: dict[str, Any] = {  # some tiles are
    "device": "device",
    "half": of_all(device=0.5, host=0.5),
    "thirds": of_all(device=0.3, host=0.3, nvme=0.4),
}


def placed(device: torch.device, name: str) -> Any:
    """What `Run` takes as its placement: one of the above, "device store" for no store, "swapping" for zero-core's."""
    if name in ("device store", "swapping"):
        return swapping(device) if name == "swapping" else None
    return (BELOW | MIXED)[name]


def tile_numel() -> int:
    """The smallest tile: 2^20 elements on a GPU, fewer in a rehearsal; see conftest."""
    return tiles.CHUNK_NUMEL


def tiered(placement: Any, **options: Any) -> TieredStore:
    by_kind = placement if isinstance(placement, Mapping) and set(placement) <= set(KINDS) else None
    options = {"tile_numel": tile_numel(), "step": TorchStep("fp32"), "slots": 3, "streams": streams(), **options}
    options.setdefault("nvme", MemoryByteStore())
    return TieredStore(**(by_kind or dict.fromkeys(KINDS, placement)), **options)


def small_tiles(device: torch.device) -> AbstractContextManager[None]:
    """Tiles of a rehearsal: 2^14 elements instead of 2^20, so that small blocks are of several."""
    return small_chunks() if device.type in ("cpu", "sim") else nullcontext()


@contextmanager
def discrete(device: torch.device) -> Iterator[None]:
    """In a rehearsal the CPU is a discrete device whose copies are late."""
    if device.type != "cpu":
        yield
        return
    with simulated_device():
        streams()  # as simulated_device() wants; a run without a TieredStore would not
        yield


class Run:
    """A sharded model, its store and what it takes to step. `close` it inside `discrete`.

    tiers: options of the TieredStore that is made for `placement`; the others are `zero_core.shard`'s.
    """

    def __init__(
        self, device: torch.device, placement: Any, sized: Sized, *, activations: str = "keep", **options: Any
    ) -> None:
        width, blocks, rows = sized
        torch.manual_seed(1)
        with torch.device("cpu"):  # the values do not depend on torch's default device
            self.model = Wide(width, blocks).to(device)
        tiers = options.pop("tiers", {})
        self.store = tiered(placement, **tiers) if isinstance(placement, str | Mapping) else placement
        self.observer = CoreNormMayWait(device)
        build = options.pop("build", lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
        options = {"param_dtype": torch.bfloat16, "max_grad_norm": 1.0, "observer": self.observer, **options}
        self.clips = options["max_grad_norm"] is not None
        self.optimizer = zero_core.shard(self.model, build(self.model.parameters()), store=self.store, **options)
        spill_to = self.store if isinstance(self.store, TieredStore) else None
        self.offloaded = offload_activations(self.model, spill_to, activations)
        generator = torch.Generator().manual_seed(2)
        dtype = options["param_dtype"] or torch.float32
        drawn = [torch.randn(rows, width, generator=generator, device="cpu") for _ in range(4)]
        self.batches = [batch.to(device, dtype) for batch in drawn]

    def backward(self, number: int = 0) -> Tensor:
        loss = loss_of(self.model, self.batches[number % len(self.batches)])
        loss.backward()
        return loss.detach()

    def step(self, number: int = 0, accumulate: int = 1) -> list[Tensor]:
        losses = [self.backward(number * accumulate + m) for m in range(accumulate)]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses

    def masters(self) -> list[Tensor]:
        with zero_core.gathered(self.model, master=True):
            return [p.detach().cpu().clone() for p in self.model.parameters()]

    def close(self) -> None:
        self.offloaded.close()
        self.optimizer.close()


class CoreNormMayWait(NormMayWait):
    """The store's spans come from its own threads as well, and must not switch the check off."""

    @contextmanager
    def span(self, kind: str, unit: str) -> Iterator[None]:
        with super().span(kind, unit) if not unit else nullcontext():
            yield


def history(device: torch.device, placement: Any, sized: Sized, accumulate: int = 1, **options: Any) -> list[Tensor]:
    """Losses, norms and masters of a few steps, with an evaluation before each update."""
    with discrete(device):
        run = Run(device, placement, sized, **options)
        seen: list[Tensor] = []
        for number in range(STEPS):
            losses = [run.backward(number * accumulate + m) for m in range(accumulate)]
            with torch.no_grad():  # units are on their way to it while the update begins to change them
                seen.append(run.model(run.batches[0]).cpu())
            run.optimizer.step()
            run.optimizer.zero_grad()
            seen += [loss.cpu() for loss in losses]
            if run.clips:
                seen.append(torch.tensor(run.optimizer.grad_norm, device="cpu"))
        seen += run.masters()
        assert (run.offloaded.stats()["spilled_bytes"] > 0) == (options.get("activations") in ("host", "nvme"))
        run.close()
    return seen


def sized(device: torch.device, gpu: Sized, rehearsed: Sized = (64, 6, 64)) -> Sized:
    """`gpu` where there is one. Six small blocks of three tiles each show the same faults."""
    return rehearsed if device.type in ("cpu", "sim") else gpu


def stats_of(device: torch.device, call: Callable[[], None]) -> tuple[int, int]:
    """(bytes allocated before, most bytes while `call` ran) on the device; zeros on the CPU."""
    if device.type == "cpu":
        call()
        return 0, 0
    module = torch.get_device_module(device)
    module.synchronize(device)
    before = module.memory_allocated(device)
    module.reset_peak_memory_stats(device)
    call()
    module.synchronize(device)
    return before, module.max_memory_allocated(device)
