"""`counts()`: launches, copies with their bytes, and every place where the host waits for a device."""

from __future__ import annotations

import threading

import pytest
import torch

zero_sim = pytest.importorskip("zero_sim", exc_type=ImportError)


def asked(work):
    torch.sim.synchronize()
    before = zero_sim.counts()
    work()
    return zero_sim.counts() - before


def test_launches_and_copies_are_counted_with_their_bytes():
    here, pinned = torch.ones(3, 5), torch.ones(7).pin_memory()
    there, seven = here.to("sim"), pinned.to("sim")

    def work():
        torch.add(there, 1, out=there)
        there.t()  # a view
        there.copy_(here)
        seven.copy_(pinned, non_blocking=True)
        pinned.copy_(seven, non_blocking=True)
        there[0].copy_(there[1])
        there.cpu()

    found = asked(work)
    assert found.launches == 1 and not found.unlike_cuda
    assert dict(found.copies) == {
        "copy to the device": 1,
        "copy to the device, pageable": 1,
        "copy to the host": 1,
        "copy to the host, pageable": 1,
        "copy on the device": 1,
    }
    assert dict(found.bytes) == {
        "copy to the device": 28,
        "copy to the device, pageable": 60,
        "copy to the host": 28,
        "copy to the host, pageable": 60,
        "copy on the device": 20,
    }


def test_every_kind_of_wait_is_counted_where_it_is():
    x, event = torch.ones(3, device="sim"), torch.sim.Event()
    event.record()
    waits = {
        "event synchronize": event.synchronize,
        "stream synchronize": torch.sim.current_stream().synchronize,
        "device synchronize": torch.sim.synchronize,
        "copy to the host": lambda: x.sum().item(),
        "copy to the device": lambda: x.copy_(torch.ones(3)),
        "copy to pageable memory of the host": lambda: torch.empty(3).copy_(x, non_blocking=True),
        "aten::nonzero": x.nonzero,
    }
    for what, wait in waits.items():
        ((found, times),) = asked(wait).waits.items()
        assert (found.what, times, found.thread) == (what, 1, "MainThread")
        assert "test_counting.py:" in found.place
    assert not asked(lambda: x.copy_(torch.ones(3), non_blocking=True) + 1).waits
    assert not asked(event.query).waits


def test_waits_are_told_apart_by_their_threads():
    """Autograd's thread is not Python's, and the waits of a thread that has ended are no thread's of Python either."""

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x * 2

        @staticmethod
        def backward(context, gradient):
            gradient.sum().item()
            return gradient

    x = torch.ones(3, device="sim", requires_grad=True)
    ((wait, _),) = asked(lambda: Waits.apply(x).sum().backward()).waits.items()
    assert wait.thread == ""
    read, stay = threading.Event(), threading.Event()

    def other():
        torch.sim.synchronize()
        read.set()
        stay.wait(30)

    thread = threading.Thread(target=other, name="another")
    ((wait, times),) = asked(lambda: (thread.start(), read.wait(30))).waits.items()
    stay.set()
    thread.join()
    assert (wait.what, wait.thread, times) == ("device synchronize", "another", 1)
