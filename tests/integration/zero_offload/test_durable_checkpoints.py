"""Checkpoints of a durable run: saved in the background while it goes on, and written of the slabs that it left."""

import errno
import os
import textwrap
import threading
import time

import pytest
import torch

pytest.importorskip("zero_nvme")

from tests import kit
from tests.chunks import TILE, small_chunks
from tests.integration.zero_offload.durable import PLACES, Training, equal, loaded, slab, uninterrupted
from zero_core import checkpoint
from zero_core.errors import CheckpointError
from zero_offload import GenerationError, TorchStep, write_checkpoint
from zero_offload.testing import CrashByteStore


@pytest.mark.promise("durable-copied-out")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("options", [{}, {"param_dtype": torch.bfloat16}], ids=str)
def test_a_checkpoint_in_the_background_is_of_its_step(place, options, tmp_path):
    """While the copy is slow, two more steps come, and the second waits for it. The run is not changed by it."""
    training = Training(CrashByteStore(), place, **options)
    training.steps(3)
    checkpoint.save(tmp_path / "blocking", training.model, training.optimizer, extra="it")
    read, begun = training.store._on.generations.read_pinned, threading.Event()

    def slow(name, buffer):
        begun.wait(30)
        time.sleep(0.05)
        read(name, buffer)

    training.store._on.generations.read_pinned = slow
    saving = checkpoint.save(tmp_path / "beside", training.model, training.optimizer, extra="it", blocking=False)
    training.step()
    assert not saving.done() and not (tmp_path / "beside" / ".metadata").exists()
    begun.set()
    ends = training.to_the_end()
    saving.wait()
    assert saving.done()
    training.end()
    assert equal(ends, uninterrupted(**options))
    (values, step), (others, other) = loaded(tmp_path / "beside"), loaded(tmp_path / "blocking")
    assert step == other == 3
    assert equal(values, others)


@pytest.mark.promise("durable-elsewhere")
@pytest.mark.parametrize("options", [{}, {"param_dtype": torch.bfloat16}], ids=str)
def test_a_run_goes_on_in_other_tiles(options, tmp_path):
    """By a checkpoint of its slab. The boxes of a checkpoint lie across tiles."""
    options = {**options, "width": 1000}
    with small_chunks():
        whole = Training(CrashByteStore(), tile_numel=TILE, **options)
        ends = whole.to_the_end()
        whole.end()
        disk = slab(tmp_path)
        training = Training(disk, tile_numel=TILE, **options)
        training.steps(3)
        for name, blocking, size in (("blocking", True, 1000), ("small", False, 100), ("large", False, 3 * TILE)):
            checkpoint.save(
                tmp_path / name, training.model, training.optimizer, tile_numel=size, blocking=blocking
            ).wait()
        training.end()
        disk.close()
        values, _ = loaded(tmp_path / "blocking", width=1000)
        for name in ("small", "large"):
            assert equal(loaded(tmp_path / name, width=1000)[0], values)

        disk = slab(tmp_path)
        with pytest.raises(
            GenerationError, match="tile_numel: .*Or write a checkpoint of that run with zero_offload.wr"
        ):
            Training(disk, tile_numel=2 * TILE, **options)
        disk.close()
        disk = slab(tmp_path)
        step, extra = write_checkpoint(
            [disk], tmp_path / "kept", step=TorchStep(), optimizer=torch.optim.AdamW([torch.zeros(1)])
        )
        disk.remove()
        assert (step, extra) == (3, {"position": 3})
        assert equal(loaded(tmp_path / "kept", width=1000)[0], values)
        again = Training(slab(tmp_path), "half", tile_numel=2 * TILE, **options)
        found = checkpoint.load(tmp_path / "kept", again.model, again.optimizer, scheduler=again.scheduler)
        again.position = found.extra["position"]
        assert equal(again.to_the_end(), ends)
        again.end()


