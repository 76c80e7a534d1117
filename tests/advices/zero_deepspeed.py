"""The advices of zero_deepspeed: which tests follow them. tests/advice.py says what the tables mean."""

from __future__ import annotations

JSON = "integration/zero_deepspeed/test_json_advice.py::"
FILES = "integration/zero_deepspeed/test_files_advice.py::"

FOLLOWED: dict[str, str] = {
    # ---- the keys of the JSON
    "call gc.disable() in the script": JSON + "test_garbage_is_collected_by_the_script_or_not_at_all",
    "DeepSpeed has removed it, too: leave it out": JSON + "test_the_keys_that_a_refusal_names_are_left_out",
    "all ranks are data parallel; leave it out": JSON + "test_the_keys_that_a_refusal_names_are_left_out",
    "parameters are sharded instead: leave it out": JSON + "test_the_keys_that_a_refusal_names_are_left_out",
    "experts are sharded like all parameters: leave it out": JSON + "test_the_keys_that_a_refusal_names_are_left_out",
    "leave it out, and do that in the data set": JSON + "test_the_keys_that_a_refusal_names_are_left_out",
    "weights are not quantised while training: leave it out": JSON + "test_the_keys_that_a_refusal_names_are_left_out",
    "checkpoints are written before save() returns: leave it out": JSON
    + "test_the_keys_that_a_refusal_names_are_left_out",
    "updates overlap the next forward exactly": JSON + "test_the_keys_that_a_refusal_names_are_left_out",
    "updates overlap exactly here": JSON + "test_the_keys_that_a_refusal_names_are_left_out",
    "masters are in fp32 here: leave it out": JSON + "test_the_keys_that_a_refusal_names_are_left_out",
    "leave it out, and save to a folder that all see": JSON + "test_the_keys_that_a_refusal_names_are_left_out",
    "without a point or an exponent": JSON + "test_what_a_refusal_says_to_write_trains",
    "write them out; a checkpoint loads at any": JSON + "test_what_a_refusal_says_to_write_trains",
    "NVIDIA's Apex is not here: write bf16 or fp16": JSON + "test_what_a_refusal_says_to_write_trains",
    "communication_data_type=bf16 halves their bytes": JSON + "test_what_a_refusal_says_to_write_trains",
    "is enabled, too: keep one of them": JSON + "test_what_a_refusal_says_to_write_trains",
    "which reads whole gradients: write bf16": JSON + "test_what_a_refusal_says_to_write_trains",
    "leave it out; autocast casts what torch lists": JSON + "test_what_a_refusal_says_to_write_trains",
    "enable bf16 or fp16, or leave it out": JSON + "test_what_a_refusal_says_to_write_trains",
    "says the same: keep one": JSON + "test_what_a_refusal_says_to_write_trains",
    "it is a section: give an object of keys": JSON + "test_what_a_refusal_says_to_write_trains",
    "did you mean {}? / : leave it out": JSON + "test_what_a_refusal_says_to_write_trains",
    "write gradient_clipping at the top of the file": JSON + "test_what_a_refusal_says_to_write_trains",
    "leave it out, or write true": JSON + "test_what_a_refusal_says_to_write_trains",
    "leave it out; states are in fp32": JSON + "test_what_a_refusal_says_to_write_trains",
    "take Adam, AdamW, Adagrad, Lion": JSON + "test_what_a_refusal_says_to_write_trains",
    "take {}, or a class of torch": JSON + "test_what_a_refusal_says_to_write_trains",
    "needs {}: write a value into params": JSON + "test_what_a_refusal_says_to_write_trains",
    "there are parameters: name the type": JSON + "test_what_a_refusal_says_to_write_trains",
    "at stage 3 only, and the stage is {}: write 1": JSON + "test_what_a_refusal_says_to_write_trains",
    "or write a value": JSON + "test_what_a_refusal_says_to_write_trains",
    "does not say for which: take AdamW": JSON + "test_the_optimizer_that_a_refusal_names_is_taken",
    "a rank has slices of them: take AdamW": JSON + "test_the_optimizer_that_a_refusal_names_is_taken",
    "compressed to one bit: take Adam": JSON + "test_the_optimizer_that_a_refusal_names_is_taken",
    "gradients are dense here: take Adam": JSON + "test_the_optimizer_that_a_refusal_names_is_taken",
    "a rank has slices: take AdamW": JSON + "test_the_optimizer_that_a_refusal_names_is_taken",
    "quantised in blocks: take AdamW": JSON + "test_the_optimizer_that_a_refusal_names_is_taken",
    "install zero-optim-cpu, or take AdamW": JSON + "test_lion_is_installed_or_another_taken",
    "Leave one of them out, or say the ranks with world_size=": JSON
    + "test_the_ranks_and_batches_that_a_refusal_asks_for_are_given",
    "take a divisor, or say the ranks": JSON + "test_the_ranks_and_batches_that_a_refusal_asks_for_are_given",
    "give the number of ranks, at least 1": JSON + "test_the_ranks_and_batches_that_a_refusal_asks_for_are_given",
    "Earlier versions did not clip: for that, write 0": JSON
    + "test_gradients_are_left_as_they_are_where_the_file_says_0",
    "give the path of a JSON file of DeepSpeed's": JSON + "test_a_file_is_given_by_its_path_without_comments",
    "is there twice: keep one of them": JSON + "test_a_file_is_given_by_its_path_without_comments",
    'make them agree, or write "auto"': JSON + "test_auto_and_the_arguments_are_made_to_agree",
    "pass num_training_steps= to from_deepspeed": JSON + "test_auto_and_the_arguments_are_made_to_agree",
    'nothing resolves "auto": write a value': JSON + "test_auto_and_the_arguments_are_made_to_agree",
    "name a folder on your fastest drive": JSON + "test_a_folder_for_nvme_is_named",
    'install it, or write "cpu"': JSON + "test_without_zero_nvme_or_a_drive_states_are_elsewhere",
    "groups: give one for each": JSON + "test_a_list_of_rates_has_one_for_each_group",
    "a share here, which needs their number: pass model=": "unit/zero_deepspeed/test_translation.py::"
    "test_a_share_of_the_parameters_stays_in_memory_where_their_number_is_known",
    "and read the file for these ranks": "unit/zero_deepspeed/test_translation.py::"
    "test_mics_trains_as_all_ranks_together",
    "leave it out, or load the weights alone": "unit/zero_deepspeed/test_engine.py::"
    "test_weights_alone_leave_counters_states_and_schedule_as_they_are",
    "give zero_core.shard your own collectives=": "conformance/zero_core/test_toy_collective.py::"
    "test_a_model_trains_near_the_dense_one",
    "load the base quantised, by bitsandbytes or torchao": "integration/zero_offload/test_quantised.py::"
    "test_lora_over_a_quantised_base_is_pefts_bit_for_bit",
    "at {} only, and the stage is {}: change one of them": JSON + "test_what_a_refusal_says_to_write_trains",
    "MiCS is for stage 3, and the stage is {}": JSON + "test_the_ranks_and_batches_that_a_refusal_asks_for_are_given",
    # ---- the script
    "generate inside zero_core.gathered(model)": JSON + "test_a_text_is_generated_inside_gathered",
    'the nearest is ZeroConfig(states="split_bf16m")': JSON + "test_states_that_take_less_room_are_named",
    "let the script call engine.set_gradient_accumulation_boundary(True)": JSON
    + "test_the_caller_decides_when_step_updates",
    "multiply the loss by the number of ranks": JSON + "test_gradients_are_summed_by_a_loss_times_the_ranks",
    "cast those that are floats yourself": JSON + "test_inputs_and_buffers_are_cast_before",
    "cast them before the model is sharded": JSON + "test_inputs_and_buffers_are_cast_before",
    'leave it out; ZeroConfig(states="split")': JSON + "test_states_that_take_less_room_are_named",
    "use model.gradient_checkpointing_enable() or torch.utils.checkpoint": JSON
    + "test_what_the_script_does_instead_of_a_key_trains_as_without",
    "call zero_offload.offload_activations(model, policy=": JSON
    + "test_what_the_script_does_instead_of_a_key_trains_as_without",
    "compile the blocks (for block in": "integration/zero_core/test_loop.py::test_blocks_compiled_one_by_one",
    "give an nn.Module": JSON + "test_initialize_gets_what_it_asks_for",
    "give config=, or args with deepspeed_config": JSON + "test_initialize_gets_what_it_asks_for",
    "config= and args.deepspeed_config: leave one of them out": JSON + "test_initialize_gets_what_it_asks_for",
    "without an optimizer: give initialize() one": JSON + "test_an_engine_without_an_optimizer_gets_one",
    "which divides the loss by it": JSON + "test_backward_step_and_no_sync_are_called_where_they_belong",
    "step() inside no_sync(): leave that block first": JSON
    + "test_backward_step_and_no_sync_are_called_where_they_belong",
    "leave it out, each backward then adds to the shards": JSON
    + "test_backward_step_and_no_sync_are_called_where_they_belong",
    "no_sync() inside no_sync(): leave the inner one out": JSON
    + "test_backward_step_and_no_sync_are_called_where_they_belong",
    "write train_micro_batch_size_per_gpu": JSON + "test_a_batch_size_is_written",
    "leave it out, initialize() shards it": JSON + "test_a_model_that_is_built_without_memory_is_loaded",
    "ranks are data parallel here, leave it out": JSON + "test_a_model_that_is_built_without_memory_is_loaded",
    "rank 0's values are kept here, write them there": JSON + "test_a_model_that_is_built_without_memory_is_loaded",
    "or build the model with zero_hf.from_pretrained": JSON + "test_a_model_that_is_built_without_memory_is_loaded",
    # ---- checkpoints
    'torch.load(path, weights_only=True)["module"]': FILES
    + "test_the_weights_of_a_file_without_shapes_are_read_by_torch",
    "Read the checkpoint that it was made of": FILES + "test_the_checkpoint_that_a_universal_one_was_made_of_is_read",
    "is complete, load it by its tag": "unit/zero_deepspeed/test_engine.py::"
    "test_a_latest_that_cannot_be_written_is_told_and_the_checkpoint_stays",
    "load such weights before initialize()": FILES + "test_an_engine_loads_and_saves_in_the_ways_that_it_names",
    "give a tag, or another folder": FILES + "test_an_engine_loads_and_saves_in_the_ways_that_it_names",
    "save zero_core.trained_state_dict(engine.module) instead": FILES
    + "test_an_engine_loads_and_saves_in_the_ways_that_it_names",
    "load the weights alone, without an optimizer": FILES
    + "test_the_weights_of_another_optimizer_are_loaded_or_the_same_optimizer_is_built",
    "build it with the same (decoupled_weight_decay": FILES
    + "test_the_weights_of_another_optimizer_are_loaded_or_the_same_optimizer_is_built",
    "name the folder of the model that was trained, or leave it out": FILES
    + "test_the_folder_of_the_model_is_named_or_left_out",
    "name the one that save_checkpoint was given": FILES + "test_the_folder_and_the_tag_are_named",
    "Name one with tag=": FILES + "test_the_folder_and_the_tag_are_named",
    "Remove those of the run that is not wanted": FILES + "test_files_of_the_other_run_are_removed",
    "Remove those of the larger run": FILES + "test_files_of_the_larger_run_are_removed",
    "copy them from where the ranks wrote them": FILES + "test_files_are_copied_to_one_folder",
    "Copy all files to one folder": FILES + "test_files_are_copied_to_one_folder",
    "Copy the folders of all ranks to one place": FILES + "test_swap_files_of_all_ranks_are_copied_to_one_place",
    "{} is damaged: {}: {}. Copy it anew": FILES + "test_a_damaged_file_is_copied_or_saved_anew",
    "is cut short or damaged": FILES + "test_a_damaged_file_is_copied_or_saved_anew",
    "longer than its record. Copy it anew": FILES + "test_a_damaged_file_is_copied_or_saved_anew",
    "Save the checkpoint anew with a current DeepSpeed": FILES + "test_a_damaged_file_is_copied_or_saved_anew",
    "zero-hf convert FOLDER OUT --inert module.Class": FILES
    + "test_a_class_of_the_clients_is_named_when_a_trainers_checkpoint_is_converted",
}

EXEMPT: dict[str, str] = {
    "muP's scaling is not here: build mup's": "mup is not installed; what it makes are torch's own Adam, AdamW and SGD",
    "load it with the DeepSpeed that wrote it": "it needs a DeepSpeed of another version",
    "gather the weights with DeepSpeed or Megatron": "it needs the tools of the other library",
    "save it with one group of all ranks": "DeepSpeed has to save it anew",
}
