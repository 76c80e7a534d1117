"""The advices of zero_deepspeed: which tests follow them. tests/advice.py says what the tables mean."""

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
    },
    "integration/zero_deepspeed/test_json_advice.py": {
        "test_what_a_refusal_says_to_write_trains": (
            ", and write bf16 or fp16",
            "is enabled, too: keep one of them",
            "did you mean {}? / leave it out",
        ),
        "test_a_file_is_given_by_its_path_without_comments": ("is there twice: keep one of them",),
        "test_auto_and_the_arguments_are_made_to_agree": ('make them agree, or write "auto"',),
        "test_the_caller_decides_when_step_updates": ("Earlier versions did not clip: for that, write 0",),
        "test_gradients_are_summed_by_a_loss_times_the_ranks": ("and multiply the loss by the number of ranks",),
    },
    "integration/zero_offload/test_activations.py": {
        "test_the_same_bits_under_every_policy": ("call zero_offload.offload_activations(model, policy=",),
    },
    "integration/zero_offload/test_peft.py": {
        "test_gradient_checkpointing_with_inputs_that_require_gradients": (
            "use model.gradient_checkpointing_enable() or torch.utils.checkpoint",
        ),
    },
    "unit/zero_deepspeed/test_engine.py": {
        "test_what_cannot_be_followed_is_refused_by_name": ("the engine has no {} any more: use {}",),
        "test_a_latest_that_cannot_be_written_is_told_and_the_checkpoint_stays": ("is complete, load it by its tag",),
    },
}

EXEMPT: dict[str, str] = {"load it with the DeepSpeed that wrote it": "it needs a DeepSpeed of another version"}
