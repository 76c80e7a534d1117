"""What `probe` learns from a real slab: fails if a slab does not tell where it is, so that nothing fits on nvme."""

import shutil
from contextlib import closing
from pathlib import Path

import pytest

from zero_nvme import Slab
from zero_offload import probe


@pytest.mark.promise("probe-slab")
def test_a_probed_slab_tells_its_paths_and_their_room(tmp_path: Path) -> None:
    with closing(Slab([tmp_path], allow_memory=True)) as slab:
        assert slab.paths == (str(tmp_path),)
        machine = probe(nvme=slab, hidden_size=64, tokens=16)
    assert machine.nvme_paths == 1 and machine.nvme_gib == pytest.approx(
        shutil.disk_usage(tmp_path).free / 2**30, rel=0.1
    )
    assert machine.nvme_read_gbps and machine.nvme_write_gbps
