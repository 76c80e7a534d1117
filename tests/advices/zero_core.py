"""The advices of zero_core: which tests follow them. tests/advice.py says what the tables mean."""

FOLLOWED: dict[str, dict[str, tuple[str, ...]]] = {
    "integration/zero_core/test_bad_input.py": {
        "test_parameters_that_a_float32_master_cannot_hold": ("or pass param_dtype=",),
        "test_a_sharded_module_is_not_compiled_to_torchscript": ("or script a plain model that loads",),
        "test_a_part_of_a_sharded_model_and_a_sharded_optimizer": (" on the whole ",),
        "test_a_model_that_is_not_sharded": ("is not sharded: call zero_core.shard(model, optimizer)",),
        "test_reduce_dtype_keeps_the_gradients_that_torch_has_with_grad_dtype": (
            "Pass reduce_dtype= to zero_core.shard for the dtype",
        ),
        "test_what_a_pass_refuses_is_called_after_it": (
            "zero_grad() inside backward: call it between steps",
            "sleep() inside forward or backward: call it between",
        ),
        "test_copying_and_pickling_are_refused_by_name": ("use zero_core.checkpoint.save, or model.state_dict()",),
        "test_a_parameter_made_over_a_sharded_one_is_refused": ("write nn.Parameter(p.detach().clone())",),
    },
    "integration/zero_core/test_between_stages.py": {
        "test_gradients_that_no_optimizer_had_are_not_lost": ("has them, or model.zero_grad(), before",),
        "test_an_adapter_that_was_merged_is_not_usable_and_unshard_keeps_what_was_removed": (
            "or call zero_core.unshard before",
        ),
        "test_a_module_that_was_removed_is_not_usable_and_says_so": ("Build their module anew",),
    },
    "integration/zero_core/test_carried_state.py": {
        "test_ranks_of_different_steps_are_told": (
            "ranks bring optimizers of different steps",
            "give shard() an optimizer that has not stepped",
        ),
    },
    "integration/zero_core/test_failed_shards.py": {
        "test_a_store_that_fails_to_attach_leaves_the_model_as_it_was": (
            "Build the model again before the next shard()",
        ),
    },
    "integration/zero_core/test_followed_advice.py": {
        "test_experts_in_groups_are_called_as_advised": ("flatten the tokens before they are called",),
        "test_a_store_is_given_all_that_is_called": ("give it all that zero_core.ShardStore has",),
        "test_options_that_are_not_read_are_saved_again_by_torch_or_left": (
            "make them numbers in its groups and save both with get_state_dict",
        ),
    },
    "integration/zero_core/test_forward_in_backward.py": {
        "test_a_backward_inside_of_a_forward_trains_as_plain_torch": (
            "Call zero_grad() before this forward, or backward() after it, or take the gradients",
        ),
    },
    "integration/zero_core/test_full_states.py": {
        "test_states_are_not_changed_in_silence": ("Write zeros to reset it",),
        "test_states_are_never_saved_in_part": ("training would go on with empty states. Load what",),
    },
    "integration/zero_core/test_full_values.py": {
        "test_names_and_shapes_are_checked": (
            "is in .steps of its unit",
            "give real numbers for the whole parameter, on every",
        ),
        "test_what_is_not_there_is_none_or_refused": ("call optimizer.zero_grad() after each step()",),
    },
    "integration/zero_core/test_leaves.py": {
        "test_a_gradient_itself_does_not_become_a_leaf": ("Clone it first, p.grad.clone()",),
    },
    "integration/zero_core/test_machines.py": {
        "test_secondary_shards_need_machines_of_several_ranks": ("keeps gathers inside of its shard groups by itself",),
    },
    "integration/zero_core/test_one_thread.py": {
        "test_a_forked_process_is_told_so": ("or run it in the training process",),
        "test_threads_that_take_turns_train_as_one": ("with one threading.Lock around forward, backward",),
    },
    "integration/zero_core/test_parts.py": {
        "test_a_linear_that_would_be_repacked_in_eval_mode_is_refused": (
            "Before the forward, set support_avx512bf16_for_cpu",
        ),
    },
    "integration/zero_hf/test_images_on_some_ranks.py": {
        "test_a_blank_image_behind_a_row_trains_as_ddp_does_without": ("give them a blank input: after the end of",),
    },
    "integration/zero_core/test_second_stage.py": {
        "test_what_belongs_to_the_first_stage_says_that_it_is_over": (
            "step a plain optimizer, and run",
            "use the optimizer that the last shard() returned",
        ),
        "test_a_model_in_use_is_not_taken": ("inside forward or backward: call it between steps",),
        "test_without_room_for_the_whole_model_it_stays_in_its_shards": (
            "with more room, or leave the model in its shards",
        ),
    },
    "integration/zero_core/test_shared_memory.py": {
        "test_the_advice_against_shared_memory_works": (
            "or let the other show its values without a gradient",
            "assign one parameter to both",
        ),
    },
    "integration/zero_core/test_stacked_experts_life.py": {
        "test_hooks_and_memory_in_common_are_refused_with_the_way_out": (
            "or pass expert_bytes=None to zero_core.shard, which",
            "a hook on {}, whose experts are computed",
            "has hooks for its gradient, which arrives",
        ),
    },
    "integration/zero_core/test_state_dicts.py": {
        "test_a_state_dict_that_is_taken_while_parameters_have_memory_stays": (
            "write into the parameter itself, or load_state_dict",
        ),
    },
    "integration/zero_core/test_stock_clipping.py": {
        "test_an_old_gradient_and_an_old_norm_are_refused": ("Ask for p.grad again after backward(), or keep",),
        "test_views_of_a_gradient_are_kept_or_refused": (
            "which has no memory: use zero_core.full_gradient",
            "would be lost: write p.grad.copy_(tensor)",
        ),
    },
    "integration/zero_core/test_trained_only.py": {
        "test_a_part_of_a_sharded_model_is_saved": ("sharded models: save each apart",),
    },
    "integration/zero_core/test_transforms.py": {
        "test_a_write_into_what_a_transform_is_given_is_refused": ("Give the transform copies, {name:",),
    },
    "integration/zero_core/test_writes.py": {
        "test_views_of_every_kind_write_through": ("write into the view with copy_(tensor)",),
    },
    "integration/zero_offload/test_contracts.py": {
        "test_states_that_no_store_keeps_are_refused": ("take options with which it keeps no other states",),
        "test_a_step_that_shows_that_the_word_was_wrong_is_an_error": (
            "Use an optimizer whose contract is, or an elementwise one",
        ),
        "test_the_contract_together_is_refused_on_a_tier_whoever_says_so": (
            "steps its parameters together, as its contract says",
        ),
        "test_update_in_backward_is_refused": ("update_in_backward=True with {}, which is not elementwise",),
    },
    "integration/zero_offload/test_durable.py": {
        "test_advice_about_durable_runs_works": ("leave such parameters out with trained_only=True, or",),
        "test_a_rank_without_its_slab_is_told": ("load a checkpoint, after removing the slabs of all",),
    },
    "integration/zero_offload/test_muon_refused.py": {
        "test_joint_optimizers_that_cannot_be_are_refused": ("give it torch.optim.Optimizers, each over",),
    },
    "integration/zero_offload/test_own_muon.py": {
        "test_what_it_cannot_do_is_refused": ("Muon with {}={}: choose one of {}",),
    },
    "integration/zero_offload/test_sleep.py": {
        "test_what_one_rank_cannot_do_no_rank_does": ("not on this one: see their errors",),
    },
    "unit/test_followed_advice.py": {
        "test_states_are_saved_by_the_calls_that_an_error_names": ("checkpoint.save(folder, model, optimizer) writes",),
    },
    "unit/zero_core/test_checkpoint.py": {
        "test_a_bare_state_dict_needs_only_its_key": ("pass model_key= and optimizer_key=",),
        "test_a_checkpoint_of_a_later_format_is_refused_and_loaded_by_the_release_that_wrote_it": (
            "load it with the release that wrote it",
        ),
    },
    "unit/zero_core/test_elementwise.py": {
        "test_states_of_other_shapes_are_refused_of_an_elementwise_one_and_kept_of_one_by_itself": (
            "an elementwise optimizer keeps tensors of the parameter's shape",
        ),
    },
    "unit/zero_core/test_init.py": {
        "test_values_read_from_a_real_tensor_are_those_it_had": (
            "give it a copy, or build this part of the model outside",
        ),
    },
    "unit/zero_core/test_options.py": {
        "test_a_parameter_that_stops_or_gets_other_options_later_trains_as_advised": (
            "Put them back. A parameter whose options change later",
        ),
    },
    "unit/zero_core/test_pretrained.py": {
        "test_misfits_are_reported_by_name": ("pass rename= where names differ, or strict=False",),
    },
    "unit/zero_core/test_safetensors.py": {
        "test_a_file_cut_short_is_named": ("the file at {}; fetch it again",),
        "test_an_incomplete_index_names_what_is_absent": ("fetch them",),
    },
    "unit/zero_core/test_save_pretrained_full_disk.py": {
        "test_a_full_disk_is_told_with_figures_and_leaves_what_was_there": ("make room, or name another folder",),
    },
}

EXEMPT: dict[str, str] = {
    "the link to its machine is cut. End all ranks": "all processes end; others load the checkpoint",
    "{} after Ctrl-C inside of a hook of": "all processes end; others load the checkpoint",
    "and the process group ({}) {}: start it with": "needs a second kind of device",
    "parameters on {}: move the model to one device": "needs a second device",
    "faulty, restore a checkpoint": "a drive that returns wrong bytes is replaced, not configured",
}
