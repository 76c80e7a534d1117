"""The advices of zero_offload: which tests follow them. tests/advice.py says what the tables mean."""

from __future__ import annotations

_HERE = "integration/zero_offload/test_followed_advice.py::"

FOLLOWED: dict[str, str] = {
    "give the figure, or leave it out": _HERE + "test_arguments_that_an_error_names_pass",
    "has keys of its own, such as": _HERE + "test_arguments_that_an_error_names_pass",
    "give the rows of one micro-batch as well": _HERE + "test_arguments_that_an_error_names_pass",
    "only units that are recomputed compute some rows": _HERE + "test_arguments_that_an_error_names_pass",
    "activation policies for {} units; give one": _HERE + "test_arguments_that_an_error_names_pass",
    "is a tier already; give the ByteStore another name": _HERE + "test_arguments_that_an_error_names_pass",
    "give more nvme paths or room": _HERE + "test_a_tier_gets_the_room_that_a_plan_asks_for",
    "give it more room (hardware.tiers": _HERE + "test_a_tier_gets_the_room_that_a_plan_asks_for",
    "a TieredStore is attached once; make another": _HERE + "test_a_store_is_attached_once_and_is_awake",
    "the TieredStore sleeps: call zero_core.wake": _HERE + "test_a_store_is_attached_once_and_is_awake",
    "more than {} hold at ratio": _HERE + "test_a_compressed_store_gets_more_room",
    "CompressedByteStore needs zstandard": _HERE + "test_a_compressed_store_gets_more_room",
    "give both the same share of": _HERE + "test_shares_of_the_device_are_equal",
    "give parameters at least {}": _HERE + "test_shares_of_the_device_are_equal",
    "stages 0 to 2 keep every unit in memory": "test_stages_that_keep_units_get_room_for_them",
    "a second gradient of {} before step()": "test_gradients_that_accumulate_get_the_memory_that_an_error_asks_for",
    "or raise host_bytes": "test_the_arena_gets_the_bytes_that_are_missing",
    "the gradient norm's chunk; use": "test_a_tile_has_the_size_that_an_error_names",
    "TorchStep cannot do": "test_an_option_without_an_update_is_left_off",
    "raise capacity_bytes": "test_a_byte_store_in_memory_gets_the_room_that_an_error_asks_for",
    "for which the store has no memory. Give the optimizer": "unit/zero_offload/test_step_probe.py::"
    "test_the_advice_for_a_momentum_that_comes_later",
    "; or set host_bytes={}, which the host has": "unit/zero_train/test_planning.py::"
    "test_memory_that_offload_host_bytes_withholds_is_offered",
    "use one rank and a tile_numel that no unit exceeds": "unit/zero_offload/test_step_probe.py::"
    "test_a_step_that_uses_norms_of_segments_gets_whole_parameters_or_is_refused",
    "Use it there, or attach another store here": "unit/zero_offload/test_faults.py::"
    "test_a_forked_child_that_uses_the_store_is_told_so",
}

EXEMPT: dict[str, str] = {}

NOT_FOLLOWED: dict[str, int] = {
    "zero_offload/advice.py": 1,
    "zero_offload/arena.py": 2,
    "zero_offload/asleep.py": 1,
    "zero_offload/compressed_store.py": 1,
    "zero_offload/device.py": 1,
    "zero_offload/host_budget.py": 1,
    "zero_offload/monitor.py": 2,
    "zero_offload/planning/budgets.py": 1,
    "zero_offload/step_probe.py": 1,
    "zero_offload/streams.py": 1,
    "zero_offload/tier.py": 1,
    "zero_offload/tiles/gradients.py": 2,
    "zero_offload/tiles/parameters.py": 1,
    "zero_offload/torch_step.py": 1,
}
