"""`Hardware`: the shares of a node, and the dict form. Fails if a rank is promised what another one has too."""

import pytest

from zero_offload.planning.hardware import GB, GIB, Hardware, HardwareError


@pytest.mark.parametrize(
    ("ranks", "paths", "share"), [(1, 1, 1), (1, 4, 4), (4, 4, 1), (8, 4, 0.5), (3, 2, 0.5), (4, 6, 1)]
)
def test_the_worst_off_rank_sets_the_share_of_nvme(ranks, paths, share):
    node = Hardware(ranks_per_node=ranks, nvme_paths=paths, nvme_gib=100, nvme_read_gbps=6)
    assert node.paths_per_rank == share
    assert node.nvme_bytes == int(100 * share) * GIB
    assert node.rank_rate("nvme_read_gbps") == 6 * GB * share


@pytest.mark.promise("device-room")
def test_a_device_keeps_a_reserve_that_is_given_or_grows_with_its_memory():
    """2 GiB and 5 % where nothing is given: then a described card of 80 GiB is not planned to its edge."""
    card = Hardware(device="cuda", device_gib=80)
    assert card.device_bytes == 74 * GIB and card.reserved == "6.0 GiB: context and libraries 2, fragments 4"
    assert Hardware.from_dict(card.to_dict() | {"device_gib": 20}).device_bytes == 17 * GIB
    measured = Hardware(device="cuda", device_gib=80, device_reserved_gib={"context": 0.5, "fragments": 4})
    assert measured.device_bytes == 75.5 * GIB and measured.reserved == "4.5 GiB: context 0.5, fragments 4"
    assert Hardware.from_dict(measured.to_dict()) == measured
    assert Hardware(device="cuda", device_gib=80, device_reserved_gib=0).device_bytes == 80 * GIB
    assert Hardware(host_gib=24).device_bytes == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tiers": {"cold": {"gb": 8}}}, "tiers.cold has no key 'gb'; did you mean gib"),
        ({"tiers": {"cold": {"ratio": 0}}}, "tiers.cold.ratio is 0"),
        ({"tiers": {"nvme": {"gib": 8}}}, "tiers cannot describe 'nvme'; set fields of Hardware, such as nvme_gib"),
        ({"tiers": {"host": {}}}, "tiers cannot describe 'host'; set fields of Hardware, such as host_gib"),
        ({"host_gb": 24}, "no key 'host_gb'; did you mean host_gib"),
        ({"nodes": 0}, "nodes is 0, and must be a whole number of at least 1"),
        ({"nodes": 1.5}, "nodes is 1.5"),
        ({"host_gib": -1}, "host_gib is -1"),
        ({"device_reserved_gib": {"context": -1}}, "device_reserved_gib is -1"),
        ({"tflops": 0}, "tflops is 0, and must be above 0; leave it out"),
        ({"tflops": {"bf16": 0}}, r"tflops\.bf16 is 0"),
        ({"tflops": {"bfloat16": 1}}, "tflops has no format 'bfloat16'; known: fp32, bf16, fp16"),
        ({"tflops": "fast"}, "tflops is 'fast', and must be a finite number"),
        ({"host_gib": float("nan")}, "host_gib is nan"),
        ({"host_gib": None}, "host_gib is None"),
    ],
)
def test_what_cannot_be_is_refused_by_name(values, message):
    with pytest.raises(HardwareError, match=message):
        Hardware.from_dict(values)
