"""examples/deepspeed: a script of DeepSpeed's tutorials kind, and the same script after one changed import."""

import importlib.util
import json
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from .model import torchrun

FOLDER = Path(__file__).parents[3] / "examples" / "deepspeed"
CONFIG = FOLDER / "ds_config.json"

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: nox -s deepspeed"
)


def run_here(output, *arguments):
    """The losses that the adapted script writes, in this process."""
    given = [str(FOLDER / "after.py"), "--deepspeed_config", str(CONFIG), "--output", str(output), *arguments]
    try:
        with mock.patch.object(sys, "argv", given):
            runpy.run_path(given[0], run_name="__main__")
    finally:
        dist.destroy_process_group()
    return json.loads((output / "losses.json").read_text())


def run(name, output, world, config, *more):
    """The losses that one of the scripts writes, in processes of its own."""
    torchrun(world, FOLDER / name, "--deepspeed_config", config, "--output", output, *more)
    return json.loads((Path(output) / "losses.json").read_text())


@pytest.mark.promise("ds-loop")
def test_one_import_adapts_it():
    """Fails if the two scripts differ in anything but the import, and the name of the file in its usage."""
    before, after = ((FOLDER / name).read_text().splitlines() for name in ("before.py", "after.py"))
    assert len(before) == len(after)
    differ = [(one, other) for one, other in zip(before, after, strict=True) if one != other]
    assert differ[1:] == [("import deepspeed", "import zero_deepspeed as deepspeed")]
    assert differ[0][0].replace("before.py", "after.py") == differ[0][1]


@pytest.mark.promise("ds-loop")
def test_it_runs_and_goes_on_from_its_checkpoint_in_the_same_digits(tmp_path):
    whole = run_here(tmp_path / "out", "--steps", "16")
    assert whole[-1] < whole[0]
    assert (tmp_path / "out" / "weights" / "model.safetensors").is_file()
    resumed = run_here(tmp_path / "out", "--steps", "16", "--resume")
    assert len(whole) == 32 and resumed == whole


@pytest.mark.promise("ds-loop")
@needs_deepspeed
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_losses_are_deepspeeds_own(tmp_path, world, stage):
    """Fails if a loss of 50 steps differs by more than 1e-5 (relative) from the real DeepSpeed's."""
    settings = json.loads(CONFIG.read_text())
    if stage < 3:
        settings["zero_optimization"] = {"stage": stage}
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(settings))
    theirs, ours = (run(name, tmp_path / name, world, file) for name in ("before.py", "after.py"))
    assert len(ours) == 100
    assert ours == pytest.approx(theirs, rel=1e-5, abs=0)


@pytest.mark.promise("ds-goes-on")
@needs_deepspeed
@pytest.mark.parametrize("world", [1, 2])
def test_it_goes_on_from_deepspeeds_own_checkpoint(tmp_path, world):
    """Fails if one of the 25 steps after DeepSpeed's checkpoint has another loss than DeepSpeed's own next steps."""
    theirs = run("before.py", tmp_path, world, CONFIG)
    ours = run("after.py", tmp_path, world, CONFIG, "--resume")
    assert len(ours) == 100 and ours[:50] == theirs[:50]
    assert ours[50:] == pytest.approx(theirs[50:], rel=1e-5, abs=0)
