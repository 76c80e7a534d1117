"""The advices of zero_deepspeed: which tests follow them. tests/advice.py says what the tables mean."""

from __future__ import annotations

FOLLOWED: dict[str, dict[str, tuple[str, ...]]] = {
    "integration/zero_core/test_loop.py": {
        "test_blocks_compiled_one_by_one": ("compile the blocks (for block in",),
    },
    "integration/zero_deepspeed/test_files_advice.py": {
        "test_the_weights_of_a_file_without_shapes_are_read_by_torch": ("without an optimizer. Its weights are",),
        "test_an_engine_loads_and_saves_in_the_ways_that_it_names": (
            "save zero_core.trained_state_dict(engine.module) instead",
        ),
        "test_the_weights_of_another_optimizer_are_loaded_or_the_same_optimizer_is_built": (
            "build it with the same (decoupled_weight_decay",
        ),
        "test_the_folder_and_the_tag_are_named": ("Name one with tag=",),
    },
    "integration/zero_deepspeed/test_json_advice.py": {
        "test_what_a_refusal_says_to_write_trains": (
            ", and write bf16 or fp16",
            "is enabled, too: keep one of them",
            "which reads whole gradients: write bf16",
            "take {}, or a class of torch",
            "at stage 3 only, and the stage is {}: write 1",
            "from stage {} on, and the stage is {}: change one of them",
        ),
        "test_the_ranks_and_batches_that_a_refusal_asks_for_are_given": ("MiCS is for stage 3, and the stage is {}",),
        "test_a_file_is_given_by_its_path_without_comments": ("is there twice: keep one of them",),
        "test_auto_and_the_arguments_are_made_to_agree": ('make them agree, or write "auto"',),
        "test_a_list_of_rates_has_one_for_each_group": ("groups: give one for each",),
        "test_what_the_script_does_instead_of_a_key_trains_as_without": (
            "call gc.disable() in the script",
            "call zero_offload.offload_activations(model, policy=",
        ),
        "test_gradients_are_summed_by_a_loss_times_the_ranks": ("and multiply the loss by the number of ranks",),
    },
    "unit/zero_deepspeed/test_engine.py": {
        "test_a_latest_that_cannot_be_written_is_told_and_the_checkpoint_stays": ("is complete, load it by its tag",),
    },
    "unit/zero_deepspeed/test_translation.py": {
        "test_a_share_of_the_parameters_stays_in_memory_where_their_number_is_known": (
            "a share here, which needs their number: pass model=",
        ),
        "test_mics_trains_as_all_ranks_together": ("and read the file for these ranks",),
    },
}

EXEMPT: dict[str, str] = {"load it with the DeepSpeed that wrote it": "it needs a DeepSpeed of another version"}