@pytest.mark.advice("slabs given are of ranks {}: give the slab of each rank once")
@pytest.mark.promise("durable-elsewhere")
@kit.on_ranks(2)
def test_slabs_of_ranks_are_one_checkpoint(tmp_path):
    """For another stage, and any number of ranks. A slab that is missing, or of another step, is told."""
    rank, _ = kit.world()
    disk = slab(tmp_path, f"run.{rank}")
    training = Training(disk, stage=3)
    training.steps(2)
    checkpoint.save(tmp_path / "saved", training.model, training.optimizer)
    training.end()
    disk.close()
    torch.distributed.barrier()  # the other rank's is closed too
    if rank == 0:
        disks = [slab(tmp_path, f"run.{place}") for place in (1, 0)]
        given = {"step": TorchStep(), "optimizer": torch.optim.AdamW([torch.zeros(1)])}
        assert write_checkpoint(disks, tmp_path / "kept", **given) == (2, {"position": 2})
        for each in disks:
            each.close()
        other = given | {"optimizer": torch.optim.SGD([torch.zeros(1)], lr=1)}
        for places, options, told in (
            ((1,), given, r"ranks \[1\]: give the slab of each rank once"),
            ((0, 1), other, "give the `step` and the optimizer that the run had"),
        ):
            disks = [slab(tmp_path, f"run.{place}") for place in places]
            with pytest.raises(GenerationError, match=told):
                write_checkpoint(disks, tmp_path / "other", **options)
            for each in disks:
                each.close()
        with pytest.raises(GenerationError, match="no step of its run was committed"):
            write_checkpoint([CrashByteStore()], tmp_path / "other", **given)
    torch.distributed.barrier()
    for options in ({"stage": 0}, {"stage": 3}):
        (values, step), (others, other) = (loaded(tmp_path / name, **options) for name in ("kept", "saved"))
        assert step == other == 2
        assert equal(values, others)


@pytest.mark.advice("wait() on the result of save() before you close")
@pytest.mark.promise("durable-copied-out")
def test_a_checkpoint_in_the_background_fails_alone(tmp_path, monkeypatch):
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
        with pytest.raises(CheckpointError, match="No space left on device.* make room. An earlier checkpoint is kept"):
            if told == "wait":
                saving.wait()
            elif told == "next":
                checkpoint.save(folder, training.model, training.optimizer, blocking=False)
            else:
                training.optimizer.close()
        assert set(folder.iterdir()) == before
        assert equal(loaded(folder)[0], values)
    assert training.store._closed


@pytest.mark.promise("durable-copied-out")
def test_a_store_that_is_closed_ends_the_copy(tmp_path):
    training = Training(CrashByteStore())
    training.step()
    generations, reading = training.store._on.generations, threading.Event()
    read = generations.read_pinned

    def held(name, buffer):
        reading.wait(30)
        read(name, buffer)

    generations.read_pinned = held
    saving = checkpoint.save(tmp_path, training.model, training.optimizer, blocking=False)
    training.step()
    training.store.close()
    reading.set()
    with pytest.raises(
        CheckpointError, match="the store was closed before .* was copied, so the checkpoint is incomplete"
    ):
        saving.wait()
    assert not (tmp_path / ".metadata").exists()


@pytest.mark.promise("exit-while-saving")
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
    generations, begun = store._on.generations, threading.Event()
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


@pytest.mark.promise("background-checkpoint-wait", "durable-copied-out")
@kit.on_ranks(2)
def test_ranks_that_save_in_the_background_wait_as_long_for_each_other_as_the_others(tmp_path):
    """torch gives a new group a time-out of 30 minutes, for which a rank would wait for one that is gone."""
    training = Training(CrashByteStore(), stage=3)
    beside, everyone = training.model.__dict__["_zero_handle"].ranks.beside(), torch.distributed.group.WORLD
    found, wanted = (group._get_backend(torch.device("cpu")).options._timeout for group in (beside, everyone))
    assert found == wanted and wanted.total_seconds() < 1800
    training.steps(2)
    checkpoint.save(tmp_path / "blocking", training.model, training.optimizer)
    saving = checkpoint.save(tmp_path / "beside", training.model, training.optimizer, blocking=False)
    training.to_the_end()
    saving.wait()
    training.end()
    (values, step), (others, other) = loaded(tmp_path / "beside"), loaded(tmp_path / "blocking")
    assert step == other == 2 and equal(values, others)
