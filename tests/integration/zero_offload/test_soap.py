"""examples/soap.py, whose states have other shapes than its matrices, on every tier: the bits of plain torch."""

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("zero_optim_cpu")

import zero_core
import zero_optim_cpu
from examples.soap import SOAP
from tests import kit
from tests.integration.zero_offload import test_muon as muon
from tests.integration.zero_offload.test_muon import STEPS, WIDTH, Run, apart, built, is_matrix, steps
from zero_core import checkpoint
from zero_core.errors import CheckpointError, UnsupportedOptimizerError
from zero_offload import GenerationError, MemoryByteStore, write_checkpoint
from zero_offload.testing import CrashByteStore

pytestmark = [pytest.mark.usefixtures("small_chunks"), pytest.mark.promise("soap")]

MATRIX = "layers.0.up.weight"  # (4 * WIDTH, WIDTH)


pair, run_of = partial(muon.pair, kind=SOAP), partial(Run, kind=SOAP)
NARROW = (("max_side", WIDTH),)  # a side of 4 x WIDTH is not rotated then


# -- states from before, and for later ---------------------------------------------------------------------------------


def dense(last: int, kind: Any = SOAP) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """A plain model after that many steps, which do not clip."""
    model = built()
    optimizers = pair(model.named_parameters(), kind=kind)
    steps(zero_core.JointOptimizer(*optimizers), model, 0, last)
    return model, optimizers


@pytest.mark.promise("muon-states")
@pytest.mark.parametrize("place", ["none", "mixed", "whole"])
def test_states_of_plain_torch_go_on_and_come_back(place: str) -> None:
    expected, theirs = dense(4)
    model, optimizers = dense(2)
    loaded = [each.state_dict() for each in optimizers]
    for given in (optimizers, None):  # carried over by shard(), and loaded after it
        if given is None:
            model, _ = dense(2)
        optimizer = muon.sharded(Run(place, clip=None), model, given or pair(model.named_parameters()))
        if given is None:
            optimizer.load_state_dict(loaded)
        steps(optimizer, model, 2, 4)
        full = optimizer.full_state_dict()
        assert not apart(kit.named_values(model), muon.parameters_of(expected))
        optimizer.close()
    both = zero_core.JointOptimizer(*theirs).state_dict()
    for number, state in both["state"].items():
        found = full["state"][number]
        assert state.keys() == found.keys()
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(found[name])) for name, v in state.items()), number


@pytest.mark.parametrize("place", ["none", "nvme", "whole"])
def test_a_state_of_another_shape_is_read_written_and_put_aside(place: str) -> None:
    model, optimizer = muon.begun(run_of(place))
    steps(optimizer, model, 0, 1)
    weight = model.get_parameter(MATRIX)
    values = torch.randn(4 * WIDTH, 4 * WIDTH)
    zero_core.set_full_state(weight, "left", values)
    for _ in range(2):
        found = zero_core.full_state(weight, "left")
        assert found is not None and torch.equal(found, values)
        zero_core.sleep(model, to=MemoryByteStore())
        zero_core.wake(model)
    with pytest.raises(
        zero_core.ZeroError, match=r"was given .* shape \(384, 96\) .*: give values of shape \(384, 384\)"
    ):
        zero_core.set_full_state(weight, "left", torch.zeros(4 * WIDTH, WIDTH))
    optimizer.close()


@pytest.mark.promise("states-refused")
def test_a_checkpoint_with_other_states_is_refused_as_of_another_optimizer(tmp_path: Any) -> None:
    model, optimizer = muon.begun(run_of("none"))
    steps(optimizer, model, 0, 1)
    checkpoint.save(tmp_path, model, optimizer)
    optimizer.close()
    model, optimizer = muon.begun(run_of("host", muon=NARROW))
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=r"of another optimizer: states .* shapes: optim\S+\.left: saved \("):
            checkpoint.load(tmp_path, model, optimizer, strict=strict)
    optimizer.close()


