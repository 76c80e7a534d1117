"""Ranks on machines with disks of their own. Here each rank has a folder, as `{local_rank}` in a path gives it one."""

import re
import signal
import socket
from pathlib import Path

import pytest

from tests import kit
from tests.integration.zero_train.helpers import COMMON, stopped_after, trained
from zero_train.errors import ConfigError, RunError
from zero_train.run.ranks import Ranks, same_folder

RUN = ("offload=nvme", "run.steps=8", "run.durable=process")


def disks(folder):
    """One for each rank."""
    for rank in range(2):
        (folder / f"disk{rank}").mkdir(parents=True)
    return f"offload.nvme_paths=['{folder}/disk{{local_rank}}']"


def slabs(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.slab"))


def told(function, *given):
    """What it returns, or what it was told."""
    try:
        return function(*given)
    except (ConfigError, RunError) as error:
        return str(error)


def on_two(folder, stop, *overrides):
    """Losses and digest of this rank, or what it was told. A run that stops after step `stop` unless that is 0."""

    def run():
        with stopped_after(stop, signal.SIGTERM):
            done = trained(folder, *RUN, *overrides)
        return done.losses, done.digest

    return told(run)


def stopped(ranks, folder):
    """A run that was stopped, and the whole one."""
    whole, _ = ranks(2).run(on_two, folder / "whole", 0, disks(folder / "of_whole"))
    ranks(2).run(on_two, folder / "run", 4, local := disks(folder))
    assert [Path(name).parent.name for name in slabs(folder) if "of_whole" not in name] == ["disk0", "disk1"]
    return whole, local


def exchange(folder):
    """The disks of the two ranks."""
    for old, new in (("disk0", "aside"), ("disk1", "disk0"), ("aside", "disk1")):
        (folder / old).rename(folder / new)


@pytest.mark.promise("own-disks")
@pytest.mark.parametrize("given_up", [True, False])
def test_ranks_that_changed_places_are_told_and_the_ways_out_work(ranks, tmp_path, given_up):
    """Fails if such a run begins anew, beside the steps that it has on the disks of others."""
    (losses, digest), local = stopped(ranks, tmp_path)
    exchange(tmp_path)
    kept = {name: (tmp_path / name).read_bytes() for name in slabs(tmp_path)}
    for said in ranks(2).run(on_two, tmp_path / "run", 0, local, "run.resume=auto"):
        assert "are on other machines than their ranks: rank 1 runs on" in said and "torchrun --node-rank" in said
    assert kept == {name: (tmp_path / name).read_bytes() for name in slabs(tmp_path)}
    if given_up:
        pattern = re.search(r"remove (\S+\.slab) on every machine", said)[1]
        gone = [file for disk in ("disk0", "disk1") for file in (tmp_path / disk).glob(pattern)]
        assert len(gone) == 2
        for file in gone:
            file.unlink()
    else:
        with pytest.raises(ConfigError, match="rank 1 does not exist, and its slab"):
            trained(tmp_path / "run", *RUN, f"offload.nvme_paths=[{tmp_path}/disk0]", "run.resume=auto")
        exchange(tmp_path)
    (rest, again), _ = ranks(2).run(on_two, tmp_path / "run", 0, local, "run.resume=auto")
    assert len(rest) == 8 if given_up else 4 <= len(rest) < 8
    assert rest == losses[-len(rest) :] and again == digest


def seen(folder, own):
    """What rank 0 has made is `folder`; the other rank has `own` under that name."""
    rank, size = kit.world()
    ranks = Ranks(rank, size, 0, 1, "cpu")
    return told(same_folder, ranks, own if rank else folder) or "the same"


@pytest.mark.promise("run-folder-shared")
def test_a_run_folder_that_machines_do_not_share_is_told(ranks, tmp_path):
    """Fails if a run would save checkpoints of which each machine has a part, which none can load."""
    (tmp_path / "run").mkdir()
    assert ranks(2).run(seen, tmp_path / "run", tmp_path / "run") == ["the same"] * 2
    for said in ranks(2).run(seen, tmp_path / "run", tmp_path / "on_another" / "run"):  # the way out is above
        assert "is not one folder for all ranks: what rank 1 on" in said and "with run.dir=…" in said
    assert not [path.name for path in (tmp_path / "run").iterdir()]
    assert not (tmp_path / "on_another" / "run").exists()


def on_texts(folder, paths):
    """The losses of a run on this rank with its own text, or what it was told."""
    rank, _ = kit.world()
    return told(lambda: trained(folder, "run.steps=2", "data=text", f"data.path={paths[rank]}").losses)


@pytest.mark.advice("copy rank 0's to every machine")
@pytest.mark.promise("other-texts")
def test_ranks_with_other_texts_are_told_before_the_first_step_and_the_way_out_works(ranks, tmp_path):
    """Fails if each machine trains on what it has under the path, which no loss shows."""
    texts = [tmp_path / f"machine{k}.txt" for k in range(2)]
    for k, path in enumerate(texts):
        path.write_text("all that there is to learn " * 50 + "01"[k])
    host = socket.gethostname()
    for path, said in zip(texts, ranks(2).run(on_texts, tmp_path / "run", texts), strict=True):
        assert f"data.path={path} is another text on rank 1 (on {host}) than on rank 0 (on {host})" in said
        assert len(set(re.findall(r"\d+ bytes with CRC [0-9a-f]{8}", said))) == 3  # what is trained on is the same
    assert not (tmp_path / "run").exists()
    texts[1].write_text(texts[0].read_text())
    first, second = ranks(2).run(on_texts, tmp_path / "run", texts)
    assert first == second


LAUNCHER = """
import os, pickle
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn

class ForkingLauncher(BasicLauncher):
    "Runs its jobs in another process, as launchers of clusters do."

    def launch(self, job_overrides, initial_job_idx):
        read, write = os.pipe()
        if not os.fork():
            jobs = super().launch(job_overrides, initial_job_idx)
            os.write(write, pickle.dumps([(job.overrides, job.status, job._return_value) for job in jobs]))
            os._exit(0)
        returned = []
        for overrides, status, value in pickle.loads(os.read(read, 1 << 16)):
            returned.append(JobReturn(overrides=overrides, status=status))
            returned[-1].return_value = value
        return returned

ConfigStore.instance().store(
    group="hydra/launcher", name="forking", node={"_target_": f"{__name__}.ForkingLauncher"}, provider="tests"
)
"""


@pytest.mark.promise("sweep-exit-code")
@pytest.mark.parametrize(("steps", "code"), [("1,2", 0), ("1,0", 2)])
def test_a_sweep_in_other_processes_ends_with_the_code_of_a_job_that_failed(interpreter, tmp_path, steps, code):
    plugin = tmp_path / "plugins" / "hydra_plugins" / "forking.py"
    plugin.parent.mkdir(parents=True)
    plugin.write_text(LAUNCHER)
    arguments = ["-m", "hydra/launcher=forking", *COMMON, "offload=none", f"run.steps={steps}", "run.dir=sweep"]
    program = f"import sys\nsys.path[:0] = [{str(plugin.parents[1])!r}]\n"
    program += f"from zero_train.cli import app\nsys.exit(app.main({arguments!r}))\n"
    ended = interpreter(program, tmp_path)
    assert ended.returncode == code, ended.stderr
    assert re.search(rf"\n1 +run\.steps={steps[2]} +{code}", ended.stdout)  # the table
    assert ended.stderr.count("run.steps=0 must be at least 1") == (code == 2)


STARTS = """
import os, sys, time, torch.distributed as dist
from zero_train.errors import RunError
from zero_train.run.ranks import joined
store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # as torchrun's agent holds it
os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"

def start(ranks, late, timeout, *also_late):
    children = []
    for rank in ranks:
        if children.append(os.fork()) or not children[-1]:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            time.sleep(rank == late)
            try:
                found = joined("cpu", timeout).gather(rank * 10)
            except RunError as error:
                print(error, file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0 if found == [0, 10] else 3)  # what is of the store here is the parent's
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]

for late in (0, 1, 0):
    print("codes", start((0, 1), late, 20), file=sys.stderr)
print("alone", start((1,), 0, 2), start((0,), 1, 2), file=sys.stderr)
print("codes", start((0, 1), 0, 20), file=sys.stderr)
"""


@pytest.mark.advice("Start all ranks within run.timeout=")
@pytest.mark.promise("torchrun-restarts")
def test_ranks_that_torchrun_starts_again_meet_in_a_store_with_what_those_before_wrote(interpreter, tmp_path):
    """Fails if a rank takes the address of one that has ended, as init_process_group alone does; and if ranks that
    waited for the others in vain, each in another start, leave what the next start cannot do with."""
    ended = interpreter(STARTS, tmp_path, timeout_seconds=120)
    assert ended.stderr.count("codes [0, 0]") == 4 and "alone [1] [1]" in ended.stderr, ended.stderr
    assert "rank 0 of 2 did not reach the others" in ended.stderr and "run.timeout=2 seconds" in ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr
