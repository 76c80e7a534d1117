"""`StoredSpill`: tensors come back as they were, through a few slots. Fails if a slot is reused before its write is
done, a layout is lost, or extents pile up."""

import gc
import threading

import pytest
import torch

from tests.unit.zero_offload.simulated import SimulatedStreams
from zero_offload import ClosedError, MemoryByteStore, OffloadError, SwapError, Timeline
from zero_offload.activations.spill import ChangedInputError, HostSpill, Spill
from zero_offload.activations.stored_spill import QueuedSpill, StoredSpill
from zero_offload.memory.transfers import InFlight, Transfers
from zero_offload.testing import FaultyByteStore

from .harness import until

PIECE = 4096


@pytest.fixture
def store():
    made = MemoryByteStore()
    yield made
    made.close()


@pytest.fixture
def nvme(store):
    return Transfers(store, InFlight(Timeline()))


def on_nvme(kind, nvme, slots=3):
    """In host memory, or beside a discrete device, whose copies are as late as they may be."""
    if kind == "nvme":
        return StoredSpill(nvme, slots=slots, piece_bytes=PIECE)
    return QueuedSpill(nvme, SimulatedStreams(torch.empty(0, dtype=torch.uint8)), slots=slots, piece_bytes=PIECE)


@pytest.fixture(params=["nvme", "queued"])
def spill(request, nvme):
    made = on_nvme(request.param, nvme)
    yield made
    made.close()


def tensors():
    torch.manual_seed(0)
    base = torch.randn(12, 40, 50)
    yield from (
        base,
        base.transpose(0, 2),
        base[:, ::2],
        base[3],
        base.to(torch.bfloat16),
        base[:, :1].expand(12, 40, 50),
    )
    yield from (torch.arange(7), torch.rand(9) > 0.5, torch.tensor(3.0), torch.randn(3, 5, dtype=torch.complex64))


def on_host(seed=0):
    return HostSpill(SimulatedStreams(torch.empty(0, dtype=torch.uint8), seed), owned=True)


@pytest.mark.parametrize("kind", ["device", "host", "nvme"])
def test_values_shape_strides_and_dtype_come_back(kind, spill):
    where = {"device": Spill, "host": on_host, "nvme": lambda: spill}[kind]()
    for tensor in tensors():
        again = where.pack(tensor, "unit").load()
        assert torch.equal(again, tensor)
        assert (again.dtype, again.stride()) == (tensor.dtype, tensor.stride())


def test_the_one_before_is_read_ahead(nvme):
    spill = on_nvme("nvme", nvme)
    packed = [spill.pack(torch.full((1000,), float(i)), str(i)) for i in range(5)]
    for i in (4, 3, 2):
        packed[i].load()
    assert nvme.moved("swap_in") == PIECE  # number 1, under way already
    assert packed[1].load()[0] == 1
    assert nvme.moved("swap_in") == 2 * PIECE  # and number 0; nothing was read twice
    spill.close()


def test_the_tensor_may_change_as_soon_as_it_is_packed(nvme):
    spill = on_nvme("nvme", nvme)
    tensor = torch.ones(5000)
    packed = spill.pack(tensor, "unit")
    tensor.zero_()
    assert packed.load().sum() == 5000
    spill.close()


@pytest.mark.parametrize("lengths", [range(1, 20), range(19, 0, -1), [3, 19, 1, 7, 19, 2, 11]])
def test_batches_of_many_lengths_take_the_room_of_the_longest(store, spill, lengths):
    for length in lengths:
        packed = [spill.pack(torch.full((1024 * length,), float(k)), "unit") for k in range(4)]
        for k in (3, 2, 1, 0):
            assert torch.equal(packed[k].load(), torch.full((1024 * length,), float(k)))
        del packed
    assert store.used_bytes == spill.extent_bytes <= 4 * 4096 * max(lengths)


@pytest.mark.parametrize("kind", ["nvme", "queued"])
def test_closing_gives_extents_back_and_ends_use(kind, store, nvme):
    spill = on_nvme(kind, nvme, slots=2)
    packed = spill.pack(torch.ones(5000), "unit")
    assert store.used_bytes == 20480
    spill.close()
    spill.close()
    assert store.used_bytes == 0 and spill.host_bytes == 0
    with pytest.raises(ClosedError):
        packed.load()


@pytest.mark.parametrize("kind", ["write", "read"])
@pytest.mark.parametrize("where", ["nvme", "queued"])
def test_an_error_names_the_activation_and_the_file(store, where, kind):
    faulty = FaultyByteStore(store)
    spill = on_nvme(where, Transfers(faulty, InFlight(Timeline())), slots=2)
    faulty.fail(kind)
    with pytest.raises(SwapError, match="activation of layers.0 failed: /faulty/slab, offset 0"):
        packed = [spill.pack(torch.ones(1000), f"layers.{i}") for i in range(3)]
        packed[0].load()
    with pytest.raises(SwapError, match="layers.0"):  # every call after the first failure says so
        spill.pack(torch.ones(1000), "layers.9")
    spill.close()