@pytest.mark.advice("optimizer given: give it the options that")
@pytest.mark.promise("muon-states")
def test_a_durable_run_goes_on_and_becomes_a_checkpoint(tmp_path: Any) -> None:
    expected = muon.train(run_of("host"))
    disk = CrashByteStore()
    model, optimizer, _ = muon.durable(disk, run_of("host"))
    steps(optimizer, model, 0, 2)
    zero_core.commit(model)
    checkpoint.save(tmp_path / "beside", model, optimizer, blocking=False).wait()
    optimizer.close()
    again, other, kept, odd = (disk.crashed(random.Random(seed)) for seed in range(4))
    model, optimizer, resumed = muon.durable(again, run_of("host"))
    assert resumed.step == 2
    steps(optimizer, model, 2, STEPS)
    assert not apart(kit.named_values(model, master=True), expected)
    optimizer.close()
    with pytest.raises(GenerationError, match="shapes: "):
        muon.durable(other, run_of("host", muon=NARROW))
    step = zero_optim_cpu.CpuStep()
    given = zero_core.JointOptimizer(*pair(built().named_parameters(), NARROW))
    with pytest.raises(GenerationError, match="had shapes .* in the run, and have"):
        write_checkpoint([odd], tmp_path / "odd", step=step, optimizer=given)
    given = zero_core.JointOptimizer(*pair(built().named_parameters()))
    write_checkpoint([kept], tmp_path / "kept", step=step, optimizer=given)
    for folder in ("beside", "kept"):
        model, optimizer = muon.begun(run_of("none"))
        checkpoint.load(tmp_path / folder, model, optimizer)
        steps(optimizer, model, 2, STEPS)
        assert not apart(kit.named_values(model, master=True), expected)
        optimizer.close()


# -- what it takes -----------------------------------------------------------------------------------------------------


@pytest.mark.promise("whole-is-one-tile")
def test_a_plan_counts_each_state_in_its_shape() -> None:
    model = built()
    _, held, optimizer = muon.as_planned(Run("nvme", clip=None), model, pair(model.named_parameters()))
    of_matrix = 4 * (2 * 4 * WIDTH * WIDTH + 2 * WIDTH**2 + 2 * (4 * WIDTH) ** 2)
    assert held.state_slot_bytes == of_matrix
    others = sum(p.numel() for name, p in model.named_parameters() if not is_matrix(name, p))
    assert held.bytes_of("nvme", "optimizer") == pytest.approx(4 * of_matrix + 8 * others, rel=0.05)
    optimizer.close()


# -- what is refused ---------------------------------------------------------------------------------------------------


class Strided(SOAP):
    """As torch.linalg.eigh gives a basis: column by column."""

    needs_uncut = SOAP.needs_uncut  # of this step too

    def step(self, closure: Any = None) -> None:
        super().step()
        for state in self.state.values():
            state["left_basis"] = state["left_basis"].T.contiguous().T


class Halves(SOAP):
    """Keeps a state in 16 bits."""

    needs_uncut = SOAP.needs_uncut  # of this step too

    def step(self, closure: Any = None) -> None:
        for state in self.state.values():
            state["left"] = state["left"].float()
        super().step()
        for state in self.state.values():
            state["left"] = state["left"].bfloat16()


class Uncounted(SOAP):
    """Counts its updates, of which the first step makes none, as the authors' code does."""

    needs_uncut = SOAP.needs_uncut  # of this step too

    def step(self, closure: Any = None) -> None:
        for state in self.state.values():
            state["step"] += 1
        super().step()
        for state in self.state.values():
            state["step"] -= 1


