"""Forked, killed, interrupted, exiting: with requests in flight."""

import os
import signal
import subprocess

import pytest

import zero_nvme
from tests.integration.zero_nvme.faults import run_python, small_ext4, start_python

pytestmark = pytest.mark.promise("slab-processes")

BACKENDS = zero_nvme.BACKENDS


@pytest.mark.advice("open another one here")
@pytest.mark.parametrize("backend", BACKENDS)
def test_fork_with_requests_in_flight(tmp_path, backend):
    """The child gets a clear error, writes to a slab of its own and exits; the parent's bytes arrive."""
    script = """
import os, sys, zero_nvme
slab = zero_nvme.Slab(sys.argv[1], 64 << 20, sys.argv[2])
extents = [slab.allocate(1 << 20) for _ in range(32)]
data = [os.urandom(1 << 20) for _ in extents]
writes = [slab.write(extent, piece) for extent, piece in zip(extents, data)]
children = []
def fork():
    child = os.fork()
    if child == 0:
        seen = 0
        for use in (lambda: slab.allocate(1), lambda: writes[0].wait(), lambda: slab.read(extents[0], bytearray(9))):
            try:
                use()
            except zero_nvme.ForkedError as error:
                seen += f"child {os.getpid()}; open another one here" in str(error)
        with zero_nvme.Slab(sys.argv[1], 1 << 20, sys.argv[2]) as own:
            own.write(own.allocate(4096), bytearray(4096)).wait()
        os._exit(seen)
    children.append(child)
fork()
zero_nvme.wait_all(writes)
back = [bytearray(1 << 20) for _ in extents]
reads = [slab.read(extent, piece) for extent, piece in zip(extents, back)]
fork()
zero_nvme.wait_all(reads)
assert back == data
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
slab.close()
"""
    assert run_python(script, str(tmp_path), backend) == "[3, 3]"


@pytest.mark.parametrize("backend", BACKENDS)
def test_exit_with_requests_in_flight(tmp_path, backend):
    """No message, no hang, nothing left of the slab; what was written to a file is in it."""
    script = """
import os, sys, zero_nvme
slab = zero_nvme.Slab(sys.argv[1], 64 << 20, sys.argv[2])
file = zero_nvme.File(sys.argv[1] + "/file", "w", sys.argv[2])
extent = slab.allocate(32 << 20)
for _ in range(8):
    slab.write(extent, bytes(32 << 20))
file.write(b"x" * 10001)
"""
    run_python(script, str(tmp_path), backend)
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"x" * 10001


@pytest.mark.parametrize("backend", BACKENDS)
def test_kill_9_leaves_nothing_but_what_was_synced(tmp_path, backend):
    script = """
import sys, zero_nvme
slab = zero_nvme.Slab([sys.argv[1], sys.argv[1]], 64 << 20, sys.argv[2], weights=[1, 1])
file = zero_nvme.File(sys.argv[1] + "/file", "w", sys.argv[2])
file.write(b"synced" * 5000).wait()
file.sync()
extents = [slab.allocate(4 << 20) for _ in range(8)]
data = zero_nvme.empty(4 << 20)
while True:
    writes = [slab.write(extent, data) for extent in extents] + [file.write(data, 1 << 20)]
    print("in flight", flush=True)
    zero_nvme.wait_all(writes)
"""
    process = start_python(script, str(tmp_path), backend)
    try:
        assert process.stdout.readline() == "in flight\n"
        before = os.listdir(tmp_path)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    assert before == os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes()[:30000] == b"synced" * 5000


def test_ctrl_c_interrupts_a_wait():
    """The wait that tickets are built on, for something that never comes."""
    if zero_nvme.extension.native is None:
        pytest.skip("the extension is not built")
    script = """
import os, signal, threading, zero_nvme.extension
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    zero_nvme.extension.native.Mailbox().wait()
except KeyboardInterrupt:
    print("interrupted")
"""
    assert run_python(script) == "interrupted"


@pytest.mark.parametrize("backend", BACKENDS)
def test_signal_while_the_filesystem_is_frozen(tmp_path, backend):
    """A write that cannot proceed: done() is false, wait() times out and is interrupted, and after the thaw it
    completes, as do requests that queued up behind it."""
    with small_ext4(tmp_path, 32 << 20) as mount:
        file = zero_nvme.File(mount / "file", "w", backend)
        file.write(bytes(8192)).wait()
        file.sync()
        frozen = subprocess.run(["fsfreeze", "--freeze", str(mount)], capture_output=True, timeout=60)
        try:
            if frozen.returncode != 0:
                pytest.skip(f"fsfreeze: {frozen.stderr!r}")
            ticket = file.write(b"x" * 8192)
            assert not ticket.done()
            with pytest.raises(TimeoutError):
                ticket.wait(0.05)
            with pytest.raises(TimeoutError):
                zero_nvme.wait_any([ticket], 0.05)
            with pytest.raises(TimeoutError):
                file.drain(0.05)
            behind = [file.write(b"y", 9000 + index) for index in range(100)]
            _assert_interrupted(ticket)
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", str(mount)], capture_output=True, timeout=60)
            file.drain()
            file.close()
        ticket.wait()
        zero_nvme.wait_all(behind)
        assert (mount / "file").read_bytes() == b"x" * 8192 + bytes(9000 - 8192) + b"y" * 100


@pytest.mark.promise("backend-signals")
@pytest.mark.parametrize("backend", BACKENDS)
def test_signals_that_arrive_while_a_slab_is_opened_refuse_no_backend(tmp_path, backend):
    """Every 50 µs one: a backend's own check of what the kernel allows takes about as long."""
    small = {"direct": False, "block_bytes": 1 << 16, "inflight_bytes": 1 << 18}
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        signal.setitimer(signal.ITIMER_REAL, 5e-5, 5e-5)
        for _ in range(50):
            zero_nvme.Slab(tmp_path, 1 << 20, backend, **small).close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _assert_interrupted(ticket):
    class Alarm(Exception):
        pass

    def ring(*_):
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Alarm):
            ticket.wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