@pytest.mark.parametrize("kind", ["host", "queued"])
def test_the_one_before_is_on_its_way_when_it_is_asked_for_and_may_be_forgotten(kind, nvme):
    spill = on_host() if kind == "host" else on_nvme(kind, nvme)
    packed = [spill.pack(torch.full((1000,), float(i)), str(i)) for i in range(3)]
    assert packed[2].load()[0] == 2
    assert packed[1].arriving and not packed[0].arriving
    del packed[1]  # its graph died; what was on its way for it is waited for before its memory goes
    assert spill.pack(torch.zeros(1000), "next").load().sum() == 0
    assert packed[0].load()[0] == 0
    spill.close()


@pytest.mark.promise("device-activations-host")
@pytest.mark.parametrize("kind", ["host", "queued"])
def test_a_change_in_place_while_the_copy_is_on_its_way_is_refused(kind, nvme):
    spill = on_host() if kind == "host" else on_nvme(kind, nvme)
    tensor = torch.ones(1000)
    packed = spill.pack(tensor, "layers.3")
    tensor.add_(1)
    with pytest.raises(ChangedInputError, match="input of module layers.3 was changed in place"):
        packed.load()
    spill.close()


@pytest.mark.promise("device-longer-batch")
def test_host_memory_is_registered_once_also_where_batches_grow():
    """Fails if a longer batch registers again what a shorter one had registered."""
    asked = []

    class Counting(SimulatedStreams):
        def host(self, nbytes):
            asked.append(nbytes)
            return super().host(nbytes)

        def give_back(self, memory):
            raise AssertionError("given back while training goes on")

    streams = Counting(torch.empty(0, dtype=torch.uint8), 0)
    spill = HostSpill(streams)
    for length in (1000, 1500, 1200, 4000):
        packed = [spill.pack(torch.full((length,), float(k)), "unit") for k in range(3)]
        for k in (2, 1, 0):
            assert packed[k].load().eq(k).all()
        del packed
    assert sum(asked) == spill.host_bytes == 3 * 4 * 4000
    Counting.give_back = SimulatedStreams.give_back
    spill.close()
    assert spill.host_bytes == 0
    streams.close()


@pytest.mark.promise("store-collected")
@pytest.mark.parametrize("kind", ["nvme", "queued"])
def test_a_forgotten_spill_gives_its_memory_and_extents_back(kind, nvme, store):
    spill = on_nvme(kind, nvme)
    streams, packed = getattr(spill, "_streams", None), spill.pack(torch.ones(5000), "unit")
    assert store.used_bytes and (streams is None or len(streams.registered) == 2)
    del spill
    gc.collect()
    assert torch.equal(packed.load(), torch.ones(5000))  # whoever can ask keeps it alive
    del packed
    until(lambda: gc.collect() >= 0 and not store.used_bytes and (streams is None or len(streams.registered) == 1))


def test_closing_waits_for_the_thread_before_memory_is_given_back(store):
    """Fails if the thread, which still waits for a write here, goes on in memory that is not its own any more."""

    def threads():
        return {thread for thread in threading.enumerate() if thread.name == "zero-offload activations"}

    others, alive = threads(), set()

    class Watched(SimulatedStreams):
        def give_back(self, memory):
            alive.update(threads() - others)
            super().give_back(memory)

    faulty = FaultyByteStore(store)
    faulty.hold()
    streams = Watched(torch.empty(0, dtype=torch.uint8))
    spill = QueuedSpill(Transfers(faulty, InFlight(Timeline())), streams, slots=2, piece_bytes=PIECE)
    packed = spill.pack(torch.ones(16 * PIECE), "unit")
    release = threading.Timer(0.1, faulty.release)
    release.start()
    spill.close()
    release.join()
    assert packed is not None and not alive


@pytest.mark.promise("no-thread")
def test_a_thread_that_cannot_be_started_is_an_error_and_not_a_hang(store, nvme, monkeypatch):
    """Fails if what was asked of the thread is waited for."""

    def start(thread):
        raise RuntimeError("can't start new thread")

    spill = on_nvme("queued", nvme)
    with monkeypatch.context() as patch, pytest.raises(OffloadError, match="could not be started .*can't start new"):
        patch.setattr(threading.Thread, "start", start)
        spill.pack(torch.ones(1000), "layers.0")
    with pytest.raises(OffloadError, match="could not be started"):  # so does every later call
        spill.pack(torch.ones(1000), "layers.1")
    spill.close()
    assert store.used_bytes == 0 and spill.host_bytes == 0
