"""A run folder belongs to one run: nothing of it is overwritten, mixed, deleted or continued unless one asks for it."""

import errno
import fcntl
import json
import os
import re
import shutil

import pytest

from tests.integration.zero_train.helpers import COMMON, stopped_after, trained
from zero_train.cli import app
from zero_train.errors import ConfigError
from zero_train.report import picture
from zero_train.run import resume, run_folder
from zero_train.settings import compose

pytestmark = pytest.mark.promise("run-folder")

RUN = ("offload=none", "run.steps=4", "run.checkpoint_every=2")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished run, which no test changes."""
    return trained(tmp_path_factory.mktemp("done") / "run", *RUN, "run.export=true").folder


@pytest.fixture
def copy(done, tmp_path):
    """The same, for one test to change."""
    return shutil.copytree(done, tmp_path / "run")


def found(run, *overrides):
    return resume.found(compose.compose([*COMMON, *RUN, f"run.dir={run}", *overrides]))


def bits(run):
    return {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_used_folder_is_refused_and_stands(done, capsys):
    before = bits(done)
    assert app.main([*COMMON, *RUN, f"run.dir={done}"]) == 2
    text = capsys.readouterr().err
    assert "holds a run" in text and "run.dir=…" in text and "after step 4 with run.resume=auto" in text
    assert bits(done) == before


@pytest.mark.promise("folder-in-use")
def test_a_folder_in_use_is_refused_and_stands(copy, capsys):
    with run_folder.claimed(copy):
        before = bits(copy)
        assert app.main([*COMMON, *RUN, f"run.dir={copy}", "run.resume=auto"]) == 2
    said = capsys.readouterr().err
    assert f"a run is using it (process {os.getpid()}" in said
    assert "wait until that run ends, or name another folder" in said
    assert bits(copy) == before
    with run_folder.claimed(copy):
        pass


def test_a_run_with_a_schedule_of_0_2_is_continued_on_purpose_alone(copy):
    """The key is gone, so its rates would be others without a word."""
    for path in copy.rglob("config.yaml"):
        path.write_text(path.read_text().replace("  warmup_steps:", "  schedule: {type: WarmupLR}\n  warmup_steps:"))
    with pytest.raises(ConfigError, match=r"optim.schedule={'type': 'WarmupLR'}, now None.*run.resume=/") as caught:
        found(copy, "run.resume=auto")
    there = re.search(r"with the new settings by (run.resume=\S+)", str(caught.value))[1]
    before = resume.saved(found(copy, there))
    assert "optim.schedule=None (was" in resume.differing(before, compose.compose([*COMMON, *RUN]))


def test_folders_that_an_error_asks_for_are_taken(tmp_path):
    with pytest.raises(ConfigError, match="or start again without run.resume"):
        found(tmp_path / "new", f"run.resume={tmp_path}")
    assert found(tmp_path / "new") is None
    for content, advice in (
        ("{", "; repair this file, or give another folder"),
        ("model: {layers: 1}", "name another folder"),
    ):
        (tmp_path / "config.yaml").write_text(content)
        (tmp_path / "metrics.jsonl").write_text("{}\n")
        with pytest.raises(ConfigError, match=advice):
            found(tmp_path, "run.resume=auto")
        assert found(tmp_path / "new", "run.resume=auto") is None


@pytest.mark.advice("was saved after step {}, and this run ends at {}; raise", ". Or continue that run after step")
@pytest.mark.parametrize(
    ("changed", "differs"),
    [
        ("model.layers=3", "model.layers=2, now 3"),
        ("model=gpt2 run.seed=3", "run.seed=0, now 3"),
        ("optim=sgd", ""),
        ("optim.lr=0.5", "optim.lr=0.001, now 0.5"),
        ("data.sequence_length=16", "data.sequence_length=32, now 16"),
        ("precision=fp32", "precision.parameters=bf16, now fp32"),
        ("run.seed=3 run.steps=3", "run.seed=0, now 3"),
        ("run.steps=3", None),
    ],
)
@pytest.mark.parametrize("asked", ["", "run.resume=auto"])
def test_auto_does_not_continue_another_run_and_the_way_out_that_is_named_works(copy, changed, differs, asked, capsys):
    """Fails if the command that a refusal suggests is refused next, before or while it loads the checkpoint."""
    command = [*COMMON, *RUN, f"run.dir={copy}", *changed.split()]
    assert app.main([*command, *asked.split()]) == 2
    said = capsys.readouterr().err
    assert not asked or differs is None or ("holds another run" in said and differs in said), said
    way = re.search(
        r"\. Or continue that run after step 4 with (?:(?:the new|its own) settings by )?(.+)$|; (raise run.steps)$",
        said,
    )
    assert way, "no way out"
    assert app.main([*command, *(way[1] or "run.resume=auto run.steps=4").split()]) == 0


def test_auto_continues_a_command_that_computes_or_reports_otherwise(done):
    same = ("run.steps=9", "offload=host", "zero.stage=1", "optim.threads=1", "run.export=true")
    assert found(done, "run.resume=auto", *same).step == 4


def test_on_purpose_everything_but_the_model_may_differ_and_is_said(copy, capsys):
    changed = ("run.steps=5", "run.seed=3", "optim.lr=0.002")
    assert trained(copy, *RUN, f"run.resume={copy}", *changed).losses
    text = capsys.readouterr().out
    assert "differs from the run that it continues: run.steps=5 (was 4), run.seed=3 (was 0), optim.lr=0.002" in text
    with pytest.raises(ConfigError, match=r"saved with model\.layers=2"):
        found(copy, f"run.resume={copy}", "run.steps=5", "model.layers=3")


def test_a_checkpoint_says_itself_what_it_was_saved_under(copy, tmp_path):
    """Fails if a later resume, which changes the folder's config.yaml, changes what an earlier checkpoint is."""
    (copy / "config.yaml").write_text(compose.as_yaml(compose.compose([*COMMON, *RUN, "run.dir=x", "run.seed=3"])))
    earlier = f"run.resume={copy / 'checkpoints' / 'step_0000002'}"
    composed = compose.compose([*COMMON, *RUN, f"run.dir={tmp_path / 'other'}", earlier])
    resume.keep_batch(resume.found(composed), composed, 1)
    assert resume.differing(resume.saved(resume.found(composed)), composed) == ""


