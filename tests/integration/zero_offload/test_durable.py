"""A durable TieredStore: a process that is killed anywhere is gone on from, with the bits of an uninterrupted run."""

from __future__ import annotations

import errno
import os
import random
import textwrap
import threading
import time

import pytest
import torch
from torch import nn

import zero_core
from tests import kit
from tests.chunks import TILE, small_chunks
from zero_core import checkpoint
from zero_core.errors import CheckpointError, ZeroError
from zero_nvme import NvmeError, Slab
from zero_offload import GenerationError, MemoryByteStore, TieredStore, TorchStep, write_checkpoint
from zero_offload.testing import CrashByteStore, Crashed

PLACES = {
    "nvme": ("nvme", "nvme", "nvme"),
    "states": ("host", "host", "nvme"),
    "host": ("host", "host", "host"),
    "half": ({"host": 0.5, "nvme": 0.5}, "host", {"host": 0.3, "nvme": 0.7}),
}
STEPS = 6


class Centred(nn.Module):
    """Has a buffer that each forward in training changes, and that the output depends on."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, rows):
        if self.training:
            self.mean.lerp_(rows.detach().float().mean(0), 0.1)
        return rows - self.mean.to(rows.dtype)


def made(frozen=False, width=40):
    torch.manual_seed(1)
    layers = [nn.Linear(24, width), Centred(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 24)]
    model = nn.Sequential(*layers)
    if frozen:
        layers[0].requires_grad_(False)
    return model


class Training:
    """A user's loop. `position`: the batch that it is at."""

    def __init__(
        self,
        disk,
        place="nvme",
        *,
        frozen=False,
        durable=True,
        lr=1e-2,
        width=40,
        tile_numel=1 << 22,
        every=1,
        **options,
    ):
        self.model = made(frozen, width)
        self.store = TieredStore(*PLACES[place], nvme=disk, durable=durable, tile_numel=tile_numel)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = zero_core.shard(
            self.model, torch.optim.AdamW(trained, lr=lr), store=self.store, max_grad_norm=0.1, **options
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.position = 0
        self.resumed = zero_core.resume(
            self.model, self.optimizer, scheduler=self.scheduler, extra=lambda: {"position": self.position}, every=every
        )
        if self.resumed.extra is not None:
            self.position = self.resumed.extra["position"]

    def step(self):
        rows = torch.randn(6, 24, generator=torch.Generator().manual_seed(self.position))
        rows = rows.to(next(self.model.parameters()).dtype)
        kit.step(self.optimizer, self.model(rows).float().pow(2).mean())
        self.scheduler.step()
        self.position += 1

    def end(self):
        zero_core.commit(self.model)
        self.optimizer.close()

    def to_the_end(self):
        while self.position < STEPS:
            self.step()
        random_number = torch.rand(())
        return [*kit.values(self.model, master=True), *self.model.buffers(), random_number]


def equal(found, expected):
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.fixture(scope="module")
def expected():
    """By (frozen, dtype): what an uninterrupted run with another store ends in."""
    kept = {}

    def of(frozen=False, **options):
        key = (frozen, *options.values())
        if key not in kept:
            training = Training(CrashByteStore(), frozen=frozen, **options)
            kept[key] = training.to_the_end()
            training.end()
        return kept[key]

    return of


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("options", [{}, {"frozen": True}, {"param_dtype": torch.bfloat16}], ids=str)
def test_a_crash_at_any_write_is_gone_on_from(place, options, expected):
    """At most the step that had not returned and the one before it are lost. At every eleventh write or sync."""
    calls, after, returned = 10**9, 1, 0
    generator = random.Random(0)
    while after < calls:
        disk = CrashByteStore(after=after)
        returned, training = 0, None
        try:
            training = Training(disk, place, **options)
            while returned < STEPS:
                training.step()
                returned += 1
            training.end()
            calls = disk.calls
        except (Crashed, Exception) as error:
            assert crashed(error), error
        if training is not None:
            training.store.close()
        again = Training(disk.crashed(generator), place, **options)
        assert returned - 1 <= again.resumed.step <= returned + 1 or again.resumed.step == returned == 0
        assert again.resumed.step == again.position
        assert equal(again.to_the_end(), expected(**options)), (after, again.resumed)
        again.end()
        after += 11
    assert calls > 20


def crashed(error):
    while error is not None and not isinstance(error, Crashed):
        error = error.__cause__ or error.__context__
    return error is not None


@pytest.mark.parametrize("durable", [True, "process"])
def test_a_run_on_a_named_slab_ends_and_is_gone_on_from(tmp_path, durable, expected):
    """In several parts, each placed in another way; states on disk stay where they are."""
    for place, stop in zip(("nvme", "half", "host", "states"), (2, 3, 5, STEPS), strict=True):
        disk = Slab(tmp_path, name="run", allow_memory=True)
        training = Training(disk, place, durable=durable)
        assert training.position == training.resumed.step
        while training.position < stop:
            training.step()
        if stop == STEPS:
            assert equal(training.to_the_end(), expected())
        training.end()
        disk.close()


def test_of_several_steps_one_is_kept(expected):
    """What lies in memory is copied for these alone. The last step is kept in any case."""
    written = {}
    for every in (1, 3):
        disk, generator = CrashByteStore(), random.Random(0)
        training = Training(disk, "host", every=every)
        for _ in range(5):
            training.step()
        training.store.committed()
        written[every] = training.store.stats()["nvme_write_bytes"]
        again = Training(disk.crashed(generator), "host", every=every)
        assert again.resumed.step == again.position == {1: 4, 3: 3}[every]
        assert equal(again.to_the_end(), expected())
        again.end()
        training.end()
        last = Training(disk.crashed(generator), "host")
        assert last.resumed.step == 5
        last.end()
    assert written[3] * 3 < written[1]
    with pytest.raises(ValueError, match="every=0 must be at least 1"):
        Training(CrashByteStore(), every=0)


def test_an_evaluation_is_no_step_and_closing_commits_none(expected):
    """A user's counter still says the last batch then: the step would be gone on from, and its batch trained again."""
    disk = CrashByteStore()
    training = Training(disk)
    while training.position < 3:
        position = training.position
        training.step()
        training.position = position  # counted at the end of the loop's body
        with torch.no_grad():
            training.model.eval()(torch.zeros(2, 24))
        training.model.train()
        training.position = position + 1
    training.position = 2
    training.optimizer.close()
    again = Training(disk.crashed(random.Random(0)))
    assert again.resumed.step == again.position == 2
    assert equal(again.to_the_end(), expected())
    again.end()


def test_a_failed_sync_ends_the_run(tmp_path, monkeypatch):
    """After it nothing may be assumed written. The generation before it stands."""
    disk = Slab(tmp_path, name="run", allow_memory=True)
    training = Training(disk)
    for _ in range(3):
        training.step()
    training.store.committed()

    def failing():
        raise OSError(5, "lost")

    monkeypatch.setattr(disk, "sync", failing)
    with pytest.raises(OSError, match="lost"):
        training.to_the_end()
    training.store.close()
    disk.close()
    again = Training(Slab(tmp_path, name="run", allow_memory=True))
    assert again.resumed.step in (2, 3)
    again.end()


def test_a_slab_that_was_cut_is_refused(tmp_path):
    """And not filled up with zeros."""
    disk = Slab(tmp_path, name="run", allow_memory=True)
    training = Training(disk)
    for _ in range(3):
        training.step()
    training.end()
    disk.close()
    whole = (tmp_path / "run.slab").read_bytes()
    for length in (len(whole) - 4096, len(whole) // 2, 8192):
        (tmp_path / "run.slab").write_bytes(whole[:length])
        disk = Slab(tmp_path, name="run", allow_memory=True)
        with pytest.raises((GenerationError, NvmeError), match="its files were cut|is damaged: generation 3"):
            Training(disk)
        disk.close()
        assert (tmp_path / "run.slab").read_bytes() == whole[:length]
    (tmp_path / "run.slab").write_bytes(b"")  # as a process leaves it that is killed before it writes anything
    disk = Slab(tmp_path, name="run", allow_memory=True)
    again = Training(disk)
    assert again.resumed.step == 0
    again.end()
    disk.close()
    (tmp_path / "run.slab").write_bytes(whole)
    again = Training(Slab(tmp_path, name="run", allow_memory=True))
    assert again.resumed.step == 3
    again.end()


@kit.on_ranks(2)
def test_ranks_go_on_from_the_generation_that_all_have():
    """One has committed step 3 when both are killed, the other has not: both go on from step 2."""
    rank, _ = kit.world()
    training, generator = Training(CrashByteStore(), stage=3), random.Random(0)
    ends = training.to_the_end()
    training.end()
    for behind in (0, 1):
        disk = CrashByteStore()
        training = Training(disk, stage=3)
        for _ in range(3):
            training.step()
        training.store.committed()
        found = disk.crashed(generator)
        loss = training.model(torch.ones(6, 24)).sum()
        if rank != behind:
            training.store.committed()
            found = disk.crashed(generator)
        kit.step(training.optimizer, loss)
        training.end()
        again = Training(found, stage=3)
        assert again.resumed.step == 2
        assert equal(again.to_the_end(), ends)
        again.end()


@kit.on_ranks(2)
def test_a_rank_without_its_slab_is_told():
    rank, _ = kit.world()
    disk = CrashByteStore()
    training = Training(disk, stage=3)
    for _ in range(3):
        training.step()
    training.end()
    with pytest.raises(ZeroError, match=r"are \[3, 0\], and ranks differ by one at most: rank 1 has lost its slab"):
        Training(CrashByteStore() if rank else disk.crashed(random.Random(0)), stage=3)
    anew = Training(CrashByteStore(), stage=3)
    assert anew.resumed.step == 0
    anew.end()


def test_another_run_is_refused_and_unchanged(tmp_path):
    def opened():
        return Slab(tmp_path, name="run", allow_memory=True)

    disk = opened()
    training = Training(disk)
    training.step()
    training.end()
    disk.close()
    image = (tmp_path / "run.slab").read_bytes()

    def other(match, error=GenerationError, build=torch.optim.AdamW, **options):
        disk = opened()
        model = made(**options)
        store = TieredStore("nvme", "nvme", "nvme", nvme=disk, durable=True)
        with pytest.raises(error, match=match):
            optimizer = zero_core.shard(
                model, build([p for p in model.parameters() if p.requires_grad], lr=1), store=store
            )
            zero_core.resume(model, optimizer)
        store.close()
        disk.close()
        assert (tmp_path / "run.slab").read_bytes() == image

    other(r"another model or another setting \(.*trained elements: 2016, now 992", frozen=True)
    other(r"\(optimizer: AdamW, now Adam\); start it as it was", build=torch.optim.Adam)
    other(r"going on with another scheduler \(True, now False\)", CheckpointError)


def loaded(folder, frozen=False, width=40, **options):
    """What a model without a store has that reads the checkpoint, and the step that it was saved after."""
    model = made(frozen, width)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = zero_core.shard(model, torch.optim.AdamW(trained, lr=1e-2), **options)
    found = checkpoint.load(folder, model, optimizer)
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    values = [*kit.values(model, master=True), *(value.clone() for value in states), *model.buffers()]
    optimizer.close()
    return values, found.step


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("options", [{}, {"param_dtype": torch.bfloat16}], ids=str)
def test_a_checkpoint_in_the_background_is_of_its_step(place, options, expected, tmp_path):
    """While the copy is slow, two more steps come, and the second waits for it. The run is not changed by it."""
    training = Training(CrashByteStore(), place, **options)
    for _ in range(3):
        training.step()
    checkpoint.save(tmp_path / "blocking", training.model, training.optimizer, extra="it")
    read, begun = training.store._on._generations.read_pinned, threading.Event()

    def slow(name, buffer):
        begun.wait(30)
        time.sleep(0.05)
        read(name, buffer)

    training.store._on._generations.read_pinned = slow
    saving = checkpoint.save(tmp_path / "beside", training.model, training.optimizer, extra="it", blocking=False)
    training.step()
    assert not saving.done() and not (tmp_path / "beside" / ".metadata").exists()
    begun.set()
    ends = training.to_the_end()
    saving.wait()
    assert saving.done()
    training.end()
    assert equal(ends, expected(**options))
    (values, step), (others, other) = loaded(tmp_path / "beside"), loaded(tmp_path / "blocking")
    assert step == other == 3
    assert equal(values, others)


@pytest.mark.parametrize("options", [{}, {"param_dtype": torch.bfloat16}], ids=str)
def test_a_run_goes_on_in_other_tiles(options, tmp_path):
    """By a checkpoint of its slab. The boxes of a checkpoint lie across tiles."""
    options = {**options, "width": 1000}
    with small_chunks():
        whole = Training(CrashByteStore(), tile_numel=TILE, **options)
        ends = whole.to_the_end()
        whole.end()
        disk = Slab(tmp_path, name="run", allow_memory=True)
        training = Training(disk, tile_numel=TILE, **options)
        for _ in range(3):
            training.step()
        for name, blocking, size in (("blocking", True, 1000), ("small", False, 100), ("large", False, 3 * TILE)):
            checkpoint.save(
                tmp_path / name, training.model, training.optimizer, tile_numel=size, blocking=blocking
            ).wait()
        training.end()
        disk.close()
        values, _ = loaded(tmp_path / "blocking", width=1000)
        for name in ("small", "large"):
            assert equal(loaded(tmp_path / name, width=1000)[0], values)

        disk = Slab(tmp_path, name="run", allow_memory=True)
        with pytest.raises(
            GenerationError, match="tile_numel: .*or write a checkpoint of it with zero_offload.write_ch"
        ):
            Training(disk, tile_numel=2 * TILE, **options)
        disk.close()
        disk = Slab(tmp_path, name="run", allow_memory=True)
        step, extra = write_checkpoint(
            [disk], tmp_path / "kept", step=TorchStep(), optimizer=torch.optim.AdamW([torch.zeros(1)])
        )
        disk.remove()
        assert (step, extra) == (3, {"position": 3})
        assert equal(loaded(tmp_path / "kept", width=1000)[0], values)
        again = Training(Slab(tmp_path, name="run", allow_memory=True), "half", tile_numel=2 * TILE, **options)
        found = checkpoint.load(tmp_path / "kept", again.model, again.optimizer, scheduler=again.scheduler)
        again.position = found.extra["position"]
        assert equal(again.to_the_end(), ends)
        again.end()


@kit.on_ranks(2)
def test_slabs_of_ranks_are_one_checkpoint(tmp_path):
    """For another stage, and any number of ranks. A slab that is missing, or of another step, is told."""
    rank, _ = kit.world()
    disk = Slab(tmp_path, name=f"run.{rank}", allow_memory=True)
    training = Training(disk, stage=3)
    for _ in range(2):
        training.step()
    checkpoint.save(tmp_path / "saved", training.model, training.optimizer)
    training.end()
    disk.close()
    torch.distributed.barrier()  # the other rank's is closed too
    if rank == 0:
        disks = [Slab(tmp_path, name=f"run.{place}", allow_memory=True) for place in (1, 0)]
        given = {"step": TorchStep(), "optimizer": torch.optim.AdamW([torch.zeros(1)])}
        assert write_checkpoint(disks, tmp_path / "kept", **given) == (2, {"position": 2})
        for each in disks:
            each.close()
        disk = Slab(tmp_path, name="run.1", allow_memory=True)
        with pytest.raises(GenerationError, match=r"ranks \[1\] were given, of a run on 2 shard ranks: give each once"):
            write_checkpoint([disk], tmp_path / "kept", **given)
        disk.close()
        disks = [Slab(tmp_path, name=f"run.{place}", allow_memory=True) for place in (0, 1)]
        with pytest.raises(GenerationError, match="give the step and the optimizer that the run had"):
            write_checkpoint(
                disks, tmp_path / "other", step=TorchStep(), optimizer=torch.optim.SGD([torch.zeros(1)], lr=1)
            )
        for each in disks:
            each.close()
        with pytest.raises(GenerationError, match="no step of its run was committed"):
            write_checkpoint([CrashByteStore()], tmp_path / "other", **given)
    torch.distributed.barrier()
    for options in ({"stage": 0}, {"stage": 3}):
        (values, step), (others, other) = (loaded(tmp_path / name, **options) for name in ("kept", "saved"))
        assert step == other == 2
        assert equal(values, others)


def test_a_checkpoint_in_the_background_fails_alone(tmp_path, monkeypatch, expected):
    """Its error comes from wait(), from the next one or from close(). The folder holds what it held."""
    training = Training(CrashByteStore())
    folder = tmp_path / "saved"
    training.step()
    checkpoint.save(folder, training.model, training.optimizer, blocking=False).wait()
    before, (values, _) = set(folder.iterdir()), loaded(folder)

    (tmp_path / "file").write_text("")
    for _ in range(2):
        training.step()
        with pytest.raises(CheckpointError, match="NotADirectoryError"):
            checkpoint.save(tmp_path / "file" / "saved", training.model, training.optimizer, blocking=False).wait()

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    for told in ("wait", "next", "close"):
        training.step()
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            saving = checkpoint.save(folder, training.model, training.optimizer, blocking=False)
            training.step()
            training.store.wait()
            while not saving.done():
                time.sleep(0.01)
        with pytest.raises(CheckpointError, match="No space left on device; an earlier checkpoint there stands"):
            if told == "wait":
                saving.wait()
            elif told == "next":
                checkpoint.save(folder, training.model, training.optimizer, blocking=False)
            else:
                training.optimizer.close()
        assert set(folder.iterdir()) == before
        assert equal(loaded(folder)[0], values)
    assert training.store._closed


def test_a_store_that_is_closed_ends_the_copy(tmp_path):
    training = Training(CrashByteStore())
    training.step()
    generations, reading = training.store._on._generations, threading.Event()
    read = generations.read_pinned

    def held(name, buffer):
        reading.wait(30)
        read(name, buffer)

    generations.read_pinned = held
    saving = checkpoint.save(tmp_path, training.model, training.optimizer, blocking=False)
    training.step()
    training.store.close()
    reading.set()
    with pytest.raises(CheckpointError, match="was given up: the store was closed before the checkpoint was written"):
        saving.wait()
    assert not (tmp_path / ".metadata").exists()


@pytest.mark.parametrize("ending, code", [("pass", 0), ("raise RuntimeError", 1), ("raise SystemExit(3)", 3)])
def test_the_interpreter_may_exit_while_a_checkpoint_is_written(ending, code, interpreter, tmp_path):
    """With nobody having closed the optimizer. The checkpoint is given up, and the folder holds what it held."""
    program = """
    import threading
    import torch
    import zero_core
    from zero_core import checkpoint
    from zero_offload import TieredStore
    from zero_offload.testing import CrashByteStore

    model = torch.nn.Linear(24, 24)
    store = TieredStore("nvme", "nvme", "nvme", nvme=CrashByteStore(), durable=True)
    optimizer = zero_core.shard(model, torch.optim.AdamW(model.parameters()), store=store)
    zero_core.resume(model, optimizer)
    model(torch.ones(1, 24)).sum().backward()
    optimizer.step()
    generations, begun = store._on._generations, threading.Event()
    read = generations.read_pinned

    def slow(name, buffer):
        values = torch.zeros(1 << 20)
        begun.set()
        for _ in range(300):
            values.add_(1)
        read(name, buffer)

    generations.read_pinned = slow
    saving = checkpoint.save("saved", model, optimizer, blocking=False)
    begun.wait(30)
    print("ready", flush=True)
    """
    done = interpreter(textwrap.dedent(program) + ending, tmp_path)
    assert "ready" in done.stdout and done.returncode == code, (done.returncode, done.stderr)
    assert "Fatal" not in done.stderr and "terminate called" not in done.stderr, done.stderr
    assert not (tmp_path / "saved" / ".metadata").exists()


@kit.on_ranks(2)
def test_ranks_that_save_in_the_background_wait_as_long_for_each_other_as_the_others(tmp_path):
    """torch gives a new group a time-out of 30 minutes, for which a rank would wait for one that is gone."""
    training = Training(CrashByteStore(), stage=2)
    beside, everyone = training.model.__dict__["_zero_handle"].ranks.beside(), torch.distributed.group.WORLD
    found, wanted = (group._get_backend(torch.device("cpu")).options._timeout for group in (beside, everyone))
    assert found == wanted and wanted.total_seconds() < 1800
    training.end()


@kit.on_ranks(2)
def test_ranks_save_in_the_background(tmp_path):
    training = Training(CrashByteStore(), stage=3)
    for _ in range(2):
        training.step()
    checkpoint.save(tmp_path / "blocking", training.model, training.optimizer)
    saving = checkpoint.save(tmp_path / "beside", training.model, training.optimizer, blocking=False)
    training.to_the_end()
    saving.wait()
    training.end()
    (values, step), (others, other) = loaded(tmp_path / "beside"), loaded(tmp_path / "blocking")
    assert step == other == 2
    assert equal(values, others)


def test_advice_about_durable_runs_works(tmp_path):
    """Each mistake is made, and then what its error says is done."""
    plain = made()
    plain_optimizer = zero_core.shard(plain, torch.optim.SGD(plain.parameters(), lr=1))
    with pytest.raises(ZeroError, match="whose store is not durable; give shard a store such as"):
        zero_core.resume(plain, plain_optimizer)
    with pytest.raises(ZeroError, match="is not durable: give shard a store with durable=True, or save with blocking="):
        checkpoint.save(tmp_path / "plain", plain, plain_optimizer, blocking=False)
    checkpoint.save(tmp_path / "plain", plain, plain_optimizer, blocking=True).wait()
    partly = Training(CrashByteStore(), frozen=True)
    partly.step()
    with pytest.raises(ZeroError, match="0.weight, 0.bias is not: leave what is not trained out with trained_only=Tr"):
        checkpoint.save(tmp_path / "partly", partly.model, partly.optimizer, blocking=False)
    checkpoint.save(tmp_path / "partly", partly.model, partly.optimizer, trained_only=True, blocking=False).wait()
    assert loaded(tmp_path / "partly", frozen=True)[1] == 1
    partly.end()
    with pytest.raises(ValueError, match="must be False, True or"):
        TieredStore(durable="always")
    with pytest.raises(GenerationError, match="give a named one, such as zero_nvme.Slab"):
        Training(MemoryByteStore())
    with pytest.raises(GenerationError, match="durable needs nvme="):
        Training(None, "host")
    shared = Slab([tmp_path], name="shared", allow_memory=True)
    shared.allocate(1)
    with pytest.raises(GenerationError, match="others have a part; give it a slab of its own"):
        Training(shared, "host")
    shared.remove()
    model, disk = made(), Slab([tmp_path], name="run", allow_memory=True)
    store = TieredStore("host", "host", "tape", tiers={"tape": MemoryByteStore()}, nvme=disk, durable=True)
    with pytest.raises(GenerationError, match='on tape: .* place parameters and optimizer on "host" or "nvme"'):
        zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.1), store=store)
    disk.close()

    disk = Slab([tmp_path], name="run", allow_memory=True)
    model = made()
    store = TieredStore("host", "host", "nvme", nvme=disk, durable=True)
    optimizer = zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.1), store=store)
    with pytest.raises(ZeroError, match=r"call zero_core.resume\(model, optimizer\) after shard\(\)"):
        model(torch.zeros(2, 24))
    scheduler, given = torch.optim.lr_scheduler.StepLR(optimizer, 2), [object()]
    with pytest.raises(ZeroError, match=r"call zero_core.resume\(model, optimizer\) before"):
        zero_core.commit(model)
    zero_core.resume(model, optimizer, scheduler=scheduler, extra=lambda: given[0])
    with pytest.raises(ZeroError, match="resume\\(\\) was called before: call it once, after"):
        zero_core.resume(model, optimizer)
    kit.step(optimizer, model(torch.zeros(2, 24)).sum())
    with pytest.raises(ZeroError, match=r"\['extra'\] is a object, and a generation keeps .*give what it is made of"):
        model(torch.zeros(2, 24))
    given[0] = {"position": 1}
    kit.step(optimizer, model(torch.zeros(2, 24)).sum())
    zero_core.commit(model)
    optimizer.close()
    disk.close()

    def again(name="run", frozen=False, scheduler=True):
        disk = Slab([tmp_path], name=name, allow_memory=True)
        model = made(frozen)
        store = TieredStore("host", "host", "nvme", nvme=disk, durable=True)
        trained = [p for p in model.parameters() if p.requires_grad]
        try:
            optimizer = zero_core.shard(model, torch.optim.SGD(trained, lr=1e-3, momentum=0.1), store=store)
            chosen = torch.optim.lr_scheduler.StepLR(optimizer, 2) if scheduler else None
            return zero_core.resume(model, optimizer, scheduler=chosen).step
        finally:
            store.close()
            disk.close()

    with pytest.raises(
        GenerationError, match="start it as it was, give the slab another name, remove it to begin anew"
    ):
        again(frozen=True)
    with pytest.raises(CheckpointError, match="start it as it was, or remove its slab to begin anew"):
        again(scheduler=False)
    assert again() == 2
    assert again(name="other", frozen=True) == 0
    Slab([tmp_path], name="run", allow_memory=True).remove()
    assert again(scheduler=False) == 0
