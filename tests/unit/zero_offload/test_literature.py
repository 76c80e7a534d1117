"""The planner against what the ZeRO papers report to fit, and not to fit. Fails if a byte per parameter is miscounted.

Sources: ZeRO-Offload (Ren et al. 2021) for 13 B on one V100; ZeRO-3 Offload for 40 B on one, 1 T on 256, 2 T on 512;
ZeRO-Infinity (Rajbhandari et al. 2021), for 32 T on 512 with nvme and 1 T on one DGX-2.
"""

import pytest

from tests.unit.zero_offload.sizes import transformer
from zero_offload.planning.hardware import Hardware
from zero_offload.planning.model_sizes import ModelSizes
from zero_offload.planning.planner import PlanError, plan

pytestmark = pytest.mark.promise("literature-figures")

V100 = Hardware(name="one V100", device="cuda", device_gib=32, host_gib=1536)


def dgx2(ranks: int, nvme_gib: float = 0) -> Hardware:
    return Hardware(
        name=f"{ranks} V100",
        device="cuda",
        nodes=ranks // 16,
        ranks_per_node=16,
        device_gib=32,
        host_gib=1536,
        nvme_gib=nvme_gib,
    )


NVME_28TB = 28e12 / 2**30


def model(layers: int, hidden: int, tiles: int = 1) -> ModelSizes:
    return transformer(layers=layers, hidden_size=hidden, vocab_size=50257, sequence_length=1024, tiles=tiles)


B13, B18, B40 = model(65, 4096), model(90, 4096), model(50, 8192)
T1, T2, T5 = model(128, 25600, 16), model(160, 32256, 32), model(174, 48 * 1024, 64)
T30, T100 = model(315, 88 * 1024, 64), model(500, 126 * 1024, 128)


def test_40b_fits_on_one_v100_with_host_memory():
    found = plan(B40, V100, tokens=1024)
    assert found.bytes_of("host", "optimizer") > 400e9
    assert found.bytes_of("nvme", "optimizer") == 0


def test_30t_fits_on_512_with_nvme_and_100t_does_not():
    found = plan(T30, dgx2(512, NVME_28TB), tokens=1024)
    assert found.total("nvme") <= 28e12 / 16
    with pytest.raises(PlanError) as raised:
        plan(T100, dgx2(512, NVME_28TB), tokens=1024)
    assert raised.value.tier == "nvme"
