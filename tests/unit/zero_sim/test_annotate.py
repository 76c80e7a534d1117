"""What native code tells the detector: accesses, tasks in flight, and edges that it makes itself."""

import io
import threading

import numpy
import pytest
import torch

zero_sim = pytest.importorskip("zero_sim")


def test_a_task_is_over_for_those_who_learnt_it():
    pinned = torch.zeros(100, pin_memory=True)
    task = zero_sim.begin("asynchronous read", writes=[pinned[:50]])
    pinned[50:].sum()
    assert zero_sim.take_races() == []
    pinned.sum()
    (race,) = zero_sim.take_races()
    assert race.before.actor == "task 'asynchronous read'" and "wait for it before 'aten::sum'" in race.missing
    task.finish()
    pinned.fill_(1)
    task.finish()
    assert zero_sim.take_races() == []


def test_a_meeting_is_an_edge():
    pinned, flag = torch.zeros(10, pin_memory=True), []
    meeting = zero_sim.Meeting()

    def body() -> None:
        zero_sim.host_access("native fill", writes=[(pinned.data_ptr(), 40)])
        meeting.leave()
        flag.append(True)

    thread = threading.Thread(target=body)
    thread.start()
    while not flag:
        pass
    meeting.hear()
    zero_sim.host_access("native sum", reads=[pinned])
    assert zero_sim.take_races() == []
    thread.join()


@pytest.mark.parametrize(
    ("what", "read"),
    [
        ("tolist", lambda x: x.tolist()),
        ("numpy", lambda x: x.numpy()),
        ("numpy", numpy.asarray),
        ("numpy", lambda x: torch.nn.Parameter(x, requires_grad=False).numpy()),
        ("__dlpack__", numpy.from_dlpack),
        ("__reduce_ex__", lambda x: torch.save(x, io.BytesIO())),
    ],
)
def test_values_that_reach_python_without_an_operator_are_read_by_the_host(what, read):
    pinned, x = torch.zeros(100, pin_memory=True), torch.ones(100, device="sim")
    pinned[:50].copy_(x[:50], non_blocking=True)
    read(pinned[50:])
    assert zero_sim.take_races() == []
    read(pinned)
    (race,) = zero_sim.take_races()
    assert race.now.what == f"Tensor.{what}" and race.end - race.begin == 200
    torch.sim.synchronize()
    read(pinned)
    assert zero_sim.take_races() == [] and pinned[:50].tolist() == [1.0] * 50


@pytest.mark.parametrize(
    ("view", "runs"),
    [
        (lambda x: x, [(0, 24)]),
        (lambda x: x.t(), [(0, 24)]),
        (lambda x: x[1:3], [(6, 18)]),
        (lambda x: x[:, 2:4], [(2, 4), (8, 10), (14, 16), (20, 22)]),
        (lambda x: x[:, ::2], [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11), (12, 13), (14, 15), (16, 17)]
         + [(18, 19), (20, 21), (22, 23)]),
        (lambda x: x[0, 0].expand(5), [(0, 1)]),
        (lambda x: x[:0], []),
    ],
)  # fmt: skip
def test_views_are_told_as_their_contiguous_runs(view, runs):
    x = torch.zeros(4, 6)
    found = sorted(zero_sim.annotate.extents([view(x)], []))
    assert [((begin - x.data_ptr()) // 4, (end - x.data_ptr()) // 4) for begin, end, _ in found] == runs
