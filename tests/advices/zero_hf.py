"""The advices of zero_hf: which tests follow them. tests/advice.py says what the tables mean."""

from __future__ import annotations

_HERE = "integration/zero_hf/"
_ADVICE = _HERE + "test_followed_advice.py::"
_TRAINER = _HERE + "test_followed_trainer_advice.py::"
_MERGING = "unit/zero_hf/test_merging.py::"
_OVERRIDES = "unit/zero_hf/test_overrides.py::"
_DURABLE = _HERE + "test_trainer_durable_refused.py::"

_GROUPS = _HERE + "test_replicas.py::test_groups_that_cannot_be_are_refused_and_the_way_out_works"

_EIGHT_BITS = _HERE + "test_eight_bits.py::test_states_on_the_device_and_other_layouts_are_refused"

FOLLOWED: dict[str, str] = {
    'write optimizer: host (or offload: host), or optim="adamw_torch"': _EIGHT_BITS,
    'leave states out, or write optim="adamw_torch"': _EIGHT_BITS,
    "that each hold all shards, and {}: write replicas: 1": _GROUPS,
    "both say which ranks share shards: leave one out": _GROUPS,
    "start a multiple of {} ranks with torchrun": _GROUPS,
    "has no update on the host": _HERE
    + "test_trainer_use.py::test_the_optimizers_that_a_refusal_names_train_on_nvme_as_in_the_stock_trainer",
    "keep all on the device with offload: none": _HERE
    + "test_trainer_use.py::test_the_optimizers_that_a_refusal_names_train_on_nvme_as_in_the_stock_trainer",
    # settings
    "write activations: recompute, host or nvme": _ADVICE + "test_settings_that_an_error_names_train",
    "name a folder on your fastest drive": _ADVICE + "test_settings_that_an_error_names_train",
    "write optimizer: nvme, or activations: host": _ADVICE + "test_settings_that_an_error_names_train",
    "give a whole number of at least {}": _ADVICE + "test_settings_that_an_error_names_train",
    "give the path of a YAML or JSON file": _ADVICE + "test_settings_are_given_as_a_mapping_or_a_file",
    "write some, or {} to keep everything on the device": _ADVICE + "test_settings_are_given_as_a_mapping_or_a_file",
    "give a mapping, such as": _ADVICE + "test_settings_are_given_as_a_mapping_or_a_file",
    'pass loss_scale="dynamic" to zero_hf.shard': _ADVICE + "test_fp16_gets_a_loss_scale_or_becomes_bf16",
    "install it, or write offload: host": _ADVICE + "test_without_zero_nvme_states_are_on_the_host",
    "Name a folder on a mounted drive": _ADVICE + "test_a_folder_is_one_on_a_drive_that_is_mounted",
    "give the second stage of a model another output_dir": _HERE
    + "test_trainer_use.py::test_a_second_stage_needs_an_output_folder_of_its_own",
    "add --weights, or leave them out": _ADVICE + "test_safetensors_are_converted_with_a_dtype",
    # steps on disk
    "name a folder on a disk with nvme_paths": _DURABLE + "test_settings_that_keep_nothing_are_refused",
    "resume_from_checkpoint out to go on after that step": _DURABLE + "test_another_checkpoint_is_refused",
    "set them back, name another output_dir": _DURABLE
    + "test_another_run_in_the_same_folder_is_refused_and_the_steps_stay",
    "and its checkpoints where it has any, to begin anew": _DURABLE + "test_the_files_that_are_named_may_be_removed",
    "give the Trainer the model": _DURABLE + "test_what_does_not_go_with_it_is_refused",
    "give the Trainer its train_dataset when it is built": _DURABLE + "test_what_does_not_go_with_it_is_refused",
    "in a loop, zero_hf.shard(slab_name=...)": _DURABLE + "test_a_loop_gives_the_files_a_name",
    # models
    "the model is sharded instead: leave it out": _ADVICE + "test_arguments_that_distribute_are_left_out",
    "zero_hf distributes the model: leave it out": _ADVICE + "test_arguments_that_distribute_are_left_out",
    "load a quantised model with transformers": _ADVICE
    + "test_a_quantised_model_is_loaded_with_transformers_and_sharded_then",
    "leave the layer as it is, and name it in llm_int8_skip_modules": "integration/zero_hf/test_four_bit_experts.py::"
    "test_layers_that_are_left_out_stay_as_they_are_and_a_new_one_is_not_quantised",
    "holds quantised weights: load them": _ADVICE
    + "test_a_quantised_model_is_loaded_with_transformers_and_sharded_then",
    "once, then zero_core.save_pretrained(model, another_folder)": _ADVICE + "test_a_model_in_a_pickle_is_saved_again",
    "and other files are read whole: call": _ADVICE + "test_a_model_in_a_pickle_is_saved_again",
    "fetch it with huggingface_hub.snapshot_download": _ADVICE + "test_a_model_of_the_hub_is_fetched",
    "give a floating-point torch.dtype, its name, or 'auto'": _HERE
    + "test_from_pretrained.py::test_the_dtype_is_the_files_the_configs_or_the_one_given",
    "Give the config that fits, or ignore_mismatched_sizes=True": _ADVICE
    + "test_the_config_that_fits_is_given_or_mismatched_sizes_are_ignored",
    "pass tie_word_embeddings=False": _HERE + "test_from_pretrained.py::test_two_values_for_tied_weights_are_refused",
    "Train the model before you use it": _ADVICE + "test_a_head_that_is_new_is_trained",
    "name the folder of the model that the adapter was trained beside": _MERGING
    + "test_the_folders_that_errors_name_are_merged",
    "has files already: name a new folder": _MERGING + "test_the_folders_that_errors_name_are_merged",
    "save the adapter with save_pretrained": _MERGING + "test_the_folders_that_errors_name_are_merged",
    "save the adapter with PEFT's path_initial_model_for_weight_conversion": _MERGING
    + "test_a_beginning_that_changes_the_base_is_refused_and_each_way_out_merges",
    "load base and adapter with PEFT, and call merge_and_unload()": _MERGING
    + "test_what_is_not_merged_here_is_merged_by_peft_as_the_error_says",
    # Trainers
    "train with bf16=True, or load the model in bfloat16": _HERE
    + "test_trainer_losses.py::test_bf16_stays_within_a_hundredth_of_the_stock_trainer",
    "override them in a subclass of a sharded class": _OVERRIDES
    + "test_what_overrides_a_sharded_class_runs_as_in_the_stock_trainer",
    "; or leave durable out": _OVERRIDES + "test_random_states_of_ones_own_are_refused_with_durable_alone",
    "sharded Trainers use this name themselves: give yours another one": _OVERRIDES
    + "test_a_name_that_sharded_trainers_use_is_refused_and_another_one_is_not",
    "leave use_adaptive_entropy out: entropy_coef stays": "unit/zero_hf/test_trl.py::"
    "test_adaptive_entropy_is_refused_because_its_coefficient_would_not_be_resumed",
    "give zero= with the Trainer class": _TRAINER + "test_a_trainer_class_and_a_class_of_arguments_are_given",
    "give it transformers.Trainer or a subclass of it": _TRAINER
    + "test_a_trainer_class_and_a_class_of_arguments_are_given",
    "both recompute blocks: write activation_checkpointing=False": _TRAINER + "test_either_of_two_recomputes_blocks",
    "launch it with torchrun, or with accelerate launch --multi_gpu": _HERE
    + "test_trainer_example.py::test_torchrun_runs_it",
    "pip install zero-deepspeed": "unit/zero_hf/test_commands.py::"
    "test_without_zero_deepspeed_a_command_says_what_to_install",
    "both say stage and tiers: leave one out": _TRAINER + "test_one_of_zero_and_deepspeed_is_left_out",
    "fp16.enabled=true of deepspeed= does not go": _HERE
    + "test_trainer_deepspeed.py::test_what_the_refusal_of_fp16_says_to_do_works",
    "give it one when it is built, or call train() before evaluate()": _TRAINER
    + "test_a_trainer_that_evaluates_first_has_a_dataset_or_trains_first",
    "deepspeed= names an optimizer: leave one of them out": _TRAINER + "test_one_of_two_optimizers_is_left_out",
    "resume from {}, which is complete": _TRAINER + "test_a_checkpoint_that_is_not_complete_is_deleted",
    "train without resume_from_checkpoint": _TRAINER + "test_a_checkpoint_that_is_not_complete_is_deleted",
    "write TrainingArguments = zero_hf.sharded(": _TRAINER
    + "test_a_file_of_deepspeed_is_given_to_arguments_that_follow_it_or_zero_is",
    "use bf16=True": _TRAINER + "test_bf16_takes_the_place_of_fp8",
    "load it without device_map": _TRAINER + "test_a_model_is_loaded_without_what_distributes_it",
    "load it without distributed_config": _TRAINER + "test_a_model_is_loaded_without_what_distributes_it",
    "prepare the same models in the same order": _TRAINER + "test_the_models_that_were_saved_are_prepared",
    "Delete this folder, and {}": _TRAINER + "test_a_checkpoint_that_is_not_complete_is_deleted",
    "evaluate with bf16=True, or load the model in bfloat16": _TRAINER
    + "test_evaluation_is_in_bf16_by_the_arguments_or_the_model",
    "FSDP shards the model itself: leave it out": _TRAINER + "test_an_argument_is_left_out",
    "ranks are data parallel here: leave it out": _TRAINER + "test_an_argument_is_left_out",
    "leave it out, and make output_dir a folder that all see": _TRAINER + "test_an_argument_is_left_out",
    "leave it out, and compile the blocks": _TRAINER + "test_blocks_are_compiled_in_place_of_the_model",
    "generate with transformers: leave it out": _HERE + "test_grpo.py::test_every_logged_number_is_the_stock_trainers",
    "Set it to True, which gathers the model while it generates": _HERE
    + "test_grpo.py::test_every_logged_number_is_the_stock_trainers",
    "it casts the model: leave it out": _HERE + "test_grpo.py::test_every_logged_number_is_the_stock_trainers",
    "load it with from_pretrained of transformers": _HERE
    + "test_dpo.py::test_every_logged_number_is_the_stock_trainers",
    # Accelerator
    "leave it out of the script and of `accelerate launch`": _TRAINER + "test_another_way_to_distribute_is_left_out",
    "both to one call, prepare(model, optimizer, ...), or prepare the optimizer": _TRAINER
    + "test_optimizers_are_made_and_prepared_as_an_error_says",
    "make an optimizer for each, or put the models into one": _TRAINER
    + "test_optimizers_are_made_and_prepared_as_an_error_says",
    "make one optimizer with a parameter group for each": _TRAINER
    + "test_optimizers_are_made_and_prepared_as_an_error_says",
    "train and evaluate with even batches": _TRAINER + "test_uneven_batches_are_made_even",
    "Load another checkpoint, and save each to a new folder": _TRAINER
    + "test_a_save_that_was_cut_short_is_left_for_another",
    "give a folder that save_state wrote": _TRAINER + "test_states_of_stock_accelerate_are_saved_as_safetensors",
    "mixed_precision='fp16' scales the loss": _TRAINER
    + "test_bf16_is_used_in_place_of_precisions_that_scale_or_replace",
    "mixed_precision='fp8' replaces modules": _TRAINER
    + "test_bf16_is_used_in_place_of_precisions_that_scale_or_replace",
}

EXEMPT: dict[str, str] = {
    "start a process for each of them, with torchrun": "needs two GPUs",
    "pip install 'transformers>=5.23,<6'": "installs another version of transformers",
}
