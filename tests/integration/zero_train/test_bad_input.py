"""What cannot run is refused in one line that names the key: exit code 2, no traceback, nothing left behind."""

import pytest

from tests.integration.zero_train.helpers import left
from zero_train.cli import app

TINY = ["recipe=tiny", "data=synthetic", "io.allow_memory=true"]


def refused(capsys, folder, *arguments):
    """The one line that the command printed, and proof that it did nothing else."""
    before = left(folder)
    code = app.main([*TINY, f"run.dir={folder / 'run'}", *arguments])
    printed = capsys.readouterr()
    assert code == 2, printed
    assert printed.err.startswith("zero-train: ") and printed.err.count("\n") == 1, printed.err
    assert "Traceback" not in printed.err + printed.out
    assert left(folder) == before
    return printed.err


@pytest.mark.promise("offload-rows-key")
@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["run.step=3"], "run.steps"),
        (["run.steps=many"], "run.steps"),
        (["zero.stage=4"], "zero.stage"),
        (["model=lama"], "model"),
        (["offload=nvme", "offload.nvme_paths=[/nowhere/at/all]"], "offload.nvme_paths"),
        (["data=text", "data.path=/nowhere"], "data.path"),
        (["model.hidden_size=30", "model.heads=4"], "model.heads"),
        (["run.resume=/nowhere"], "run.resume"),
        (["offload=nvme", "offload.tile_numel=1000"], "tile_numel"),
        (["run.dir=/proc/version", "offload=host"], "run.dir=/proc/version"),
        (["hardware=8x80gib"], "run.dry=true"),
        (["offload=nvme", "io.backend=uring"], "io.backend=uring"),
        (["offload=host", "offload.optimizer=disk"], "offload.optimizer: 'disk' is not a tier"),
        (["offload.optimizer={host: 0.5, nvme: 0.4}"], "offload.optimizer: the fractions"),
        (["offload=host", "offload.activations=[keep,disk]"], "offload.activations=disk is no policy"),
        (["offload=host", "offload.rows=few", "offload.activations=auto"], "offload.rows=few: a number of rows"),
        (["offload=host", "offload.tokens=0", "offload.activations=auto"], "offload.tokens=0: a number of tokens"),
        (["offload=host", "offload.tokens=auto"], "needs units that are recomputed"),
        (["hardware.device=meta"], "torch sees no such device"),
        (["hardware.host_gb=8"], "hardware has no key 'host_gb'; did you mean host_gib?"),
        (["hardware.host_gib=-1"], "hardware: host_gib is -1"),
    ],
)
def test_one_line_names_the_key(capsys, tmp_path, arguments, key):
    assert key in refused(capsys, tmp_path, *arguments)
