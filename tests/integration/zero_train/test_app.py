"""The command line from end to end: a dry run, a sweep, help, other models, and what a run prints and leaves."""

import csv
import json

import pytest

pytest.importorskip("transformers")
pytest.importorskip("zero_nvme")
pytest.importorskip("zero_optim_cpu")

import zero_train
from tests.integration.zero_train.helpers import COMMON, left, trained
from zero_train import app
from zero_train import config as configuration


def test_a_run_prints_its_plan_first_and_leaves_its_files(capsys, tmp_path):
    code = app.main(
        [
            *COMMON,
            f"run.dir={tmp_path / 'run'}",
            "offload=nvme",
            "run.evaluate_every=5",
            "run.sample_bytes=8",
            "run.plots=true",
        ]
    )
    text = capsys.readouterr().out
    assert code == 0
    order = [" to disk in all", "step 1/5", "step 5/5", "validation after step 5", "--- sample ---", "results in"]
    positions = [text.index(word) for word in order]
    assert positions == sorted(positions)
    for tier in ("device", "host", "nvme"):
        assert f"\n{tier} " in text[: positions[0]]
    assert ".lock config.yaml metrics.jsonl report.png timeline.json timeline.png validation.jsonl".split() == left(
        tmp_path / "run"
    )
    trace = json.loads((tmp_path / "run" / "timeline.json").read_text())
    assert {"swap_in", "swap_out", "update", "forward", "backward"} <= {e.get("cat") for e in trace["traceEvents"]}
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    steps = [event for event in spans if event["cat"] == "step"]
    end = max(event["ts"] + event["dur"] for event in spans)
    assert [event["name"] for event in steps] == [f"step {number}" for number in range(1, 6)]
    assert end <= steps[-1]["ts"] + steps[-1]["dur"], "validation and sampling after the last step are no part of it"


def test_a_dry_run_writes_nothing(capsys, tmp_path):
    code = app.main([*COMMON, f"run.dir={tmp_path / 'run'}", "run.dry=true", "offload=nvme"])
    assert code == 0
    assert " to disk in all" in capsys.readouterr().out
    assert left(tmp_path) == []


def test_a_sweep_runs_each_job_in_a_folder_of_its_own(capsys, tmp_path):
    arguments = ["-m", *COMMON, f"run.dir={tmp_path}", "run.steps=2", "zero.stage=0,3", "offload=none,nvme"]
    assert app.main(arguments) == 0
    text = capsys.readouterr().out
    for job in range(4):
        assert f"job {job + 1} of 4, {tmp_path / str(job)}: " in text
        assert len((tmp_path / str(job) / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_mistake_of_a_job_is_told_with_its_number(capsys, tmp_path):
    assert app.main(["-m", *COMMON, f"run.dir={tmp_path}", "offload=none", "run.steps=0,-1"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[:2] for line in told] == [["zero-train", f"job {job} of 2"] for job in (1, 2)]


def test_a_job_that_does_not_compose_is_a_row_of_the_table_of_a_sweep_through_hydra(capsys, tmp_path):
    arguments = ["-m", *COMMON, f"run.dir={tmp_path / 'all'}", "offload=none", "run.steps=???,1"]
    assert app.main([*arguments, f"hydra.sweep.dir={tmp_path / 'hydra'}"]) == 2
    with (tmp_path / "all" / "sweep.csv").open(newline="") as file:
        rows = [row[:4] for row in csv.reader(file)][1:]
    assert "zero-train: job #0: run.steps has no value" in capsys.readouterr().err
    assert rows == [["0", "run.steps=???", "2", ""], ["1", "run.steps=1", "0", "1"]]


def test_a_probe_prints_hardware_that_composes(capsys, tmp_path):
    from omegaconf import OmegaConf

    from zero_train.schema import HardwareConfig

    assert app.main([*COMMON, f"run.dir={tmp_path / 'run'}", "run.probe=true", "offload=host"]) == 0
    text = capsys.readouterr().out
    figures = OmegaConf.merge(OmegaConf.structured(HardwareConfig), OmegaConf.create(text))
    assert figures.tflops.fp32 > 0 and figures.tflops.bf16 > 0 and figures.update_gbps > 0 and figures.host_gib > 0
    assert left(tmp_path) == []


def test_version_is_zero_trains_own(capsys):
    assert app.main(["--version"]) == 0
    assert capsys.readouterr().out == f"zero-train {zero_train.__version__}\n"


def test_a_folder_of_recipes_of_ones_own(capsys, tmp_path):
    """Such a command line goes through Hydra, with the same checks."""
    (tmp_path / "own" / "recipe").mkdir(parents=True)
    (tmp_path / "own" / "recipe" / "mine.yaml").write_text("# @package _global_\nrun:\n  steps: 7\n")
    flags = ["--config-dir", str(tmp_path / "own"), "recipe=mine", "run.dry=true", "data=synthetic", "offload=none"]
    assert app.main(flags) == 0
    assert "7 steps of" in capsys.readouterr().out
    assert app.main([*flags, "optim.momentum=0.5"]) == 2
    assert "optim.momentum is given, but nothing uses it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--cfg", "job", "run.steps=31", "model.path=/x"],
        ["run.steps=31", "--cfg=job", "model.path=/x"],
        ["run.steps=31", "model.path=/x", "--package", "_global_", "-c", "job"],
    ],
)
def test_flags_of_hydra_stand_anywhere_and_values_are_printed_as_they_are(words, capsys):
    """Fails if what zero-train adds to the words comes between a flag and its value, or after them."""
    assert app.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"  steps: 31", "  kind: hf", "  lr: 0.001", "  warmup_steps: 4"} <= set(lines)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--multirun", "--cfg", "job"], "Only one of"),
        (["recipe=tiny", "--resolve"], "--resolve"),
        (["run.dry=true", "--hydra-help"], "run is a section"),
    ],
)
def test_flags_that_exclude_each_other_are_one_line(words, said, capsys):
    assert app.main(words) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("zero-train: ") and said in printed and printed.count("\n") == 1


