"""The advices of zero_offload: which tests follow them. tests/advice.py says what the tables mean."""

from __future__ import annotations

_HERE = "integration/zero_offload/test_followed_advice.py::"
_WAYS = "integration/zero_offload/test_followed_ways_out.py::"
_DURABLE = "integration/zero_offload/test_durable.py::test_advice_about_durable_runs_works"
_KEPT = "integration/zero_offload/test_durable_checkpoints.py::"

_MUON = "integration/zero_offload/test_muon_refused.py::"
_SOAP = "integration/zero_offload/test_soap.py::"

FOLLOWED: dict[str, str] = {
    "give ByteStores whose alignment divides": _MUON
    + "test_a_tier_whose_blocks_are_larger_than_a_matrix_begins_at_is_refused",
    "let the first step make all states, or leave store": _MUON
    + "test_states_that_a_tier_would_keep_otherwise_are_refused",
    "than the one given: give it the options that": _SOAP + "test_a_durable_run_goes_on_and_becomes_a_checkpoint",
    "Make one of them, with a group for each rate": _MUON + "test_two_elementwise_optimizers_are_refused_on_tiers",
    "give the parameter to the optimizer with which the": _MUON
    + "test_a_state_that_another_optimizer_keeps_is_refused",
    "give these to an AdamW of their own, and both": _MUON
    + "test_an_optimizer_that_needs_only_some_parameters_whole_is_refused_on_tiers",
    "leave it out, or plan for a Hardware with such": "unit/zero_offload/test_planner.py::"
    "test_secondary_shards_take_a_part_of_the_model_and_no_network_after_a_steps_first_gather",
    "others have a part; give it a slab of its own": _DURABLE,
    "or write a checkpoint of it with": _KEPT + "test_a_run_goes_on_in_other_tiles",
    "give the step and the optimizer that the run had": _KEPT + "test_slabs_of_ranks_are_one_checkpoint",
    "of a run on {} shard ranks: give each once": _KEPT + "test_slabs_of_ranks_are_one_checkpoint",
    "call wait() of what save() returned, or": _KEPT + "test_a_checkpoint_in_the_background_fails_alone",
    'place parameters and optimizer on "host" or "{}"': _DURABLE,
    "give a named one, such as zero_nvme.Slab(": _DURABLE,
    "start it as it was, give the slab another name, remove": _DURABLE,
    "give the figure, or leave it out": _HERE + "test_arguments_that_an_error_names_pass",
    "has keys of its own, such as": _HERE + "test_arguments_that_an_error_names_pass",
    "give the rows of one micro-batch as well": _HERE + "test_arguments_that_an_error_names_pass",
    "only units that are recomputed compute some {} at a time": _HERE + "test_arguments_that_an_error_names_pass",
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
    "; or set host_bytes={}, which the host has": "unit/zero_train/test_planning.py::"
    "test_memory_that_offload_host_bytes_withholds_is_offered",
    "Use it there, or attach another store here": "unit/zero_offload/test_faults.py::"
    "test_a_forked_child_that_uses_the_store_is_told_so",
    "put more on nvme, take fewer slots": _WAYS + "test_memory_that_the_machine_refuses_is_made_less",
    "may have one of its own: put more on nvme": _WAYS + "test_memory_that_the_machine_refuses_is_made_less",
    "make room there, or give sleep(to=) another": _WAYS + "test_a_store_sleeps_where_there_is_room",
    "raise capacity_gib, or place less here": _WAYS + "test_a_full_compressed_store_gets_more_room_or_less",
    "close() of one of them gives its bytes back": _WAYS + "test_a_shared_budget_is_given_back",
    "close the optimizer, free threads": _WAYS + "test_a_thread_that_cannot_be_started_is_made_room_for",
    "check the device and its free space": _WAYS + "test_a_transfer_that_fails_is_resumed_from_the_last_checkpoint",
    "wants a unit slot and all": _WAYS + "test_units_that_a_graph_holds_get_slots_or_are_on_the_host",
    "or round the values first": "integration/zero_offload/test_full_values.py::"
    "test_sixteen_bit_gradients_take_fp32_values_where_there_is_room",
    "lower it with {}{}": "unit/zero_train/test_planning.py::"
    "test_what_a_plan_that_does_not_fit_names_are_keys_that_help",
    "out of memory on the {} tier: {}; lower it with {}": "unit/zero_offload/test_advice.py::"
    "test_each_way_out_takes_bytes_from_the_tier_when_it_is_followed",
    "bring an UpdateStep that knows it": _HERE
    + "test_a_step_that_does_not_know_the_optimizer_is_changed_for_one_that_does",
    "call optimizer.zero_grad() and repeat the step's": "unit/zero_offload/test_endings.py::"
    "test_ctrl_c_while_gradients_are_added_loses_no_slot",
}

EXEMPT: dict[str, str] = {
    "use the version that wrote them, or remove the slab": "there is no other version yet",
    "may be lost; remove the slab, and load a": "needs a start of the machine; removing is followed above",
    "was written; remove the slab, and load a": "needs damage that no crash leaves; removing is followed above",
    "remove all of them, or load a checkpoint": "needs a second damage, of the manifest before the last",
    "a device that torch has streams for, not on {}; leave": "needs a device without streams, such as mps",
    "so its memory is not given back. End the process": "ends the process that would follow it",
}
