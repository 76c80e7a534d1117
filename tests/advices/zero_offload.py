"""The advices of zero_offload: which tests follow them. tests/advice.py says what the tables mean."""

FOLLOWED: dict[str, dict[str, tuple[str, ...]]] = {
    "integration/zero_offload/test_durable.py": {
        "test_advice_about_durable_runs_works": ('place parameters and optimizer on "host" or "{}"',),
    },
    "integration/zero_offload/test_durable_checkpoints.py": {
        "test_slabs_of_ranks_are_one_checkpoint": ("slabs given are of ranks {}: give the slab of each rank once",),
        "test_a_checkpoint_in_the_background_fails_alone": ("call wait() of what save() returned, or",),
    },
    "integration/zero_offload/test_followed_advice.py": {
        "test_arguments_that_an_error_names_pass": (
            "has keys of its own, such as",
            "only units that are recomputed compute some {} at a time",
        ),
        "test_a_tier_gets_the_room_that_a_plan_asks_for": ("give it more room (hardware.tiers",),
        "test_a_step_that_does_not_know_the_optimizer_is_changed_for_one_that_does": (
            "pass step= an UpdateStep that supports it",
        ),
    },
    "integration/zero_offload/test_full_values.py": {
        "test_sixteen_bit_gradients_take_fp32_values_where_there_is_room": ("or round the values first",),
    },
    "integration/zero_offload/test_muon_refused.py": {
        "test_a_tier_whose_blocks_are_larger_than_a_matrix_begins_at_is_refused": (
            "give ByteStores whose alignment divides",
        ),
        "test_two_elementwise_optimizers_are_refused_on_tiers": (
            "Merge the elementwise ones into one, with a group for each rate",
        ),
        "test_a_state_that_another_optimizer_keeps_is_refused": ("give the parameter to the optimizer with which the",),
    },
    "integration/zero_offload/test_soap.py": {
        "test_a_durable_run_goes_on_and_becomes_a_checkpoint": ("than the one given: give it the options that",),
    },
    "unit/test_followed_advice.py": {
        "test_gradients_that_accumulate_get_the_memory_that_an_error_asks_for": (
            "a second gradient of {} before step()",
        ),
        "test_an_option_without_an_update_is_left_off": ("TorchStep cannot do",),
        "test_a_byte_store_in_memory_gets_the_room_that_an_error_asks_for": ("raise capacity_bytes",),
    },
    "unit/zero_offload/test_endings.py": {
        "test_ctrl_c_while_gradients_are_added_loses_no_slot": ("call optimizer.zero_grad() and repeat the step's",),
    },
    "unit/zero_offload/test_faults.py": {
        "test_a_forked_child_that_uses_the_store_is_told_so": ("Use it there, or attach another store here",),
    },
    "unit/zero_train/test_planning.py": {
        "test_memory_that_offload_host_bytes_withholds_is_offered": ("; or set host_bytes={}, which the host has",),
    },
}

EXEMPT: dict[str, str] = {
    "use the version that wrote them, or remove the slab": "there is no other version yet",
    "may be lost; remove the slab, and load a": "needs a start of the machine; removing is followed above",
    "of its manifest is wrong; remove the slab": "needs damage that no crash leaves; removing is followed above",
    "remove all of them, or load a checkpoint": "needs a second damage, of the manifest before the last",
    "a device that torch has streams for, not on {}; leave": "needs a device without streams, such as mps",
    "so its memory is not given back. End the process": "ends the process that would follow it",
}