def test_an_earlier_checkpoint_is_continued_elsewhere_only(done, tmp_path):
    earlier = f"run.resume={done / 'checkpoints' / 'step_0000002'}"
    with pytest.raises(ConfigError, match=r"holds a run .*run\.dir=…, because run\.resume=\S+ is not the last c"):
        found(done, earlier)
    assert found(tmp_path / "other", earlier).step == 2
    with pytest.raises(ConfigError, match="is not the last checkpoint of "):
        found(done, f"run.resume={shutil.copytree(done, tmp_path / 'twin')}")


def test_another_text_under_the_same_name_is_told(tmp_path, capsys):
    (tmp_path / "text").write_text("one two three " * 200)
    options = (*RUN, "data=text", f"data.path={tmp_path / 'text'}")
    trained(tmp_path / "run", *options)
    (tmp_path / "text").write_text("four five six " * 200)
    with pytest.raises(
        ConfigError,
        match=r"run\.resume=auto: the text differs .*restore the saved run's text, .* with run\.resume=",
    ):
        trained(tmp_path / "run", *options, "run.resume=auto", "run.steps=5")
    (tmp_path / "text").write_text("one two three " * 200)
    trained(tmp_path / "run", *options, "run.resume=auto", "run.steps=5")
    (tmp_path / "text").write_text("four five six " * 200)
    trained(tmp_path / "run", *options, f"run.resume={tmp_path / 'run'}", "run.steps=6")
    assert "the text differs from the saved run's" in capsys.readouterr().out


