"""A durable TieredStore: a process that is killed anywhere is gone on from, with the bits of an uninterrupted run."""

import random
from functools import partial

import pytest
import torch

pytest.importorskip("zero_nvme")

import zero_core
from tests import kit
from tests.integration.zero_offload.durable import (
    PLACES,
    STEPS,
    Training,
    equal,
    loaded,
    made,
    slab,
    trained_of,
    uninterrupted,
)
from zero_core import checkpoint
from zero_core.errors import CheckpointError, ZeroError
from zero_nvme import NvmeError, Slab
from zero_offload import GenerationError, MemoryByteStore, TieredStore
from zero_offload.testing import CrashByteStore, Crashed


@pytest.mark.promise("durable")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("options", [{}, {"frozen": True}, {"param_dtype": torch.bfloat16}], ids=str)
def test_a_crash_at_any_write_is_gone_on_from(place, options):
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
        assert equal(again.to_the_end(), uninterrupted(**options)), (after, again.resumed)
        again.end()
        after += 11
    assert calls > 20


def crashed(error):
    while error is not None and not isinstance(error, Crashed):
        error = error.__cause__ or error.__context__
    return error is not None


@pytest.mark.promise("durable")
@pytest.mark.parametrize("durable", [True, "process"])
def test_a_run_on_a_named_slab_ends_and_is_gone_on_from(tmp_path, durable):
    """In several parts, each placed in another way; states on disk stay where they are."""
    for place, stop in zip(("nvme", "half", "host", "states"), (2, 3, 5, STEPS), strict=True):
        disk = slab(tmp_path)
        training = Training(disk, place, durable=durable)
        assert training.position == training.resumed.step
        while training.position < stop:
            training.step()
        if stop == STEPS:
            assert equal(training.to_the_end(), uninterrupted())
        training.end()
        disk.close()


@pytest.mark.promise("durable-full-disk")
def test_a_commit_looks_for_no_room(tmp_path, monkeypatch):
    """Fails where the manifests' room is found at the first commit, for which others may have filled the disk."""
    disk = slab(tmp_path)
    training = Training(disk)

    def full(nbytes):
        raise OSError(28, "the disk is full")

    monkeypatch.setattr(disk, "allocate", full)
    assert equal(training.to_the_end(), uninterrupted())
    training.end()
    disk.remove()


@pytest.mark.promise("durable-frozen")
def test_a_write_into_what_is_not_trained_is_refused_after_the_first_step():
    training = Training(CrashByteStore(), frozen=True)
    weight = training.model[0].weight
    with torch.no_grad():
        weight.fill_(0.5)
    training.steps(3)
    with torch.no_grad():
        weight.mul_(0.9)
    with pytest.raises(ZeroError, match=r"^0\.weight is not trained and was written after .*Make it a buffer"):
        training.step()
    training.store.close()


@pytest.mark.promise("durable")
def test_averages_in_place_of_the_weights_are_no_step():
    disk = CrashByteStore()
    training = Training(disk)
    training.steps(2)
    average = zero_core.AveragedModel(training.model, avg_fn=lambda average, current, count: average + 1)
    average.update_parameters()
    average.update_parameters()
    with average.swapped_in() as model:
        model.eval()(torch.ones(2, 24)).sum().backward()
        with pytest.raises(ZeroError, match=r"commit\(\) inside AveragedModel.swapped_in .*: leave the"):
            zero_core.commit(model)
    training.optimizer.zero_grad()
    training.model.train()
    zero_core.commit(training.model)
    training.store.close()
    again = Training(disk.crashed(random.Random(0)))
    assert again.resumed.step == 2 and equal(again.to_the_end(), uninterrupted())
    again.end()


@pytest.mark.promise("durable-every")
def test_of_several_steps_one_is_kept():
    """What lies in memory is copied for these alone. The last step is kept in any case."""
    written = {}
    for every in (1, 3):
        disk, generator = CrashByteStore(), random.Random(0)
        training = Training(disk, "host", every=every)
        training.steps(5)
        training.store.committed()
        written[every] = training.store.stats()["nvme_write_bytes"]
        again = Training(disk.crashed(generator), "host", every=every)
        assert again.resumed.step == again.position == {1: 4, 3: 3}[every]
        assert equal(again.to_the_end(), uninterrupted())
        again.end()
        training.end()
        last = Training(disk.crashed(generator), "host")
        assert last.resumed.step == 5
        last.end()
    assert written[3] * 3 < written[1]
    with pytest.raises(ValueError, match="every=0 must be at least 1"):
        Training(CrashByteStore(), every=0)


