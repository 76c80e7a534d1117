"""What goes wrong in the middle of a run: it stops with the file and the tile, and the last checkpoint stands.

Each fault is put where the disk is, under the real slab, step and loop. Fails if an error is lost, comes late, or takes
a checkpoint with it.
"""

import pytest
import torch

import zero_core
import zero_nvme
import zero_offload
import zero_optim_cpu
from tests import kit
from tests.integration.zero_train.helpers import COMMON, after_step, left, trained
from zero_core.errors import GradientError
from zero_offload.testing import FaultyByteStore
from zero_train.errors import RunError
from zero_train.report import picture
from zero_train.run import assemble, loop, planning
from zero_train.run.ranks import Ranks
from zero_train.settings import compose

STEPS = 8
RUN = ("offload=nvme", f"run.steps={STEPS}", "run.checkpoint_every=3")
KINDS = ("parameters", "gradients", "optimizer")


class Failing(FaultyByteStore):
    """A slab that can be told to fail, and still says what it is."""

    def __getattr__(self, name):
        return getattr(self.inner, name)


@pytest.mark.promise("io-error-tile")
@pytest.mark.parametrize("kind", ["read", "write"])
def test_an_io_error_names_file_offset_and_tile_and_the_last_checkpoint_stands(tmp_path, monkeypatch, kind):
    whole = trained(tmp_path / "whole", *RUN)
    made = []

    def make_slab(*arguments):
        made.append(Failing(real(*arguments), path="/mnt/nvme0/slab"))
        return made[-1]

    real = assemble.make_slab
    with monkeypatch.context() as patch:
        patch.setattr(assemble, "make_slab", make_slab)
        with pytest.raises(RunError) as caught, after_step(5, lambda: made[0].fail(kind, after=2)):
            trained(tmp_path / "run", *RUN)
    text = str(caught.value)
    assert "Input/output error" in text and "/mnt/nvme0/slab, offset" in text and "checkpoint" in text
    assert ("reading" if kind == "read" else "writing") in text and ("tile" in text or "parameters of" in text)
    rest = trained(tmp_path / "run", *RUN, "run.resume=auto")
    assert [step.step for step in rest.steps] == [4, 5, 6, 7, 8]  # from the checkpoint after step 3
    assert rest.losses == whole.losses[3:]
    assert rest.digest == whole.digest


class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        layers = (torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh()) for _ in "abcd")
        self.width, self.layers = width, torch.nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def sharded(folder, width=64, slab=None):
    """A model with everything in a slab, or in one of its own in `folder`, its store and its optimizer."""
    torch.manual_seed(0)
    model, slab = Net(width), slab or zero_nvme.Slab([str(folder)], allow_memory=True)
    store = zero_offload.TieredStore(
        **dict.fromkeys(KINDS, "nvme"), nvme=slab, step=zero_optim_cpu.CpuStep(threads=1), slots=3, tile_numel=1 << 20
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, store, zero_core.shard(model, optimizer, store=store, max_grad_norm=1.0)


def advance(model, optimizer, number, spoil=1.0, rows=512):
    x = torch.full((rows, model.width), 0.1) * (number + 1)
    return kit.step(optimizer, model(x) * spoil).item()


@pytest.mark.promise("nan-in-flight")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_with_updates_in_flight_changes_nothing(tmp_path, bad):
    (tmp_path / "plain").mkdir()
    model, _, optimizer = sharded(tmp_path / "plain")
    plain = [advance(model, optimizer, n) for n in range(4)]
    optimizer.close()
    model, _, optimizer = sharded(tmp_path)
    found = [advance(model, optimizer, n) for n in range(2)]
    with pytest.raises(GradientError, match="nothing was updated"):
        advance(model, optimizer, 2, spoil=bad)  # the update of the step before is still behind
    found += [advance(model, optimizer, n) for n in range(2, 4)]
    optimizer.close()
    assert found == plain


@pytest.mark.promise("interpreter-ends")
@pytest.mark.parametrize("ending", ["pass", "raise RuntimeError('the loop broke')", "sys.exit(3)", "os._exit(4)"])
def test_the_interpreter_may_end_in_mid_update_on_a_real_slab(tmp_path, interpreter, ending):
    program = f"""
        import os, pathlib, sys
        from tests.integration.zero_train.test_faults import advance, sharded
        model, _, optimizer = sharded(pathlib.Path({str(tmp_path)!r}))
        for n in range(3):
            advance(model, optimizer, n)
        {ending}
    """
    done = interpreter(program)
    assert done.returncode == {"p": 0, "r": 1, "s": 3, "o": 4}[ending[0]], done.stderr
    assert ("Traceback" in done.stderr) == (ending[0] == "r") and "Fatal" not in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []  # nothing of the slab is left


MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. "
    "GPU 0 has a total capacity of 139.72 GiB of which 1.00 GiB is free."
    " Of the allocated memory 130.00 GiB is allocated by PyTorch, and 5.00 GiB is reserved by PyTorch but unallocated."
)


@pytest.mark.advice("save memory with {}")
@pytest.mark.promise("device-full")
def test_a_run_says_what_the_plan_gave_and_leaves_what_it_has_done(monkeypatch, tmp_path):
    """Fails if the run ends with a traceback or without the plan's advice, or if what it did before is lost."""
    real, calls = loop.loss_of, []

    def loss(*arguments):
        calls.append(0)
        if len(calls) == 3:
            raise torch.OutOfMemoryError(MESSAGE)
        return real(*arguments)

    monkeypatch.setattr(loop, "loss_of", loss)
    with pytest.raises(RunError) as caught:
        trained(tmp_path / "run", "offload=host", "run.micro_batch=4")
    text = str(caught.value)
    assert text.startswith(
        "the run stopped: out of memory on the host tier: 2.0 GiB more were asked for; 130.0 GiB are"
    )
    assert "zero_offload.plan expected " in text and "save memory with PYTORCH_CUDA_ALLOC_CONF=" in text
    assert "offload.optimizer=nvme" in text and "run.micro_batch" in text
    assert [step.step for step in picture.read_steps(tmp_path / "run")] == [1, 2]
    assert "timeline.json" in left(tmp_path / "run")


WAYS = ("run.micro_batch=1", "data.sequence_length=16", "offload.activations=recompute", "offload=nvme offload.slots=3")


@pytest.mark.parametrize("way", WAYS)
def test_memory_that_runs_out_before_the_first_step_has_ways_out_that_need_less(monkeypatch, tmp_path, way):
    def full(*_, **__):
        raise torch.OutOfMemoryError(MESSAGE)

    def memory(*words):
        given = compose.compose([*COMMON, f"run.dir={tmp_path / 'run'}", "offload=none", *words])
        plan = planning.make(given, assemble.model_of(given), Ranks(), None)
        return plan.total("device") + plan.total("host")

    with monkeypatch.context() as patch, pytest.raises(RunError) as caught:
        patch.setattr(assemble, "make_store", full)
        trained(tmp_path / "run", "offload=none", "run.micro_batch=4")
    assert "out of memory on the host tier: " in str(caught.value) and way.split("=")[0] in str(caught.value)
    assert memory("run.micro_batch=4", *way.split()) < memory("run.micro_batch=4")
    assert trained(tmp_path / "other", "offload=none", "run.micro_batch=4", *way.split()).losses