def test_a_run_killed_before_its_first_checkpoint_is_begun_anew_by_the_same_command_only(tmp_path, capsys):
    options = ("offload=none", "run.steps=3", "run.resume=auto")
    with stopped_after(1):
        assert trained(tmp_path / "run", *options).exit_code == 130
    with pytest.raises(ConfigError, match=r"holds another run \(run\.seed=0, now 1\)"):
        trained(tmp_path / "run", *options, "run.seed=1")
    capsys.readouterr()
    assert len(trained(tmp_path / "run", *options).losses) == 3
    assert "no checkpoint in" in capsys.readouterr().out
    assert [step.step for step in picture.read_steps(tmp_path / "run")] == [1, 2, 3]


def test_a_run_killed_after_its_last_step_can_still_be_exported(copy):
    """Fails if a checkpoint of the last step is refused: nothing else holds the weights."""
    timeline = (copy / "timeline.json").read_bytes()
    exported = {path.name: path.read_bytes() for path in (copy / "pretrained").iterdir()}
    shutil.rmtree(copy / "pretrained")
    metrics = (copy / "metrics.jsonl").read_bytes()
    run = trained(copy, *RUN, "run.export=true", "run.resume=auto")
    assert (run.exit_code, run.losses) == (0, ())
    assert {path.name: path.read_bytes() for path in (copy / "pretrained").iterdir()} == exported
    assert ((copy / "metrics.jsonl").read_bytes(), (copy / "timeline.json").read_bytes()) == (metrics, timeline)


def on_two(folder):
    """Two ranks in a used folder, then two that continue it: the refusals or losses of this rank."""
    said = []
    for overrides in ((), (), ("run.resume=auto", "run.steps=5"), ("run.resume=auto", "run.seed=1")):
        try:
            said.append(len(trained(folder, *RUN, *overrides).losses))
        except ConfigError as error:
            said.append(str(error))
    return said


def test_every_rank_of_a_run_is_refused_alike(ranks, tmp_path):
    first, second = ranks(2).run(on_two, tmp_path / "run")
    assert first == second
    assert first[0] == 4 and "holds a run" in first[1] and first[2] == 1 and "run.seed=0, now 1" in first[3]


TORCHRUN = """
import os, sys, torch.distributed as dist
from zero_train.cli import app
arguments = ARGUMENTS
os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True")
children, pipes = [], []
for rank in range(2):
    pipes.append(os.pipe())
    children.append(os.fork())
    if not children[-1]:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=os.read(pipes[-1][0], 9).decode())
        started, start = [], dist.init_process_group
        dist.init_process_group = lambda *given, **named: (started.append(1), start(*given, **named))
        code = app.main(arguments)
        print("rank", rank, "started", len(started), file=sys.stderr, flush=True)
        sys.exit(code)
store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # as torchrun's agent holds it
for _, write in pipes:
    os.write(write, str(store.port).encode())
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
print("codes", codes, file=sys.stderr)
"""


@pytest.mark.promise("sweep-torchrun")
def test_a_sweep_on_two_ranks_runs_all_its_jobs(tmp_path, interpreter):
    """Fails if a job starts a process group of its own: where the first one's keys still lie, it may wait for ever."""
    arguments = [*COMMON, "-m", "offload=none", "run.steps=1", "zero.stage=1,2", f"run.dir={tmp_path / 'sweep'}"]
    ended = interpreter(TORCHRUN.replace("ARGUMENTS", repr(arguments)), tmp_path, timeout_seconds=240)
    for line in ("codes [0, 0]", "rank 0 started 1", "rank 1 started 1"):
        assert line in ended.stderr, ended.stderr
    for job in range(2):
        (line,) = (tmp_path / "sweep" / str(job) / "metrics.jsonl").read_text().splitlines()
        assert json.loads(line)["step"] == 1
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir()) == ["0", "1", "multirun.yaml", "sweep.csv"]


def test_a_filesystem_without_locks_is_told(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with run_folder.claimed(tmp_path / "run") as reason:
        assert reason == "No locks available"
