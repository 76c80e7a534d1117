"""Signals: installed whatever the parent did, polite inside the loop, final at the second."""

import os
import signal
import threading

import pytest

from zero_train.run import interrupt


@pytest.fixture(autouse=True)
def handlers_put_back():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_the_loop_the_first_signal_is_only_noted(number):
    signal.signal(number, signal.SIG_IGN)  # as a shell's background job inherits it
    with interrupt.handled() as asked:
        with asked.gentle():
            os.kill(os.getpid(), number)
            assert asked.signal == number
    assert signal.getsignal(number) == signal.SIG_IGN


def test_before_the_loop_ctrl_c_raises_and_sigterm_is_the_systems():
    with interrupt.handled() as asked:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert asked.signal == signal.SIGINT


@pytest.mark.promise("second-signal")
def test_a_second_press_ends_the_process_and_an_echo_does_not(monkeypatch, capsys):
    ended = []
    clock = [100.0]
    monkeypatch.setattr(interrupt.os, "_exit", ended.append)
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: clock[0])
    asked = interrupt.Interrupt()
    with asked.gentle():
        asked.receive(signal.SIGINT)
        clock[0] += interrupt.REPEAT_SECONDS / 2  # torchrun passing on what the terminal already sent
        asked.receive(signal.SIGINT)
        assert ended == []
        clock[0] += interrupt.REPEAT_SECONDS
        asked.receive(signal.SIGINT)
    assert ended == [130] and capsys.readouterr().err == "stopped at once\n"


def test_outside_the_main_thread_nothing_is_installed():
    seen = []

    def work():
        with interrupt.handled() as asked:
            seen.append((asked.signal, signal.getsignal(signal.SIGINT)))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(0, before)]
