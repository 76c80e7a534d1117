"""The command line from end to end: a dry run, a sweep, help, other models, and what a run prints and leaves."""

import json
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import zero_train
from tests.integration.zero_train.helpers import COMMON, left, trained
from zero_nvme import Slab
from zero_offload import Hardware, probe
from zero_train.cli import app

TINY = ("recipe=tiny", "data=synthetic", "io.allow_memory=true")
PARTS = "offload=host offload.activations=recompute run.micro_batch=2 offload.rows=1 offload.tokens=8"


@pytest.mark.promise("timeline")
def test_a_run_prints_its_plan_first_and_leaves_its_files(capsys, tmp_path):
    words = ["offload=nvme", "run.evaluate_every=5", "run.sample_bytes=8", "run.plots=true"]
    code = app.main([*COMMON, f"run.dir={tmp_path / 'run'}", *words])
    text = capsys.readouterr().out
    assert code == 0
    order = [" to disk in all", "step 1/5", "step 5/5", "validation after step 5", "--- sample ---", "results in"]
    positions = [text.index(word) for word in order]
    assert positions == sorted(positions)
    for tier in ("device", "host", "nvme"):
        assert f"\n{tier} " in text[: positions[0]]
    assert "config.yaml metrics.jsonl report.png timeline.json validation.jsonl".split() == left(tmp_path / "run")
    trace = json.loads((tmp_path / "run" / "timeline.json").read_text())
    assert {"swap_in", "swap_out", "update", "forward", "backward"} <= {e.get("cat") for e in trace["traceEvents"]}
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    steps = [event for event in spans if event["cat"] == "step"]
    end = max(event["ts"] + event["dur"] for event in spans)
    assert [event["name"] for event in steps] == [f"step {number}" for number in range(1, 6)]
    assert end <= steps[-1]["ts"] + steps[-1]["dur"], "validation and sampling after the last step are no part of it"


@pytest.mark.promise("sweep-mistake-number")
def test_a_mistake_of_a_job_is_told_with_its_number(capsys, tmp_path):
    assert app.main(["-m", *COMMON, f"run.dir={tmp_path}", "offload=none", "run.steps=0,-1"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[:2] for line in told] == [["zero-train", f"job #{job}"] for job in (0, 1)]


@pytest.mark.promise("sweep-mistake")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run.steps=???,1"], "job #0: run.steps has no value"),
        (["zero=stage3,stage7"], "In 'train': Could not find 'zero/stage7'"),
        (["model.experts=8,16"], "model.experts is given and not used with model=llama"),
    ],
)
@pytest.mark.parametrize("own", [False, True])
def test_a_mistake_in_any_job_stops_the_sweep_before_it_begins(words, said, own, capsys, tmp_path):
    """Fails if a flag of Hydra's changes what is checked, or if two jobs differ in a key that nothing uses."""
    (tmp_path / "own").mkdir()
    flags = [f"--config-dir={tmp_path / 'own'}"] if own else []
    assert app.main(["-m", *COMMON, f"run.dir={tmp_path / 'all'}", "offload=none", *words, *flags]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"zero-train: {said}") and printed.count("\n") == 1
    assert not list((tmp_path / "all").glob("*/"))


@pytest.mark.promise("own-recipe-mistake")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# @package _global_\nrun: {stps: 7}", "In 'recipe/own': the key run.stps does not exist; did you mean"),
        ("run: {steps: 7}", "In 'recipe/own': the key recipe does not exist; write '# @package _global_'"),
        ("# @package _global_\nrun: {steps: 0}", "run.steps=0 must be at least 1"),
    ],
)
def test_a_mistake_in_a_recipe_of_ones_own_is_one_line(text, said, capsys, tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "own.yaml").write_text(text)
    words = [f"--config-dir={tmp_path}", "recipe=own", "offload=none", "run.dry=true"]
    assert app.main(words) == 2
    printed = capsys.readouterr().err
    if "write '# @package _global_'" in printed:
        (tmp_path / "recipe" / "own.yaml").write_text("# @package _global_\n" + text)
        assert app.main(words) == 0
    assert printed.startswith(f"zero-train: {said}") and printed.count("\n") == 1


