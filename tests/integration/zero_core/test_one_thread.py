"""One thread at a time uses a sharded model, whichever it is, in the process that sharded it."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_core
from tests import kit
from zero_core.errors import ZeroError

pytestmark = pytest.mark.promise("second-thread")

X = torch.ones(2, 4)


class Block(nn.Linear):
    """A test may put something in `meeting` that a forward comes by."""

    meeting: Callable[[], Any] = staticmethod(lambda: None)

    def forward(self, x: Tensor) -> Tensor:
        self.meeting()
        return torch.tanh(super().forward(x))


class Meeting(torch.optim.SGD):
    """A test may put something here that one step comes by."""

    meeting: Callable[[], Any] | None = None

    def step(self, closure=None):
        meeting, Meeting.meeting = Meeting.meeting, None
        if meeting is not None:
            meeting()
        return super().step(closure)


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(Block(4, 4), Block(4, 4))
    return model, Meeting(model.parameters(), lr=0.1)


def sharded(stage: int = 3) -> tuple[nn.Module, Any]:
    model, optimizer = built()
    return model, zero_core.shard(model, optimizer, stage=stage, units=[Block])


def backward(model: nn.Module) -> None:
    model(X).square().sum().backward()


def in_thread(call: Callable[[], Any], name: str = "second") -> list[BaseException]:
    """Run it in a thread of that name to its end; what it raised."""
    with ThreadPoolExecutor(1, name) as pool:
        raised = pool.submit(call).exception(60)
    return [] if raised is None else [raised]


def trained(model: nn.Module, optimizer: Any) -> list[Tensor]:
    backward(model)
    optimizer.step()
    return [value.clone() for value in model.state_dict().values()]


USES: dict[str, Callable[[Any, Any], Any]] = {
    "forward": lambda model, optimizer: model(X),
    "forward of its part": lambda model, optimizer: model[1](X),
    "step": lambda model, optimizer: optimizer.step(),
    "zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "use of a parameter": lambda model, optimizer: model[0].weight.norm(),
    "checkpoint": lambda model, optimizer: optimizer.full_state_dict(),
    "backward": lambda model, optimizer: model.earlier.backward(),
}


@pytest.mark.promise("graph-needs-values")
@pytest.mark.parametrize(
    ("stage", "where", "use"),
    [
        *((stage, "forward", use) for stage in (0, 3) for use in USES),
        *((3, "backward", use) for use in USES if use != "use of a parameter"),
        *((3, "step", use) for use in USES if use != "backward"),
    ],
)
def test_a_second_thread_is_told_so_while_one_is_in_a_pass(stage, where, use, monkeypatch):
    wanted = trained(*built())
    model, optimizer = sharded(stage)
    if use == "backward":
        model.earlier = model(X).sum()
    raised: list[BaseException] = []

    def meet(*_) -> None:
        raised.extend(in_thread(lambda: USES[use](model, optimizer)))

    model[1].meeting = meet if where == "forward" else model[1].meeting
    output = model[1](model[0](X)) if where == "backward" else model(X)
    del model[1].meeting
    if where == "backward":
        output.register_hook(meet)  # it runs after the model's own, which has begun the backward
    output.square().sum().backward()
    monkeypatch.setattr(Meeting, "meeting", meet if where == "step" else None)
    optimizer.step()
    (error,) = raised
    told = f"while thread 'MainThread' is in {where} of the same model"
    assert isinstance(error, ZeroError) and "in thread 'second" in str(error) and told in str(error)
    kit.assert_bits(list(model.state_dict().values()), wanted)
    optimizer.zero_grad()
    assert not in_thread(lambda: trained(model, optimizer))


@pytest.mark.advice("hold it from forward to the end")
def test_threads_that_take_turns_train_as_one():
    plain, stock = built()
    wanted = [trained(plain, stock), (stock.zero_grad(), trained(plain, stock))[1]][-1]
    model, optimizer = sharded()
    outputs: list[Tensor] = []
    assert not in_thread(lambda: outputs.append(model(X)))
    assert not in_thread(lambda: outputs[0].square().sum().backward(), "third")
    assert not in_thread(optimizer.step, "fourth")
    optimizer.zero_grad()
    assert not in_thread(lambda: trained(model, optimizer))
    kit.assert_bits(list(model.state_dict().values()), wanted)


def test_a_thread_that_ended_inside_of_a_forward_is_in_nobodys_way():
    model, optimizer = sharded()
    model[1].meeting = lambda: (_ for _ in ()).throw(SystemExit)  # passes by the hooks of a module
    assert in_thread(lambda: model(X))
    del model[1].meeting
    kit.assert_bits(trained(model, optimizer), trained(*built()))


@pytest.mark.advice("call the model there. In a worker")
@pytest.mark.parametrize("use", ["forward", "step", "zero_grad", "use of a parameter"])
def test_a_forked_process_is_told_so(use):
    model, optimizer = sharded()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            USES[use](model, optimizer)
            os.write(writing, b"it ran")
        except BaseException as error:
            os.write(writing, f"{type(error).__name__} {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    told = os.read(reading, 4096).decode()
    assert os.waitpid(child, 0)[1] == 0
    assert "ZeroError" in told and "was forked from process" in told
    os.close(reading)
    kit.assert_bits(trained(model, optimizer), trained(*built()))
