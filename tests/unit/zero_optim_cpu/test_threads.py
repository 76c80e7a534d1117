"""The pool: asynchronous updates, affinity, fork, many optimizers, the GIL."""

import os
import textwrap
import threading
from typing import Any

import pytest
import torch

import zero_optim_cpu
from tests.unit.zero_optim_cpu.tiles import BF16, Segment, Tile, adamw, make_tile, same
from zero_optim_cpu import CpuStep

pytestmark = pytest.mark.promise("cpu-threads")

NUMEL = 1 << 18


def prepared(threads: int) -> tuple[CpuStep, Tile, list[Segment]]:
    optimizer = adamw(lr=0.01)
    step = CpuStep("split", threads=threads)
    step.bind(optimizer)
    tile = make_tile(step, torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)), BF16)
    tile.gradient.copy_(torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)))
    return step, tile, [Segment(0, NUMEL, optimizer.param_groups[0])]


def updated() -> torch.Tensor:
    """The parameter after an update by one thread."""
    step, tile, segments = prepared(1)
    step.update(tile, segments, 1.0)
    return tile.parameter


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_started_updates_end_and_have_the_same_bits(threads: int) -> None:
    step, tile, segments = prepared(threads)
    handle = step.start(tile, segments, 1.0)
    handle.wait(60)
    assert handle.done()
    handle.wait()
    assert same(tile.parameter, updated())


def test_a_dropped_handle_waits_and_keeps_the_tensors() -> None:
    step, tile, segments = prepared(2)
    parameter = tile.parameter
    handle = step.start(tile, segments, 1.0)
    del tile  # the handle holds states and gradient
    del handle
    assert same(parameter, updated())


def test_an_optimizer_starts_and_ends() -> None:
    results = []
    for start in (False, True):
        p = torch.nn.Parameter(torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)))
        optimizer = zero_optim_cpu.AdamW([p])
        for seed in range(2):
            p.grad = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))
            if start:
                handle = optimizer.start()
                handle.wait()
                assert handle.done()
            else:
                optimizer.step()
        results.append(p.detach())
    assert same(*results)


def test_updates_from_several_threads_at_once() -> None:
    step, _, segments = prepared(2)
    tiles = [prepared(1)[1] for _ in range(4)]
    workers = [threading.Thread(target=step.update, args=(tile, segments, 1.0)) for tile in tiles]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(same(tile.parameter, updated()) for tile in tiles)


def test_nothing_to_do() -> None:
    step, tile, segments = prepared(2)
    before = tile.parameter.clone()
    step.update(tile, [], 1.0)
    step.start(tile, [], 1.0).wait()
    assert same(tile.parameter, before)
    empty = make_tile(step, torch.zeros(0), BF16)
    step.update(empty, [], 1.0)
    handle = step.start(empty, [], 1.0)
    handle.wait()
    assert handle.done()
    assert sum(step.chunk_norms_squared(torch.zeros(0))) == 0.0
    zero_optim_cpu.AdamW([torch.nn.Parameter(torch.zeros(3))]).step()


HEAD = """
import os, torch
torch.set_num_threads(1)
from tests.unit.zero_optim_cpu.test_threads import prepared
from zero_optim_cpu import CpuStep
before = set(os.listdir("/proc/self/task"))
def workers():
    return set(os.listdir("/proc/self/task")) - before
"""


def printed(interpreter: Any, program: str) -> str:
    """What a program prints that begins with HEAD, and ends well."""
    done = interpreter(HEAD + textwrap.dedent(program))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_threads_follow_the_affinity(interpreter: Any) -> None:
    one = "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    assert printed(interpreter, f"{one}; print(CpuStep().threads)") == "1\n"
    assert 1 <= CpuStep().threads <= len(os.sched_getaffinity(0))


def test_workers_keep_the_affinity_that_the_pool_was_made_under(interpreter: Any) -> None:
    program = """
        cpus = os.sched_getaffinity(0)
        one = {min(cpus)}
        os.sched_setaffinity(0, one)
        step, tile, segments = prepared(3)
        os.sched_setaffinity(0, cpus)
        step.update(tile, segments, 1.0)
        assert len(workers()) == 2, workers()
        for worker in workers():
            assert os.sched_getaffinity(int(worker)) == one
    """
    printed(interpreter, program)


def test_idle_workers_take_no_processor_time_from_torch(interpreter: Any) -> None:
    """They sleep: what spins would take a core from torch's threads. And torch keeps the threads that it had."""
    program = """
        step, tile, segments = prepared(3)
        step.update(tile, segments, 1.0)
        idle = workers()
        assert len(idle) == 2, idle
        def nanoseconds():
            return sum(int(open(f"/proc/self/task/{w}/schedstat").read().split()[0]) for w in idle)
        a = torch.randn(256, 256)
        for _ in range(20):
            a @ a
        start = nanoseconds()
        for _ in range(300):
            a @ a
        assert nanoseconds() - start < 2_000_000, nanoseconds() - start
        assert torch.get_num_threads() == 1
    """
    printed(interpreter, program)


def test_fork_with_a_warm_pool_and_an_update_in_flight(interpreter: Any) -> None:
    """The child updates with threads of its own; a handle of the parent's raises there and works here."""
    program = """
        step, tile, segments = prepared(3)
        step.update(tile, segments, 1.0)
        expected = tile.parameter.clone()
        step2, tile2, _ = prepared(3)
        handle = step.start(tile2, segments, 1.0)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _, mine, _ = prepared(1)
                step.update(mine, segments, 1.0)  # the parent's pool object
                code = 0 if torch.equal(mine.parameter, expected) else 2
                if not handle.done():
                    try:
                        handle.wait()
                        code = 3
                    except RuntimeError as error:
                        code = code if "before a fork" in str(error) else 4
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        handle.wait()
        assert os.waitstatus_to_exitcode(status) == 0, status
        assert torch.equal(tile2.parameter, expected)
    """
    printed(interpreter, program)


def test_the_interpreter_ends_with_a_pool_alive_and_work_in_flight(interpreter: Any) -> None:
    program = """
        step, tile, segments = prepared(2)
        handles = [step.start(tile, segments, 1.0)]
        print("out")
    """
    assert printed(interpreter, program) == "out\n"