@pytest.mark.promise("offload-rows-key")
@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ("offload=nvme offload.nvme_paths=[/nowhere/at/all]", "offload.nvme_paths"),
        ("run.resume=/nowhere", "run.resume"),
        ("offload=nvme offload.tile_numel=1000", "tile_numel"),
        ("run.dir=/proc/version offload=host", "run.dir=/proc/version"),
        ("hardware=8x80gib", "run.dry=true"),
        ("offload=nvme io.backend=uring", "io.backend=uring"),
        ("offload=host offload.optimizer=disk", "offload.optimizer: 'disk' is not a tier"),
        ("offload.optimizer={host:0.5,nvme:0.4}", "offload.optimizer: {"),
        ("offload=host offload.activations=[keep,disk]", "offload.activations=disk is no policy"),
        ("offload=host offload.rows=few offload.activations=auto", "offload.rows=few must be a whole number"),
        ("offload=host offload.tokens=0 offload.activations=auto", "offload.tokens=0 must be a whole number"),
        ("offload=host offload.tokens=auto", "needs units that are recomputed"),
        ("hardware.device=meta", "torch sees no such device"),
        ("hardware.host_gb=8", "hardware has no key 'host_gb'; did you mean host_gib?"),
        ("hardware.host_gib=-1", "hardware: host_gib is -1"),
        ("offload=host offload.activations=[keep,recompute]", "2 activation policies for 5 units: give one"),
        (f"{PARTS} offload.row_modules=[h.*]", "row_modules= has 'h.*', and no module is called that"),
        (f"{PARTS} offload.token_modules=[ffn]", "token_modules= has 'ffn', and no module is called that"),
    ],
)
def test_what_cannot_run_is_one_line_that_names_the_key_and_leaves_nothing(capsys, tmp_path, arguments, key):
    before = left(tmp_path)
    code = app.main([*TINY, f"run.dir={tmp_path / 'run'}", *arguments.split()])
    printed = capsys.readouterr()
    assert code == 2 and "Traceback" not in printed.err + printed.out, printed
    assert printed.err.startswith("zero-train: ") and printed.err.count("\n") == 1 and key in printed.err, printed.err
    assert left(tmp_path) == before


@pytest.mark.promise("compute-by-format")
def test_a_probe_prints_hardware_that_composes(capsys, tmp_path):
    assert app.main([*COMMON, f"run.dir={tmp_path / 'run'}", "run.probe=true", "offload=host"]) == 0
    text = capsys.readouterr().out
    figures = Hardware.from_dict(OmegaConf.to_container(OmegaConf.create(text)))
    assert min(figures.tflops["fp32"], figures.tflops["bf16"], figures.update_gbps, figures.host_gib) > 0
    assert left(tmp_path) == []


@pytest.mark.promise("version-flag")
def test_version_is_zero_trains_own(capsys):
    assert app.main(["--version"]) == 0
    assert capsys.readouterr().out == f"zero-train {zero_train.__version__}\n"


@pytest.mark.promise("hydra-flags")
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


@pytest.mark.promise("hydra-flags")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--multirun", "--cfg", "job"], "Only one of"),
        (["recipe=tiny", "--resolve"], "--resolve"),
        (["run.dry=true", "--hydra-help"], "the key run does not exist"),
        (["tier=3"], "; choose an option that zero-train --help lists"),
    ],
)
def test_flags_that_exclude_each_other_are_one_line(words, said, capsys):
    assert app.main(words) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("zero-train: ") and said in printed and printed.count("\n") == 1


@pytest.mark.promise("help-groups")
def test_help_names_the_groups(capsys):
    assert app.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "offload: auto, host, none, nvme" in lines and len(lines) <= 40


@pytest.mark.parametrize("model", ["gpt2", "moe"])
def test_other_models_train(tmp_path, model):
    run = trained(tmp_path / "run", f"model={model}", "offload=nvme", "run.steps=12")
    assert run.losses[-1] < run.losses[0] - 0.3


@pytest.mark.promise("probe-slab")
def test_a_probed_slab_tells_its_paths_and_their_room(tmp_path: Path) -> None:
    """Fails if a slab does not tell where it is, so that nothing fits on nvme."""
    with Slab([tmp_path], allow_memory=True) as slab:
        assert slab.paths == (str(tmp_path),)
        machine = probe(nvme=slab, hidden_size=64, tokens=16)
    free = shutil.disk_usage(tmp_path).free / 2**30
    assert machine.nvme_paths == 1 and machine.nvme_gib == pytest.approx(free, rel=0.1)
    assert machine.nvme_read_gbps and machine.nvme_write_gbps