@pytest.mark.promise("durable")
def test_an_evaluation_is_no_step_and_closing_commits_none():
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
    assert equal(again.to_the_end(), uninterrupted())
    again.end()


@pytest.mark.promise("durable-sync-fails")
def test_a_failed_sync_ends_the_run(tmp_path, monkeypatch):
    """After it nothing may be assumed written. The generation before it stands."""
    disk = slab(tmp_path)
    training = Training(disk)
    training.steps(3)
    training.store.committed()

    def failing():
        raise OSError(5, "lost")

    monkeypatch.setattr(disk, "sync", failing)
    with pytest.raises(
        OSError,
        match="a step could not be written to disk: .*With durable= the run continues after its last step",
    ):
        training.to_the_end()
    training.store.close()
    disk.close()
    again = Training(slab(tmp_path))
    assert again.resumed.step in (2, 3)
    again.end()


@pytest.mark.promise("durable-sync-fails")
def test_a_slab_that_was_cut_is_refused(tmp_path):
    """And not filled up with zeros."""
    disk = slab(tmp_path)
    training = Training(disk)
    training.steps(3)
    training.end()
    disk.close()
    whole = (tmp_path / "run.slab").read_bytes()
    for length in (len(whole) - 4096, len(whole) // 2, 8192):
        (tmp_path / "run.slab").write_bytes(whole[:length])
        disk = slab(tmp_path)
        with pytest.raises((GenerationError, NvmeError), match="its files were cut|is damaged: .* generation 3"):
            Training(disk)
        disk.close()
        assert (tmp_path / "run.slab").read_bytes() == whole[:length]
    (tmp_path / "run.slab").write_bytes(b"")  # as a process leaves it that is killed before it writes anything
    disk = slab(tmp_path)
    again = Training(disk)
    assert again.resumed.step == 0
    again.end()
    disk.close()
    (tmp_path / "run.slab").write_bytes(whole)
    again = Training(slab(tmp_path))
    assert again.resumed.step == 3
    again.end()


@pytest.mark.promise("durable-ranks")
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
        training.steps(3)
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


@pytest.mark.advice("load a checkpoint, after removing the slabs of all")
@pytest.mark.promise("durable-ranks")
@kit.on_ranks(2)
def test_a_rank_without_its_slab_is_told():
    rank, _ = kit.world()
    disk = CrashByteStore()
    training = Training(disk, stage=3)
    training.steps(3)
    training.end()
    with pytest.raises(ZeroError, match=r"are \[3, 0\], and ranks of one run differ by .*: rank 1 has lost its slab"):
        Training(CrashByteStore() if rank else disk.crashed(random.Random(0)), stage=3)
    anew = Training(CrashByteStore(), stage=3)
    assert anew.resumed.step == 0
    anew.end()


@pytest.mark.advice(
    "Leave them out with trained_only=True, or",
    'place parameters and optimizer on "host" or "{}"',
    "delete the slab with slab.remove(), and",
)
@pytest.mark.promise("durable-other-run")
def test_another_run_is_refused_and_unchanged_and_advice_about_durable_runs_works(tmp_path):
    """Each mistake is made, and then what its error says is done."""
    sgd, saved = partial(torch.optim.SGD, lr=1e-3, momentum=0.1), checkpoint.save
    plain = made()
    plain_optimizer = zero_core.shard(plain, sgd(plain.parameters()))
    with pytest.raises(ZeroError, match="whose store is not durable; give shard a store such as"):
        zero_core.resume(plain, plain_optimizer)
    with pytest.raises(ZeroError, match="is not durable: give shard a store with durable=True, or save with blocking="):
        saved(tmp_path / "plain", plain, plain_optimizer, blocking=False)
    saved(tmp_path / "plain", plain, plain_optimizer, blocking=True).wait()
    partly = Training(CrashByteStore(), frozen=True)
    partly.step()
    with pytest.raises(ZeroError, match="are not trained: 0.weight, 0.bias. Leave them out with trained_only"):
        saved(tmp_path / "partly", partly.model, partly.optimizer, blocking=False)
    saved(tmp_path / "partly", partly.model, partly.optimizer, trained_only=True, blocking=False).wait()
    assert loaded(tmp_path / "partly", frozen=True)[1] == 1
    partly.end()
    shared = Slab([tmp_path], name="shared", allow_memory=True)
    shared.allocate(1)
    with pytest.raises(ValueError, match="must be False, True or"):
        TieredStore(durable="always")
    for disk, place, told in (
        (MemoryByteStore(), "nvme", "give nvme= a store that has a name, such as zero_nvme.Slab"),
        (None, "host", r"durable= needs a named ByteStore, such as nvme=zero_nvme.Slab\(\[path\], name=..."),
        (shared, "host", "a slab of its own, and .* has other data; give the store another slab"),
    ):
        with pytest.raises(GenerationError, match=told):
            Training(disk, place)
    shared.remove()

    def begun(name="run", frozen=False, build=sgd, states="nvme", **tiers):
        model, disk = made(frozen), slab(tmp_path, name)
        store = TieredStore("host", "host", states, nvme=disk, durable=True, **tiers)
        try:
            optimizer = zero_core.shard(model, build(trained_of(model)), store=store)
        except GenerationError:
            store.close()
            disk.close()
            raise
        return model, optimizer, store, disk

    with pytest.raises(
        GenerationError, match='of unit 0 on tier "tape"; place parameters and optimizer on "host" or "nvme"'
    ):
        begun(states="tape", tiers={"tape": MemoryByteStore()})
    model, optimizer, _, disk = begun()
    with pytest.raises(ZeroError, match=r"call zero_core.resume\(model, optimizer\) after shard\(\)"):
        model(torch.zeros(2, 24))
    scheduler, given = torch.optim.lr_scheduler.StepLR(optimizer, 2), [object()]
    with pytest.raises(ZeroError, match=r"without resume\(\): call zero_core.resume\(model, optimizer\) before"):
        zero_core.commit(model)
    zero_core.resume(model, optimizer, scheduler=scheduler, extra=lambda: given[0])
    with pytest.raises(ZeroError, match="resume\\(\\) was already called: call it once, after"):
        zero_core.resume(model, optimizer)
    kit.step(optimizer, model(torch.zeros(2, 24)).sum())
    with pytest.raises(ZeroError, match=r"\['extra'\] is of type object. Only numbers, .*give the object's contents"):
        model(torch.zeros(2, 24))
    given[0] = {"position": 1}
    kit.step(optimizer, model(torch.zeros(2, 24)).sum())
    zero_core.commit(model)
    optimizer.close()
    disk.close()

    def again(scheduler=True, **given):
        model, optimizer, store, disk = begun(**given)
        chosen = torch.optim.lr_scheduler.StepLR(optimizer, 2) if scheduler else None
        try:
            return zero_core.resume(model, optimizer, scheduler=chosen).step
        finally:
            store.close()
            disk.close()

    image = (tmp_path / "run.slab").read_bytes()
    anew = r"use its model and settings\. .* give the slab another name, or delete it with slab.remove\(\)"
    setting = rf"another model or other settings \(.*trained elements: 2048, now 1024.*{anew}"
    scheduled = r"given scheduler=: True in .* now\. Change your program back. Or, .* call remove\(\) of the Slab"
    for error, told, mistake in (
        (GenerationError, setting, {"frozen": True}),
        (GenerationError, r"\(optimizer: SGD, now Adam; .*use its model and settings", {"build": torch.optim.Adam}),
        (CheckpointError, scheduled, {"scheduler": False}),
    ):
        with pytest.raises(error, match=told):
            again(**mistake)
        assert (tmp_path / "run.slab").read_bytes() == image
    assert again() == 2
    assert again(name="other", frozen=True) == 0
    slab(tmp_path).remove()
    assert again(scheduler=False) == 0
