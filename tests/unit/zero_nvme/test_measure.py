"""The weights of paths whose bandwidth is measured."""

from zero_nvme.io.io_queue import Options
from zero_nvme.tools.measure import measure_weights


def test_measured_weights_are_rates(tmp_path):
    """Fails if a folder gets no rate, or one that pattern_of() refuses."""
    rates = measure_weights([str(tmp_path)] * 2, Options("threads", direct=False), nbytes=1 << 20)
    assert len(rates) == 2 and min(rates) > 0