def test_help_begins_with_the_groups_and_fits_on_a_screen(capsys):
    assert app.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  offload    auto, host, none, nvme" in lines
    assert len(lines) <= 32 and not [line for line in lines if len(line) > 100]


def test_help_of_a_group_explains_every_key_with_its_value(capsys):
    """Fails if a key of any section has no meaning in schema.py, or the words beside --help do not count."""
    assert app.main(["--help", "all", "recipe=tiny", "run.dir=here"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for key in configuration.keys():
        if "." in key:
            at = next(n for n, line in enumerate(lines) if line.startswith(f"  {key}="))
            assert lines[at + 1].startswith("      ")
    assert "  run.steps=5" in lines and "  model.path=null" in lines
    assert app.main(["--help", "dta"]) == 2
    assert "did you mean 'data'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["help"], "did you mean '--help'?"),
        (["help", "data"], "did you mean '--help'?"),
        (["generat", "run.dir=mine"], "did you mean 'generate'?"),
        (["train", "offload=host"], "write KEY=VALUE, or see zero-train --help"),
    ],
)
def test_a_command_that_does_not_exist_is_one_line(words, hint, capsys):
    assert app.main(words) == 2
    assert capsys.readouterr().err == f"zero-train: there is no command '{words[0]}'; {hint}\n"


@pytest.mark.parametrize("model", ["gpt2", "moe"])
def test_other_models_train(tmp_path, model):
    run = trained(tmp_path / "run", f"model={model}", "offload=nvme", "run.steps=12")
    assert run.losses[-1] < run.losses[0] - 0.3


def test_every_stage_gives_the_same_losses_on_one_rank(tmp_path):
    runs = [trained(tmp_path / str(stage), f"zero.stage={stage}", "offload=host", "run.steps=3") for stage in range(4)]
    assert len({run.losses for run in runs}) == 1


def test_the_same_seed_gives_the_same_run_and_another_does_not(tmp_path):
    first, again, other = (
        trained(tmp_path / name, "offload=host", "run.sample_bytes=6", f"run.seed={seed}", "run.evaluate_every=5")
        for name, seed in (("first", 3), ("again", 3), ("other", 4))
    )
    assert (first.losses, first.digest, first.sample) == (again.losses, again.digest, again.sample)
    assert first.validation == again.validation
    assert first.digest != other.digest
