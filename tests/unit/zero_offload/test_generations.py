"""Generations over a store that crashes at any write or sync: what is found is always one whole generation.

Fails if a commit writes over what the last generation has, or its header before what it names is synced. A test runs a
part of the seeds; `python -m tests.unit.zero_offload.test_generations 10000` runs that many of each kind.
"""

import errno
import random
import sys
import threading
from unittest import mock

import pytest
import torch

from zero_offload import GenerationError
from zero_offload.durable.generations import HEADER, Generations
from zero_offload.memory.transfers import InFlight, Transfers
from zero_offload.testing import CrashByteStore, Crashed
from zero_offload.timeline import Timeline

LAYOUT = {"model": "two units"}


def opened(store, layout=LAYOUT, *, sync=True):
    return Generations(Transfers(store, InFlight(Timeline())), layout, sync=sync)


class Run:
    """A process with values in places of their own and in memory. `expected`: by generation, what it left."""

    def __init__(self, store, generator, sizes, expected, *, sync=True):
        self.generations, self.generator, self.expected = opened(store, sync=sync), generator, expected
        self.step = max((each.number for each in self.generations.found), default=0)
        self.resumed, self.pinned = self.step, None
        self.generations.adopt(self.step)  # 0 too: what another rank has not is given up
        assert self.generations.blob == (expected[self.step][1] if self.step else None)
        self.memory = [torch.zeros(size, dtype=torch.uint8) for size in sizes[1::2]]
        sources = iter(self.memory)
        self.values = []
        for index, size in enumerate(sizes):
            memory = next(sources) if index % 2 else None
            source = None if memory is None else (lambda memory=memory: memory)
            self.values.append((self.generations.own(f"value {index}", size, source), memory))
        if self.step:
            self.generations.load_sources()
            assert self.contents() == expected[self.step][0]

    def contents(self):
        found = []
        for value, memory in self.values:
            buffer = torch.zeros(value.nbytes, dtype=torch.uint8) if memory is None else memory
            if memory is None:
                value.read(buffer, "it").wait()
            found.append(bytes(buffer.numpy().tobytes()))
        return found

    def take_step(self, *, skips=True):
        for value, memory in self.values:
            if self.step and skips and self.generator.random() < 0.3:
                continue  # it had no gradient
            new = torch.frombuffer(bytearray(self.generator.randbytes(value.nbytes)), dtype=torch.uint8)
            if memory is None:
                value.write(new, "it").wait()
            else:
                memory.copy_(new)
                value.changed = True
        self.step += 1

    def pin(self):
        self.generations.pin()
        self.pinned = self.step, self.contents()

    def end_copy(self):
        """Before the places are written to again."""
        for index, expected in enumerate(self.pinned[1]):
            buffer = torch.zeros(len(expected), dtype=torch.uint8)
            self.generations.read_pinned(f"value {index}", buffer)
            assert bytes(buffer.numpy().tobytes()) == expected
        self.pinned = None

    def commit(self):
        blob = self.generator.randbytes(self.generator.choice((0, 10, 70_000)))
        self.expected[self.step] = (self.contents(), blob)
        self.generations.commit(blob)
        assert self.generations.number == self.step


def one_seed(seed, *, power=True, sync=True):
    """Runs that crash, one after another over the same disk. AssertionError where one is not gone on from."""
    generator = random.Random(seed)
    sizes = [generator.choice((1, 700, 4096, 9000)) for _ in range(generator.randrange(2, 5))]
    store, expected, committed = CrashByteStore(), {}, 0
    for _ in range(3):
        store.after = generator.randrange(1, 60)
        run = None
        try:
            run = Run(store, generator, sizes, expected, sync=sync)
            assert run.step in (committed, committed + 1)
            committed = run.step
            for _ in range(12):
                if run.pinned and run.pinned[0] < run.step:
                    run.end_copy()
                run.take_step()
                if not run.pinned and generator.random() < 0.3:
                    run.pin()
                run.commit()
                committed = run.step
        except Crashed:
            pass
        store = store.crashed(generator, power=power)
    assert Run(store, generator, sizes, expected, sync=sync).step in (committed, committed + 1)


@pytest.mark.promise("durable-copied-out")
def test_what_would_write_over_a_pinned_value_waits_for_the_copy():
    """And goes on when the value was read, and the copy given up."""
    for give_up in (False, True):
        run = Run(CrashByteStore(), random.Random(0), [700, 9000], {})
        run.take_step(skips=False)
        run.pin()
        run.commit()
        run.take_step(skips=False)
        run.commit()
        thread = threading.Thread(target=run.take_step, kwargs={"skips": False}, daemon=True)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        if give_up:
            run.generations.pins.give_up()
            with pytest.raises(GenerationError, match="the store was closed before value 'value 0' was copied"):
                run.end_copy()
        else:
            run.end_copy()
        thread.join(30)
        assert not thread.is_alive()
        run.commit()


