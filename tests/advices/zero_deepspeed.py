"""The advices of zero_deepspeed: which tests follow them. tests/advice.py says what the tables mean."""

from __future__ import annotations

_JSON = "integration/zero_deepspeed/test_json_advice.py::"
_FILES = "integration/zero_deepspeed/test_files_advice.py::"
_UNIT = "unit/zero_deepspeed/"

# By test, the advices that it follows.
_BY_TEST: dict[str, tuple[str, ...]] = {
    # ---- the keys of the JSON
    _JSON + "test_the_keys_that_a_refusal_names_are_left_out": ("it is not followed here: leave it out",),
    _JSON + "test_what_a_refusal_says_to_write_trains": (
        ", and write bf16 or fp16",
        "is enabled, too: keep one of them",
        "says the same: keep one",
        "it is a section: give an object of keys",
        "did you mean {}? / leave it out",
        "write gradient_clipping at the top of the file",
        "take one of {}",
        "there are parameters: name the type",
        'nothing resolves "auto": write a value',
    ),
    _JSON + "test_lion_is_installed_or_another_taken": ("install zero-optim-cpu, or take AdamW",),
    _JSON + "test_the_ranks_and_batches_that_a_refusal_asks_for_are_given": (
        "Leave one of them out, or say the ranks with world_size=",
        "take stage 3 and a divisor of the ranks",
        "and read the file for these ranks",
        "give the number of ranks, at least 1",
    ),
    _JSON + "test_a_file_is_given_by_its_path_without_comments": (
        "give the path of a JSON file of DeepSpeed's",
        "is there twice: keep one of them",
    ),
    _JSON + "test_auto_and_the_arguments_are_made_to_agree": ('make them agree, or write "auto"',),
    _JSON + "test_states_on_nvme_need_a_folder_on_a_drive_and_zero_nvme": (
        "name a folder on your fastest drive",
        'install it, or write "cpu"',
    ),
    _JSON + "test_a_list_of_rates_has_one_for_each_group": ("groups: give one for each",),
    # ---- the script
    "integration/zero_core/test_loop.py::test_generation_of_unequal_length": (
        "generate inside zero_core.gathered(model)",
    ),
    "integration/zero_offload/test_peft.py::test_gradient_checkpointing_with_inputs_that_require_gradients": (
        "use model.gradient_checkpointing_enable() or torch.utils.checkpoint",
    ),
    "integration/zero_offload/test_activations.py::test_the_same_bits_under_every_policy": (
        "call zero_offload.offload_activations(model, policy=",
    ),
    _JSON + "test_the_caller_decides_when_step_updates": (
        "let the script call engine.set_gradient_accumulation_boundary(True)",
        "Earlier versions did not clip: for that, write 0",
    ),
    _JSON + "test_gradients_are_summed_by_a_loss_times_the_ranks": ("and multiply the loss by the number of ranks",),
    _JSON + "test_inputs_and_buffers_are_cast_before": (
        "and cast inputs that are floats yourself",
        "and cast buffers before the model is sharded",
    ),
    _UNIT + "test_translation.py::test_what_contradicts_itself_or_is_missing_is_refused": ("write log or linear",),
    "integration/zero_core/test_loop.py::test_blocks_compiled_one_by_one": ("compile the blocks (for block in",),
    _JSON + "test_initialize_gets_what_it_asks_for": (
        "give an nn.Module",
        "give either config=, or args with deepspeed_config",
        "there is no optimizer: give initialize() one",
        "write train_micro_batch_size_per_gpu",
    ),
    _JSON + "test_backward_and_no_sync_are_called_where_they_belong": (
        "which divides the loss by it",
        "leave it out, each backward then adds to the shards",
    ),
    _JSON + "test_a_model_that_is_built_without_memory_is_loaded": (
        "leave it out, initialize() shards it",
        "ranks are data parallel here, leave it out",
        "rank 0's values are kept here, write them there",
        "or build the model with zero_hf.from_pretrained",
    ),
    # ---- checkpoints
    _FILES + "test_the_weights_of_a_file_without_shapes_are_read_by_torch": ("without an optimizer. Its weights are",),
    _FILES + "test_the_checkpoint_that_a_universal_one_was_made_of_is_read": (
        "Read the checkpoint that it was made of",
    ),
    _UNIT + "test_engine.py::test_a_latest_that_cannot_be_written_is_told_and_the_checkpoint_stays": (
        "is complete, load it by its tag",
    ),
    _FILES + "test_an_engine_loads_and_saves_in_the_ways_that_it_names": (
        "load such weights before initialize()",
        "give a tag, or another folder",
        "save zero_core.trained_state_dict(engine.module) instead",
    ),
    _FILES + "test_the_weights_of_another_optimizer_are_loaded_or_the_same_optimizer_is_built": (
        "load the weights alone, without an optimizer",
        "build it with the same (decoupled_weight_decay",
    ),
    _UNIT + "test_checkpoint.py::test_the_scheduler_and_the_loss_scale_go_on": (
        "make the schedule with zero_deepspeed.schedules",
    ),
    _UNIT + "test_convert.py::test_weights_are_the_masters": (
        "name the folder of the model that was trained, or leave it out",
    ),
    _FILES + "test_the_folder_and_the_tag_are_named": ("Name the folder that save_checkpoint was given",),
    _FILES + "test_the_files_of_one_save_are_put_into_one_folder": ("Copy the files of all ranks to one folder",),
    _FILES + "test_swap_files_of_all_ranks_are_copied_to_one_place": ("Copy the folders of all ranks to one place",),
    _FILES + "test_a_damaged_file_is_copied_or_saved_anew": ("cut short, damaged or not as torch.save writes it",),
    _FILES + "test_a_class_of_the_clients_is_named_when_a_trainers_checkpoint_is_converted": (
        "zero-hf convert FOLDER OUT --inert module.Class",
    ),
}
FOLLOWED: dict[str, str] = {part: test for test, parts in _BY_TEST.items() for part in parts}

EXEMPT: dict[str, str] = {"load it with the DeepSpeed that wrote it": "it needs a DeepSpeed of another version"}
