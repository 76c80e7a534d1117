"""Real faults to test with: small filesystems, devices that fail, processes that are denied things or killed.

Each skips, with the reason, where the machine does not allow it, and cleans up after itself.
"""

import contextlib
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest


def call(*command: str) -> str:
    """Runs a command; skips the test if that is not possible here."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{command[0]} cannot be run here: {error}")
    if done.returncode != 0:
        pytest.skip(f"{' '.join(command)} failed here: {done.stderr.strip()}")
    return done.stdout.strip()


@contextlib.contextmanager
def loop_device(image: pathlib.Path) -> Iterator[str]:
    device = call("losetup", "--find", "--show", str(image))
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], check=False, timeout=60)


def soon(done: Callable[[], bool]) -> bool:
    """Whether it succeeds within 5 s: the kernel may hold a closed file or device for a moment."""
    return any(done() or time.sleep(0.1) for _ in range(50))


@contextlib.contextmanager
def small_ext4(folder: pathlib.Path, nbytes: int) -> Iterator[pathlib.Path]:
    """A mounted ext4 filesystem of so many bytes, without journal or reserved blocks."""
    image, mount = folder / "image", folder / "mount"
    with open(image, "wb") as file:
        file.truncate(nbytes)
    mount.mkdir()
    call("mkfs.ext4", "-q", "-F", "-b", "4096", "-O", "^has_journal", "-m", "0", str(image))
    with loop_device(image) as device:
        call("mount", "-t", "ext4", device, str(mount))
        try:
            yield mount
        finally:
            if not soon(lambda: not subprocess.run(["umount", mount], capture_output=True, timeout=60).returncode):
                subprocess.run(["umount", "--lazy", str(mount)], capture_output=True, timeout=60)
                pytest.fail(f"{mount} stays busy: something still holds a file there")


@contextlib.contextmanager
def small_zram(nbytes: int, memory_limit_bytes: int) -> Iterator[str]:
    """A zram device of `nbytes` that fails writes once it holds more than the limit."""
    control = pathlib.Path("/sys/class/zram-control")
    try:
        index = int((control / "hot_add").read_text())
    except OSError as error:
        pytest.skip(f"no zram here: {error}")
    settings = pathlib.Path(f"/sys/block/zram{index}")
    try:
        (settings / "disksize").write_text(str(nbytes))
        (settings / "mem_limit").write_text(str(memory_limit_bytes))
        if not os.path.exists(f"/dev/zram{index}"):
            pytest.skip(f"the container has no /dev/zram{index}")
        yield f"/dev/zram{index}"
    finally:

        def removed() -> bool:
            with contextlib.suppress(OSError):
                (settings / "reset").write_text("1")
                return bool((control / "hot_remove").write_text(str(index)))
            return False

        if not soon(removed):
            pytest.fail(f"zram{index} stays busy: something still holds it")


def start_python(script: str, *arguments: str) -> subprocess.Popen[str]:
    """A Python process in a session of its own, which sees what this one sees."""
    path = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    given |= {"env": os.environ | {"PYTHONPATH": path}, "start_new_session": True}
    return subprocess.Popen([sys.executable, "-c", script, *arguments], **given)


def run_python(script: str, *arguments: str) -> str:
    """Its output. Fails the test if it fails or says anything on stderr."""
    process = start_python(script, *arguments)
    try:
        output, errors = process.communicate(timeout=200)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 0 and not errors, (process.returncode, output, errors)
    return output.strip()


DENY = '''
import ctypes, platform, struct

def deny(numbers, code=1):
    """A seccomp filter that fails these x86-64 system calls with an errno, as container profiles do."""
    if platform.machine() != "x86_64":
        print("SKIP seccomp: the numbers are those of x86-64, this is", platform.machine())
        raise SystemExit(0)
    instruction = lambda op, yes, no, value: struct.pack("HBBI", op, yes, no, value)
    program = instruction(0x20, 0, 0, 0)
    for number in numbers:
        program += instruction(0x15, 0, 1, number) + instruction(0x06, 0, 0, 0x00050000 | code)
    program += instruction(0x06, 0, 0, 0x7FFF0000)
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, header, 0, 0):
        print("SKIP seccomp:", ctypes.get_errno())
        raise SystemExit(0)
'''


def skip_if_told(output: str) -> None:
    if output.startswith("SKIP"):
        pytest.skip(output)