@pytest.mark.promise("durable-crash")
def test_a_crash_leaves_one_whole_generation(seeds=range(150)):
    """After a power cut, three a seed."""
    for seed in seeds:
        one_seed(seed)


@pytest.mark.promise("durable-crash")
def test_a_killed_process_leaves_one_whole_generation_without_syncs(seeds=range(150)):
    for seed in seeds:
        one_seed(seed, power=False, sync=False)


def test_a_larger_body_frees_the_room_of_the_smaller_one():
    store, rooms = CrashByteStore(), []
    generations = opened(store)
    for blob in (b"", b"", bytes(1 << 20), bytes(1 << 20)):
        generations.commit(blob)
        rooms.append(len(store._taken))
    assert rooms == [3, 4, 4, 4]  # two headers, and a body a place


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [(OSError(errno.EIO, "broken"), OSError, "broken"), (ValueError(), GenerationError, "give the store another slab")],
)
def test_a_header_that_cannot_be_claimed_is_not_allocated_anew(error, kind, told):
    store = CrashByteStore(found=True)
    with mock.patch.object(CrashByteStore, "claim", side_effect=error), pytest.raises(kind, match=told):
        opened(store)
    assert not store._taken


def copy_of(store):
    return CrashByteStore(found=store.found, memory=bytearray(store.memory), kept=bytearray(store.kept))


@pytest.mark.promise("durable-other-run")
def test_a_run_of_another_layout_is_refused_and_unchanged():
    store, generator = CrashByteStore(), random.Random(0)
    run = Run(store, generator, [10, 10], {})
    run.take_step()
    run.commit()
    image = bytes(store.memory)
    other = store.crashed(generator)
    with pytest.raises(
        GenerationError, match=r"\(model: two units, now three units\). To continue that run, use its model"
    ):
        opened(other, {"model": "three units"}).adopt(1)
    assert bytes(other.memory) == image
    with pytest.raises(
        GenerationError,
        match=r"lacks generation 7, which is the last in another rank's slab \(this slab has: 1\). So the",
    ):
        opened(store.crashed(generator)).adopt(7)


@pytest.mark.promise("durable-crash")
def test_a_manifest_that_is_torn_at_any_byte_is_the_one_before():
    """Or refused: where the header is whole, the next step may have been written over the generation before."""
    store, generator, expected = CrashByteStore(), random.Random(0), {}
    run = Run(store, generator, [10, 10], expected)
    for _ in range(2):
        run.take_step(skips=False)
        run.commit()
    header = run.generations._headers[0].extent.offset_bytes
    *_, body, nbytes, _ = HEADER.unpack(store.memory[header : header + HEADER.size])
    for at in (*range(header, header + HEADER.size + 4), *range(body, body + nbytes)):
        for change in (0x01, 0x80):
            torn = copy_of(store)
            torn.found = True
            torn.memory[at] ^= change
            if at < header + HEADER.size + 4:
                assert [each.number for each in opened(torn).found] == [1], at
                continue
            with pytest.raises(GenerationError, match="is damaged: the checksum of its last step, generation 2"):
                opened(torn)


@pytest.mark.promise("durable-crash")
def test_without_syncs_a_machine_that_was_started_anew_is_told():
    """Values may be lost then, though the manifest is whole. With syncs it is gone on from."""
    for sync in (True, False):
        store, generator = CrashByteStore(), random.Random(0)
        run = Run(store, generator, [10, 10], {}, sync=sync)
        run.take_step()
        run.commit()
        opened(copy_found(store)).adopt(1)
        with mock.patch("zero_offload.durable.generations._boot", lambda: "another"):
            if sync:
                opened(copy_found(store)).adopt(1)
                continue
            with pytest.raises(GenerationError, match=r"syncs no disk \(durable=True does\), and the machine has res"):
                opened(copy_found(store)).adopt(1)


def copy_found(store):
    copied = copy_of(store)
    copied.found = True
    return copied


@pytest.mark.promise("durable-other-run")
def test_an_older_version_refuses_a_newer_manifest():
    store, generator = CrashByteStore(), random.Random(0)
    with mock.patch("zero_offload.durable.generations.FORMAT", 2):
        run = Run(store, generator, [10, 10], {})
        run.take_step()
        run.commit()
    with pytest.raises(GenerationError, match="in format 2, and this zero-offload reads formats up to 1"):
        opened(store.crashed(generator))


if __name__ == "__main__":
    for check in (
        test_a_crash_leaves_one_whole_generation,
        test_a_killed_process_leaves_one_whole_generation_without_syncs,
    ):
        check(range(int(sys.argv[1])))
        print(f"{check.__name__}: {sys.argv[1]} seeds")
