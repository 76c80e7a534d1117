"""Questions to the process group's store that nobody answers: each ends after a limit, with the fact and a way out.

Fails if one is asked on the thread that needs the answer, or if one that is never answered holds up those after it.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from zero_core.comm import watchdog
from zero_core.errors import CollectiveError


class OutOfReach:
    """A store at the end of a link that is cut."""

    def __init__(self) -> None:
        self.mended = threading.Event()

    def __getattr__(self, name: str):
        return lambda *arguments: self.mended.wait(60)


@pytest.fixture
def waiting(monkeypatch):
    """Of rank 1 of 2, whose store is out of reach."""
    store = OutOfReach()
    monkeypatch.setattr(watchdog, "ANSWER", 0.05)
    monkeypatch.setattr(watchdog.dist.distributed_c10d, "_get_default_store", lambda: store)
    yield watchdog.Patience(1, 2, lambda: None)
    store.mended.set()


@pytest.mark.promise("machines-link-cut")
def test_a_store_out_of_reach_is_not_waited_for_without_a_limit(waiting):
    waiting.called("all_gather", "blocks.0")
    for ask in (waiting.crossing, lambda: waiting.assemble("state_dict()"), waiting.crossing):
        with pytest.raises(CollectiveError, match="did not answer within"):
            ThreadPoolExecutor(1).submit(ask).result(timeout=30)


def test_who_watches_goes_with_the_mesh(monkeypatch):
    monkeypatch.setattr(watchdog, "SECONDS", 0.04)
    waiting = watchdog.Patience(1, 2, lambda: None)
    with waiting.waiting("all_gather", "blocks.0"):
        (watcher,) = (each for each in threading.enumerate() if each is waiting._watcher)
    del waiting
    watcher.join(30)
    assert not watcher.is_alive()


@pytest.mark.promise("waits-alone")
def test_a_wait_is_told_after_the_limit_alone(waiting, monkeypatch, caplog):
    with waiting.waiting("all_gather", "blocks.0"):
        waiting.look()
        assert not caplog.records
        monkeypatch.setattr(watchdog, "SECONDS", 0)
        waiting.look()
    assert "rank 1 of 2 has waited 0 s for other ranks in all_gather of 'blocks.0'" in caplog.text
