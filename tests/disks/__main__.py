"""A durable run on each place of `places`, killed on a full disk and gone on with: `python -m tests.disks [NAME ...]`.

Needs root. A process trains three steps, the disk fills up, it trains another one and is killed (kill -9). A second one
goes on while the disk is full. It has to end in the bits of a run in host memory. Otherwise the first one has to be
refused, or one of them to stop, with the error that `places` expects; then the cause goes away, and a third process has
to end in these bits. Another process is told who has the slab open. Prints a Markdown table, and ends with the number
of places that end in another way.
"""

import argparse
import hashlib
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from tests.disks.places import BEGIN, END, PAGE, PLACES, Absent, Folder, Place, fill
from tests.integration.zero_offload.durable import STEPS, Training
from tests.tables import markdown
from zero_nvme import Slab
from zero_nvme.files import named
from zero_nvme.tools import doctor
from zero_offload.testing import CrashByteStore

WIDTH = 8192  # of the model; its slab has about 12 MB
SECONDS = 120  # for a process
ASKED = {"O_DIRECT": ("yes", "no"), "reserve": ("fallocate", "zeros"), "overwrite": ("in place", "anew")}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.disks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="places; without any, all")
    parser.add_argument("--needs", action="store_true", help="print the packages that the places need, and run none")
    parser.add_argument("--write", action="store_true", help="write the table into docs/placement.md")
    given = parser.parse_args()
    places = [each for each in PLACES if not given.names or each.name in given.names]
    if given.needs:
        print(*sorted({package for each in places for package in each.packages}))
        return 0
    if os.geteuid():
        sys.exit("file systems are mounted by root alone")
    torch.set_num_threads(1)
    expected = in_child(lambda: digest(Training(CrashByteStore(), width=WIDTH)))
    wrong, rows = 0, []
    for each in places:
        with tempfile.TemporaryDirectory(prefix="disks-") as work, ExitStack() as stack:
            try:
                folder = each.make(stack, Path(work))
                facts = asked(folder)
                right, told = outcome(each, folder, expected)
            except Absent as error:
                facts, right, told = ["-"] * len(ASKED), True, f"not tried: {error}"
        wrong += not right
        rows.append([each.name, *facts, shown(told, work)])
        print("ok   " if right else "WRONG", each.name, facts, told, flush=True)
    print(table := markdown(("on", *ASKED, "a run there"), rows))
    if given.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return wrong


def outcome(each: Place, folder: Folder, expected: str) -> tuple[bool, str]:
    """Whether the place ended as it has to, and how."""
    event = folder.event or (lambda: fill(folder.path))
    first = in_child(lambda: trained(folder, event))
    if each.refused:
        return bool(re.search(each.refused, first)), f"refused: {first}"
    second = ""
    if first == "killed":
        folder.before()
        second = in_child(lambda: trained(folder))
        if second == expected:
            return not each.stops, f"same bits{folder.note}"
    said = first if first != "killed" else second
    stopped = bool(each.stops and re.search(each.stops, said))
    folder.mend()
    third = in_child(lambda: trained(folder))
    return stopped and third == expected, f"{said}. Then: {'same bits' if third == expected else third}"


def trained(folder: Folder, event: Callable[[], object] | None = None) -> str:
    """Trains to the end; or three steps, `event`, and another step, after which the process kills itself."""
    folder.limit()
    with Slab(folder.folders or folder.path, name="run", allow_memory=folder.allow_memory) as slab:
        training = Training(slab, width=WIDTH)
        if event is None:
            return digest(training)
        holder = in_child(lambda: str(named.holder_of(str(folder.path), "run")))
        if holder != str(os.getpid()):
            return f"process {os.getpid()} has the slab open, and {holder} is named"
        while training.position < 4:
            if training.position == 3:
                event()
            training.step()
        os.kill(os.getpid(), signal.SIGKILL)
    return "not killed"


def digest(training: Training) -> str:
    """Trains to the end."""
    assert training.position < STEPS
    sums = hashlib.sha256()
    for value in training.to_the_end():
        sums.update(value.detach().contiguous().numpy().tobytes())
    training.end()
    return sums.hexdigest()


def in_child(function: Callable[[], str]) -> str:
    """What it returns, the error that it raises, "killed", or that it took too long."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        signal.alarm(SECONDS)
        try:
            said = function()
        except Exception as error:
            if os.environ.get("TRACEBACK"):
                traceback.print_exc()
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os.close(write)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        said = file.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if said or not status:
        return said
    return "killed" if status == -signal.SIGKILL else f"ended by signal {-status}"


def asked(folder: Folder) -> list[str]:
    """What doctor finds out about the file system."""

    def found() -> str:
        findings = {what: verdict for verdict, what, _ in doctor.examine(str(folder.path))}
        return "|".join(words[findings[what] != "ok"] if what in findings else "-" for what, words in ASKED.items())

    facts = in_child(found).split("|")
    return facts if len(facts) == len(ASKED) else ["-"] * len(ASKED)


def shown(told: str, work: str) -> str:
    """For a table: without the folder's name and cells' borders, and an error's fact without its way out."""
    told = re.sub(rf"{re.escape(work)}/mount\d+", "PATH", told).replace("|", "/").replace("\n", " ")
    error, then, end = told.partition(". Then: ")
    error = re.sub(r"\w+Error: (\[\w+\] )?", "", error)
    return (error.split("; ")[0] if then or error.startswith("refused") else error) + then + end


if __name__ == "__main__":
    sys.exit(main())
