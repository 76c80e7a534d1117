"""The advices of zero_hf: which tests follow them. tests/advice.py says what the tables mean."""

FOLLOWED: dict[str, dict[str, tuple[str, ...]]] = {
    "integration/zero_hf/test_dpo.py": {
        "test_every_logged_number_is_the_stock_trainers": ("load it with from_pretrained of transformers",),
    },
    "integration/zero_hf/test_eight_bits.py": {
        "test_states_on_the_device_and_other_layouts_are_refused": (
            'write optimizer: host (or offload: host), or optim="adamw_torch"',
        ),
    },
    "integration/zero_hf/test_followed_advice.py": {
        "test_settings_that_an_error_names_train": ("give a whole number of at least {}",),
        "test_a_quantised_model_is_loaded_with_transformers_and_sharded_then": ("holds quantised weights: load them",),
        "test_a_model_in_a_pickle_is_saved_again": (
            "once, then zero_core.save_pretrained(model, another_folder)",
            "and other files are read whole: call",
        ),
        "test_a_head_that_is_new_is_trained": ("Train the model before you use it",),
    },
    "integration/zero_hf/test_followed_trainer_advice.py": {
        "test_a_checkpoint_that_is_not_complete_is_deleted": ("resume from {}, which is complete",),
        "test_a_file_of_deepspeed_is_given_to_arguments_that_follow_it_or_zero_is": (
            "write TrainingArguments = zero_hf.sharded(",
        ),
        "test_bf16_takes_the_place_of_fp8": ("use bf16=True",),
        "test_a_model_is_loaded_without_what_distributes_it": ("load it without distributed_config",),
    },
    "integration/zero_hf/test_four_bit_experts.py": {
        "test_layers_that_are_left_out_stay_as_they_are_and_a_new_one_is_not_quantised": (
            "leave the layer as it is, and name it in llm_int8_skip_modules",
        ),
    },
    "integration/zero_hf/test_from_pretrained.py": {
        "test_the_dtype_is_the_files_the_configs_or_the_one_given": (
            "give a floating-point torch.dtype, its name, or 'auto'",
        ),
    },
    "integration/zero_hf/test_grpo.py": {
        "test_every_logged_number_is_the_stock_trainers": (
            "Set it to True, which gathers the model while it generates",
        ),
    },
    "integration/zero_hf/test_trainer_durable_refused.py": {
        "test_another_run_in_the_same_folder_is_refused_and_the_steps_stay": (
            "set them back, name another output_dir",
        ),
        "test_another_checkpoint_is_refused": ("resume_from_checkpoint out to continue after that step",),
    },
    "integration/zero_hf/test_trainer_example.py": {
        "test_torchrun_runs_it": ("launch it with torchrun, or with accelerate launch --multi_gpu",),
    },
    "integration/zero_hf/test_trainer_use.py": {
        "test_the_optimizers_that_a_refusal_names_train_on_nvme_as_in_the_stock_trainer": (
            "has no update on the host",
        ),
    },
    "unit/zero_hf/test_merging.py": {
        "test_the_folders_that_errors_name_are_merged": ("save the adapter with save_pretrained",),
    },
}

EXEMPT: dict[str, str] = {
    "start a process for each of them, with torchrun": "needs two GPUs",
    "pip install 'transformers>=5.23,<6'": "installs another version of transformers",
}