@pytest.mark.promise("states-refused")
@pytest.mark.parametrize("place", ["none", "host"])
@pytest.mark.parametrize(
    "kind, told",
    [
        (Strided, r"keeps the state 'left_basis' \(torch.float32, strides .*contiguous float32"),
        (Halves, r"keeps the state 'left' \(torch.bfloat16, strides .*contiguous float32"),
        (Uncounted, r'Uncounted has 1 for the state "step" after 2 steps.*count each step'),
    ],
)
def test_states_that_no_store_keeps_are_refused(kind: Any, told: str, place: str) -> None:
    model, run = built(), Run(place)
    with pytest.raises(UnsupportedOptimizerError, match=told):
        muon.sharded(run, model, pair(model.named_parameters(), kind=kind))
    optimizer = muon.sharded(run, model, pair(model.named_parameters()))
    steps(optimizer, model, 0, 1)
    optimizer.close()


class Large(SOAP):
    """Needs whole what no trial of a small parameter shows."""

    def needs_uncut(self, group: Any, shape: Any) -> bool:
        return len(shape) == 2 and shape[0] >= WIDTH


@pytest.mark.promise("soap-large-only")
@pytest.mark.parametrize("place", ["none", "nvme"])
def test_what_needs_only_large_matrices_whole_keeps_its_states(place: str) -> None:
    model, run = built(), Run(place, clip=None)
    optimizer = muon.sharded(run, model, pair(model.named_parameters(), kind=Large))
    steps(optimizer, model, 0, STEPS)
    assert not apart(kit.named_values(model), muon.parameters_of(dense(STEPS, Large)[0]))
    optimizer.close()


@pytest.mark.parametrize("place", ["none", "host", "nvme"])
def test_an_option_that_decides_which_states_there_are_stays(place: str) -> None:
    """Plain torch goes on with the states that it has; a tier would leave them out, and so would a state dict."""
    run = run_of(place)
    model, optimizer = muon.begun(run)
    steps(optimizer, model, 0, 1)
    before = optimizer.param_groups[0]["max_side"]
    optimizer.param_groups[0]["max_side"] = WIDTH
    muon.own_loss_of(model, 1).backward()
    with pytest.raises(
        UnsupportedOptimizerError, match="an option of param group 0 of .* changed during .* Set it back"
    ):
        optimizer.step()
    optimizer.param_groups[0]["max_side"] = before
    optimizer.step()
    optimizer.zero_grad()
    steps(optimizer, model, 2, STEPS)
    assert not apart(kit.named_values(model, master=True), muon.plain(run))
    optimizer.close()


class Narrow(SOAP):
    """Keeps exp_avg in another shape than the matrix, which AdamW beside it keeps too."""

    needs_uncut = SOAP.needs_uncut  # of this step too

    def __init__(self, parameters: Any, mean: str = "exp_avg") -> None:
        torch.optim.Optimizer.__init__(self, parameters, {"lr": 0.1, "mean": mean})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault(group["mean"], torch.zeros(p.shape[1:], device=p.device))
                mean.lerp_(p.grad.mean(0), 0.1)
                p.sub_(mean, alpha=group["lr"])
                self.state[p]["step"] = self.state[p].get("step", 0) + 1


@pytest.mark.parametrize("place", ["none", "host"])
def test_one_name_of_two_shapes_is_refused_and_another_name_is_saved(place: str, tmp_path: Any) -> None:
    model = built()
    _, adamw = pair(model.named_parameters())
    matrices = [p for name, p in model.named_parameters() if is_matrix(name, p)]
    with pytest.raises(UnsupportedOptimizerError, match="rename the state in one of the optimizers"):
        muon.sharded(Run(place), model, [Narrow(matrices), adamw])
    optimizer = muon.sharded(Run(place), model, [Narrow(matrices, "narrow_avg"), adamw])
    steps(optimizer, model, 0, 1)
    checkpoint.save(tmp_path, model, optimizer)
    assert zero_core.full_state(model.get_parameter(MATRIX), "narrow_avg").shape == (WIDTH,)
    optimizer.close()
