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
from tests.integration.zero_train.helpers import trained
from zero_core.errors import GradientError
from zero_offload.testing import FaultyByteStore
from zero_train.errors import RunError
from zero_train.model import causal_lm
from zero_train.report import picture, progress
from zero_train.run import assemble

STEPS = 8
RUN = ("offload=nvme", f"run.steps={STEPS}", "run.checkpoint_every=3")
KINDS = ("parameters", "gradients", "optimizer")


class Failing(FaultyByteStore):
    """A slab that can be told to fail, and still says what it is."""

    def __getattr__(self, name):
        return getattr(self.inner, name)


@pytest.fixture
def after_step(monkeypatch):
    """`after_step(n, act)`: calls `act` when step n has been shown, the first time."""

    def arrange(number, act):
        shown, due = progress.Told.step, [act]

        def step(self, line):
            shown(self, line)
            if line.step == number and due:
                due.pop()()

        monkeypatch.setattr(progress.Told, "step", step)

    return arrange


@pytest.mark.promise("io-error-tile")
@pytest.mark.parametrize("kind", ["read", "write"])
def test_an_io_error_names_file_offset_and_tile_and_the_last_checkpoint_stands(tmp_path, monkeypatch, after_step, kind):
    whole = trained(tmp_path / "whole", *RUN)
    made = []

    def make_slab(*arguments):
        made.append(Failing(real(*arguments), path="/mnt/nvme0/slab"))
        return made[-1]

    real = assemble.make_slab
    with monkeypatch.context() as patch:
        patch.setattr(assemble, "make_slab", make_slab)
        after_step(5, lambda: made[0].fail(kind, after=2))
        with pytest.raises(RunError) as caught:
            trained(tmp_path / "run", *RUN)
    text = str(caught.value)
    assert "Input/output error" in text and "/mnt/nvme0/slab, offset" in text and "checkpoint" in text
    assert ("reading" if kind == "read" else "writing") in text and ("tile" in text or "parameters of" in text)
    rest = trained(tmp_path / "run", *RUN, "run.resume=auto")
    assert [step.step for step in rest.steps] == [4, 5, 6, 7, 8]  # from the checkpoint after step 3
    assert rest.losses == whole.losses[3:]
    assert rest.digest == whole.digest


@pytest.mark.promise("device-full")
def test_a_device_without_room_ends_the_run_with_a_way_out(tmp_path, monkeypatch, after_step):
    logits = causal_lm.logits

    def full(model, tokens):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    after_step(2, lambda: monkeypatch.setattr(causal_lm, "logits", full))
    with pytest.raises(RunError, match=r"2\.0 GiB more were asked for; .*lower it with .*run\.micro_batch"):
        trained(tmp_path / "run", "offload=nvme", "run.steps=4")
    assert logits is not causal_lm.logits
    assert [step.step for step in picture.read_steps(tmp_path / "run")] == [1, 2]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in "abc")

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def sharded(folder):
    torch.manual_seed(0)
    model = Net()
    slab = zero_nvme.Slab([str(folder)], allow_memory=True)
    store = zero_offload.TieredStore(
        **dict.fromkeys(KINDS, "nvme"), nvme=slab, step=zero_optim_cpu.CpuStep(threads=1), slots=3, tile_numel=1 << 20
    )
    return model, zero_core.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), store=store, max_grad_norm=1.0)


def advance(model, optimizer, number, spoil=1.0):
    x = torch.full((4, 64), 0.1) * (number + 1)
    return kit.step(optimizer, model(x) * spoil).item()


@pytest.mark.promise("nan-in-flight")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_with_updates_in_flight_changes_nothing(tmp_path, bad):
    (tmp_path / "plain").mkdir()
    model, optimizer = sharded(tmp_path / "plain")
    plain = [advance(model, optimizer, n) for n in range(4)]
    optimizer.close()
    model, optimizer = sharded(tmp_path)
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
        model, optimizer = sharded(pathlib.Path({str(tmp_path)!r}))
        for n in range(3):
            advance(model, optimizer, n)
        {ending}
    """
    done = interpreter(program)
    assert done.returncode == {"p": 0, "r": 1, "s": 3, "o": 4}[ending[0]], done.stderr
    assert ("Traceback" in done.stderr) == (ending[0] == "r") and "Fatal" not in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []  # nothing of the slab is left
