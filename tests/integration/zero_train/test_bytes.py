"""The bytes that metrics.jsonl reports are those of the tiles in use, and the kernel counted them too."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("zero_nvme")
pytest.importorskip("zero_optim_cpu")

import zero_core
from tests.integration.zero_train.helpers import trained
from zero_train import places, report

# One block of 4.96 M elements: a whole 4 Mi-element tile and a rest.
LARGE = ("model.hidden_size=640", "model.intermediate_size=1728", "model.layers=1", "model.heads=10")
TILE_NUMEL = 1 << 22
STATE_BYTES = 2 + 4 + 4  # an element: the master's remainder, and two fp32 moments
PARAMETER_BYTES = 2
STEPS = 4


def written_by_process() -> int:
    """`write_bytes` of /proc/self/io: what this process had the block layer write."""
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("write_bytes:"))


def aligned(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


def test_written_bytes_are_the_tiles(tmp_path):
    if not Path("/proc/self/io").exists():
        pytest.skip("this kernel keeps no I/O counters of processes")
    before = written_by_process()
    run = trained(tmp_path / "run", "offload=nvme", f"run.steps={STEPS}", *LARGE)
    counted = written_by_process() - before
    steps = report.read_steps(run.folder)
    written = sum(step.nvme_write_bytes for step in steps)
    least, most = 0, 0
    for numel in unit_numels():
        whole, rest = divmod(numel, TILE_NUMEL)
        tiles = [TILE_NUMEL] * whole + ([rest] if rest else [])
        least += sum(tile * (STATE_BYTES + PARAMETER_BYTES) for tile in tiles)
        most += sum(aligned(tile * STATE_BYTES) + aligned(tile * PARAMETER_BYTES) + 3 * 4096 for tile in tiles)
    assert STEPS * least <= written <= STEPS * most
    # Reads: each tile's states once a step; parameters for forward and backward, less what memory handed over.
    states = sum(numel * STATE_BYTES for numel in unit_numels())
    read = sum(step.nvme_read_bytes for step in steps)
    assert STEPS * states <= read <= STEPS * (most + states)
    if places.memory_filesystem(tmp_path) is None:
        assert counted >= written
        assert counted <= written + 2 * most + (64 << 20)  # the set-up's writing, the plots, and room for others' files


def unit_numels() -> list[int]:
    """Elements of each unit's storage of the LARGE model: embedding, block, norm, head."""
    from zero_train import config, models

    composed = config.compose(["recipe=tiny", "run.dir=unused", *LARGE])
    with zero_core.deferred_init():
        model = models.build(composed.model, composed.data.sequence_length)
    total = sum(p.numel() for p in model.parameters())
    blocks = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    assert len(blocks) == 1 and TILE_NUMEL < blocks[0] < 2 * TILE_NUMEL
    rest = [p.numel() for name, p in model.named_parameters() if ".layers." not in name]
    assert sum(blocks + rest) == total
    return blocks + rest
