"""What is printed where: lines for a pipe, a bar for a terminal, nothing on other ranks."""

import io

import pytest

pytest.importorskip("zero_core")
pytest.importorskip("zero_offload")

from zero_train import progress
from zero_train.loop import Step

BYTES = ("nvme_read_bytes", "nvme_write_bytes", "host_bytes", "device_bytes", "peak_rss_bytes")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def line(step):
    return Step(step, 2.5, 1.0, 1e-3, 0.5, tokens_per_second=1234.5, exposed_seconds=0.25, **dict.fromkeys(BYTES, 0))


def test_a_pipe_gets_every_nth_line_and_the_first_and_last():
    out = io.StringIO()
    with progress.reporter(True, steps=7, done=0, every=3, out=out) as shown:
        for step in range(1, 8):
            shown.step(line(step))
    numbers = [text.split()[1] for text in out.getvalue().splitlines()]
    assert numbers == ["1/7", "3/7", "6/7", "7/7"]
    assert "loss 2.5000  1,234 tokens/s  exposed 250 ms" in out.getvalue()


def test_a_terminal_gets_a_bar_with_the_figures():
    out = Terminal()
    with progress.reporter(True, steps=2, done=0, every=1, out=out) as shown:
        shown.step(line(1))
        shown.say("[a] sentence")
        shown.step(line(2))
    assert "[a] sentence" in out.getvalue()
    assert "2/2" in out.getvalue()
    assert "loss" in out.getvalue()


def test_the_configuration_can_choose():
    assert isinstance(progress.reporter(True, 1, 0, 1, bar=False, out=Terminal()), progress.Plain)
    assert isinstance(progress.reporter(True, 1, 0, 1, bar=True, out=io.StringIO()), progress.Bar)


def test_other_ranks_are_silent(capsys):
    with progress.reporter(False, steps=1, done=0, every=1) as shown:
        shown.step(line(1))
        shown.say("nothing")
    assert capsys.readouterr() == ("", "")
