"""The interpreter exits while a thread of zero-core's is in native code: with the exit code of the program.

Python up to 3.13 ends such a thread by unwinding its stack, and torch's frames then end the process with SIGABRT.
Fails if a thread is not told of the exit, or not waited for.
"""

import textwrap

import pytest

ENDINGS = {"pass": 0, "raise RuntimeError('of the program')": 1}


@pytest.mark.promise("exit-while-saving")
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_thread_that_is_told_of_the_exit_is_waited_for(ending, interpreter):
    """It computes until it is told, and for a while after that."""
    program = """
    import threading
    import torch
    from zero_core.util.threads import Leaving

    over, begun = threading.Event(), threading.Event()

    def compute():
        values, left = torch.zeros(1 << 20), 100
        while left:
            values.add_(1)
            begun.set()
            left -= over.is_set()

    Leaving("computes", compute, over.set).start()
    begun.wait(30)
    print("ready", flush=True)
    """
    done = interpreter(textwrap.dedent(program) + ending)
    assert done.returncode == ENDINGS[ending], (done.returncode, done.stderr)
    assert "Fatal" not in done.stderr and "terminate called" not in done.stderr, done.stderr
    assert "ready" in done.stdout
