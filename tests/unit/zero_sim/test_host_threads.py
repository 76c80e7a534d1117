"""Edges between host threads that Python's own tools make. Each test fails if a tool's edge is not seen."""

import asyncio
import concurrent.futures
import queue
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

zero_sim = pytest.importorskip("zero_sim")


@pytest.fixture
def touch() -> Iterator[Callable[[], None]]:
    """Writes to the same pinned memory from whichever thread calls it."""
    pinned = torch.zeros(10, pin_memory=True)
    yield lambda: zero_sim.host_access("touch", writes=[pinned])


def handed_over(touch: Callable[[], None], give: Callable[[], object], take: Callable[[], object]) -> bool:
    """Whether `give` in one thread and `take` in another order what they do before and after."""

    def body() -> None:
        touch()
        give()

    zero_sim.take_races()
    touch()
    thread = threading.Thread(target=body)
    thread.start()
    take()
    touch()
    ordered = zero_sim.take_races() == []
    thread.join()
    return ordered


def test_plain_variables_are_no_edge(touch):
    flag: list[bool] = []

    def take() -> None:
        while not flag:
            time.sleep(0)

    assert not handed_over(touch, lambda: flag.append(True), take)


def through_a_lock(lock: threading.Lock | threading.RLock) -> tuple[Callable[[], None], Callable[[], None]]:
    """The one who gives has had the lock when the one who takes gets it."""
    flag: list[bool] = []

    def give() -> None:
        with lock:
            pass
        flag.append(True)

    def take() -> None:
        while not flag:
            time.sleep(0)
        with lock:
            pass

    return give, take


def through_a_condition() -> tuple[Callable[[], None], Callable[[], None]]:
    condition, ready = threading.Condition(), []

    def give() -> None:
        with condition:
            ready.append(True)
            condition.notify()

    def take() -> None:
        with condition:
            condition.wait_for(lambda: ready)

    return give, take


def test_tools_that_order_two_threads(touch):
    event, semaphore, barrier = threading.Event(), threading.Semaphore(0), threading.Barrier(2)
    for tool, (give, take) in {
        "Lock": through_a_lock(threading.Lock()),
        "RLock": through_a_lock(threading.RLock()),
        "Condition": through_a_condition(),
        "Event": (event.set, event.wait),
        "Semaphore": (semaphore.release, semaphore.acquire),
        "Barrier": (barrier.wait, barrier.wait),
        **{
            type(q).__name__: (partial(q.put, 1), q.get)
            for q in (queue.Queue(), queue.SimpleQueue(), queue.LifoQueue())
        },
    }.items():
        assert handed_over(touch, give, take), tool


def test_thread_pools(touch):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        touch()
        pool.submit(touch).result()
        touch()
        concurrent.futures.wait([pool.submit(touch)])
        touch()
        future = pool.submit(touch)
        while not future.done():
            time.sleep(0)
        touch()
        list(pool.map(lambda _: touch(), range(1)))
        touch()
        assert zero_sim.take_races() == []


def test_a_future_that_nobody_waits_for_is_no_edge(touch):
    ended: list[bool] = []
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: (touch(), ended.append(True)))
        while not ended:
            time.sleep(0)
        touch()
        assert len(zero_sim.take_races()) == 1


def test_event_loops(touch):
    async def main() -> None:
        loop = asyncio.get_running_loop()
        touch()
        await loop.run_in_executor(None, touch)
        touch()
        future = loop.create_future()

        def body() -> None:
            touch()
            loop.call_soon_threadsafe(future.set_result, None)

        thread = threading.Thread(target=body)
        thread.start()
        await future
        touch()
        assert zero_sim.take_races() == []
        thread.join()

    asyncio.run(main())
