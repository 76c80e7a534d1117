"""The advices of zero_core: which tests follow them. tests/advice.py says what the tables mean."""

from __future__ import annotations

_CONTRACTS = "integration/zero_offload/test_contracts.py"
# The parts of advices that each of these tests follows.
_FILES: dict[str, dict[str, tuple[str, ...]]] = {
    "integration/zero_core/test_averaging.py": {
        "test_a_step_with_the_averages_swapped_in_is_told_and_so_is_a_second_swap": (
            "the averages are swapped in: leave the with block first",
        ),
    },
    "integration/zero_core/test_bad_input.py": {
        "test_a_part_of_a_sharded_model_and_a_sharded_optimizer": (
            "is sharded already: build a new one for another model",
            "build it from model.parameters() of the model given",
            " on the whole ",
        ),
        "test_torchscript_modules_with_parameters_are_refused_by_name": ("and compile blocks with torch.compile",),
        "test_parameters_that_a_float32_master_cannot_hold": ("leave them to an optimizer of their own",),
        "test_values_of_a_quantised_dtype_are_dequantised_or_a_buffer": ("dequantise it, or keep it as a buffer",),
        "test_an_adapter_that_no_rank_averages_is_refused": ("or freeze it with requires_grad_(False), or run it",),
        "test_steps_and_checkpoints_inside_gathered_are_refused": ("back at its end: leave the with block first",),
        "test_a_model_that_is_not_sharded": (
            "has no sharded parameter: call zero_core.shard first",
            "is not sharded: call zero_core.shard(model, optimizer)",
        ),
        "test_a_plain_optimizer_inside_gathered_steps_gradients_that_were_given_to_it": (
            "or set p.grad yourself from torch.autograd.grad",
        ),
        "test_sparse_gradients_name_the_option": ("with sparse=False (nn.Embedding, nn.EmbeddingBag)",),
        "test_an_optimizer_that_torch_steps_in_backward_is_refused_by_name": (
            "Leave it out, and pass update_in_backward=True",
        ),
        "test_reduce_dtype_keeps_the_gradients_that_torch_has_with_grad_dtype": (
            "Pass reduce_dtype= to zero_core.shard for the dtype",
        ),
        "test_a_gradient_is_not_zeroed_in_place": ("call optimizer.zero_grad(), which forgets it",),
        "test_a_grad_scaler_is_told_about_loss_scale": ("leave the GradScaler out",),
        "test_what_a_pass_refuses_is_called_after_it": (
            "{} inside forward or backward: call it after loss.backward()",
            "step() inside forward or backward: call it after",
            "zero_grad() inside backward: call it between steps",
            "sleep() inside forward or backward: call it between",
        ),
        "test_updates_in_backward_refuse_what_they_cannot_honour": (
            "use outside of its module. Leave update_in_backward",
        ),
        "test_add_param_group_is_refused_with_the_reason": ("put the parameters in a group now and set",),
        "test_copying_and_pickling_are_refused_by_name": (
            "Copy it before zero_core.shard; to keep",
            "copy the model before zero_core.shard, or its",
            "use zero_core.checkpoint.save, or model.state_dict()",
        ),
        "test_a_moved_or_cast_model": (
            "move or cast the model before zero_core.shard",
            "do it before, write values inside zero_core.gathered",
        ),
        "test_a_parameter_that_a_forward_changes": ("shard again a model built anew",),
        "test_a_parameter_made_over_a_sharded_one_is_refused": ("write nn.Parameter(p.detach().clone())",),
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
    "integration/zero_core/test_first_values.py": {
        "test_ranks_with_different_seeds_are_told": ("call torch.manual_seed with one seed on every rank",),
    },
    "integration/zero_core/test_followed_advice.py": {
        "test_experts_in_groups_are_called_as_advised": (
            "flatten the tokens before they are called",
            "give slots that are not used an index of",
        ),
        "test_a_deferred_model_is_written_inside_the_context_or_after_shard": (
            "were written after deferred_init() was left, which",
        ),
        "test_a_model_on_meta_is_built_inside_the_context": (
            "build the model inside `with zero_core.deferred_init():`",
            "is on the meta device; build the model in",
        ),
        "test_a_table_is_initialised_where_it_is_built_or_by_load_pretrained": (
            "or give it values with load_pretrained before shard()",
        ),
        "test_a_meta_tensor_is_made_inside": ("meta tensor made outside deferred_init(); make it inside",),
        "test_bitsandbytes_weights_are_quantised_before_shard": (
            'call model.to("cpu"), or .to(device), before zero_core.shard',
        ),
        "test_an_optimizer_that_memory_does_not_know_is_given_as_a_number_or_a_name": (
            "give its number of fp32 states, or one of",
        ),
        "test_a_model_is_sharded_before_it_loads_or_read_by_torch": (
            "is not sharded; call zero_core.shard first (any stage)",
        ),
        "test_a_file_that_is_lost_or_cut_is_copied_anew": (
            "the manifest lists it: copy it anew",
            "the manifest lists {}: copy it anew",
        ),
        "test_a_store_is_given_all_that_is_called": ("give it all that zero_core.ShardStore has",),
        "test_groups_of_another_library_are_those_that_were_saved": (
            "build the optimizer with the groups it was saved with",
        ),
        "test_options_that_are_not_read_are_saved_again_by_torch_or_left": (
            "read it with torch.distributed.checkpoint into a plain model and its optimizer",
            "make them numbers in its groups and save both with get_state_dict",
            "save both with get_state_dict",
        ),
        "test_a_folder_of_pickles_is_saved_again_by_transformers": ("holds no *.safetensors ({}); load the model",),
        "test_parameters_that_are_looked_up_become_a_group": ("group of their own, with an option in param_groups",),
        "test_a_loss_that_overflows_in_fp16_is_trained_in_bf16": ("that is not finite, or train in bf16",),
        "test_each_shard_gets_a_device_store_of_its_own": ("make a new DeviceStore for each zero_core.shard",),
        "test_a_store_that_cannot_sleep_or_wake_gets_what_it_lacks": (
            "make room, or give sleep(to=) another ByteStore",
            "call wake() again when the cause is gone",
            "call zero_core.wake(model), or wake() of the store",
        ),
        "test_a_gradient_is_read_from_a_store_after_a_backward": ("none to read or write: run a backward first",),
        "test_a_state_is_written_with_the_options_that_keep_it": ("the options with which the values were saved",),
        "test_a_model_that_was_updated_by_half_is_loaded_from_a_checkpoint": (
            "Build the model and its optimizer anew, and load",
        ),
        "test_a_pretrained_model_is_built_from_its_config": ("with which every rank reads its slices only",),
        "test_a_deferred_model_is_moved_cast_and_run_after_the_context": (
            "move, cast or run the model after the context",
        ),
        "test_what_was_saved_alone_is_loaded_alone": (
            "load it with scheduler=None",
            "it was saved without its optimizer; load it without one",
        ),
    },
    "integration/zero_core/test_forward_in_backward.py": {
        "test_a_backward_inside_of_a_forward_trains_as_plain_torch": (
            "Call zero_grad() before this forward, or backward() after it, or take the gradients",
        ),
        "test_updates_in_backward_train_as_plain_torch_or_refuse_a_later_use": (
            "than the forward did. Leave update_in_backward out",
        ),
    },
    "integration/zero_core/test_full_states.py": {
        "test_states_are_not_changed_in_silence": ("writes a state, zeros to begin anew",),
        "test_states_are_never_saved_in_part": ("training would go on with empty states. Load what",),
        "test_masters_of_16_bit_parameters_keep_their_bits": ("load the weights first, with model.load_state_dict",),
    },
    "integration/zero_core/test_full_values.py": {
        "test_what_is_frozen_or_in_no_group": ("backward: give it to the optimizer before",),
        "test_what_is_not_there_is_none_or_refused": ("call optimizer.zero_grad() after each step()",),
        "test_update_in_backward_leaves_no_gradient": ("leave that out, or change the gradient in parameter",),
        "test_calls_at_the_wrong_time_or_of_the_wrong_tensor": ("give it one of model.parameters() after zero_core",),
        "test_names_and_shapes_are_checked": ("give real numbers for the whole parameter, on every",),
    },
    "integration/zero_core/test_leaves.py": {
        "test_a_gradient_itself_does_not_become_a_leaf": ("Clone it first, p.grad.clone()",),
    },
    "integration/zero_core/test_leftover_gradients.py": {
        "test_what_a_backward_left_half_done_is_refused_at_the_step": ("and repeat the backwards of this step",),
    },
    "integration/zero_core/test_loop.py": {
        "test_a_mesh_has_one_dimension_or_two_and_a_stage_that_takes_it": (
            "or two (replicate, shard) with stage 1, 2 or 3",
        ),
        "test_a_compiled_step_is_run_as_it_is": ("leave fullgraph=True out, or call step() outside",),
        "test_blocks_compiled_one_by_one": ("leave fullgraph=True out, or compile the blocks one",),
        "test_dynamic_loss_scale_halves_doubles_and_skips": ("With parameters in fp16, give zero_core.shard",),
    },
    "integration/zero_core/test_models.py": {
        "test_trains_as_its_dense_twin": ("use stage 0, 2 or 3",),
    },
    "integration/zero_core/test_one_thread.py": {
        "test_a_forked_process_is_told_so": ("or run it in the training process",),
        "test_threads_that_take_turns_train_as_one": ("with one threading.Lock around forward, backward",),
    },
    "integration/zero_core/test_parameter_hooks.py": {
        "test_a_hook_that_would_find_no_gradient_is_refused": ("Put it on outside of both, before or after",),
        "test_are_called_as_in_plain_torch": ("A gradient can be changed on its way, too",),
    },
    "integration/zero_core/test_parts.py": {
        "test_what_cannot_be_cut_is_refused_by_name": (
            "shard a model that was not evaluated since it was quantised",
            "cannot be cut into shards: convert it to a plain parameter",
            "call requires_grad_(False) on it, or convert it",
        ),
        "test_values_are_written_with_copy_and_load_state_dict": (
            "have no memory: use zero_core.gathered(module)",
            "before zero_core.shard; write values with copy_()",
            "write with p.copy_() or inside zero_core.gathered",
        ),
        "test_other_values_under_a_sharded_wrapper_are_refused": ("move, cast and quantise the model before",),
    },
    "integration/zero_core/test_second_stage.py": {
        "test_a_model_in_use_is_not_taken": ("of a model whose store sleeps: call zero_core.wake(model) first",),
        "test_what_belongs_to_the_first_stage_says_that_it_is_over": (
            "use the optimizer that the last shard() returned",
        ),
        "test_a_part_of_a_model_and_two_models_are_not_taken": ("call zero_core.unshard on each of them first",),
    },
    "integration/zero_core/test_shared_memory.py": {
        "test_a_parameter_of_which_the_forward_takes_a_part_trains_as_in_torch": (
            "keep one, and index it in forward()",
        ),
        "test_a_buffer_over_a_deferred_parameter_is_refused": (
            "which follows the parameter, or give the buffer memory of its own",
        ),
        "test_what_would_be_trained_apart_is_refused_by_name": (
            "is a part of one contiguous parameter: delete it, or give it memory",
        ),
        "test_a_model_over_the_memory_of_one_that_was_sharded_is_refused": (
            "or shard one module that has both models",
        ),
        "test_addresses_of_parameters_without_memory_say_which_are_tied_and_nothing_else": (
            "was asked for: use zero_core.gathered(module)",
        ),
        "test_an_attribute_over_a_part_is_written_through": (
            "assign the values to the attribute that holds the tensor",
        ),
    },
    "integration/zero_core/test_state_dicts.py": {
        "test_a_rank_that_calls_alone_fails_soon": ("Call it on every rank, outside of `if rank == 0`",),
        "test_a_state_dict_that_is_taken_while_parameters_have_memory_stays": (
            "write into the parameter itself, or load_state_dict",
        ),
    },
    "integration/zero_core/test_stock_clipping.py": {
        "test_an_old_gradient_and_an_old_norm_are_refused": ("Ask for p.grad again after backward(), or keep",),
        "test_views_of_a_gradient_are_kept_or_refused": (
            "which has no memory: use zero_core.full_gradient",
            "a view of {}.grad is used after",
            "would be lost: write p.grad.copy_(tensor)",
        ),
    },
    "integration/zero_core/test_trained_only.py": {
        "test_a_part_of_a_sharded_model_is_saved": ("sharded models: save each apart",),
    },
    "integration/zero_core/test_transforms.py": {
        "test_what_would_keep_parameters_without_memory_is_refused": (
            "or with a plain model that loads its state_dict()",
        ),
    },
    "integration/zero_core/test_untouched.py": {
        "test_a_class_that_cannot_be_cut_is_refused": ("convert them to plain parameters before zero_core.shard",),
        "test_a_wrapper_that_averages_itself_is_refused": ("the module inside (.module), and leave the wrapper out",),
        "test_processes_without_a_group_are_refused": ("remove WORLD_SIZE from the environment",),
    },
    "integration/zero_core/test_untrained.py": {
        "test_data_that_is_assigned_and_still_held_is_refused_once_one_of_the_two_changes": (
            "write p.data.copy_(q.data)",
            "Write p.data.copy_(tensor) instead, or let go",
        ),
        "test_progressive_unfreezing_equals_torch": ("Call zero_core.shard while all that will be trained",),
    },
    "integration/zero_core/test_writes.py": {
        "test_a_view_from_before_a_step_is_refused": ("a view (p.data, p.detach(), p[i] ...) of a {} is used",),
        "test_views_of_every_kind_write_through": ("write into the view with copy_(tensor)",),
        "test_the_storage_of_a_view_is_read_only": ("would be lost: write into the view itself, with copy_(tensor)",),
        "test_dlpack_is_given_a_clone": (
            "Give it a clone, from_dlpack(p.detach().clone()), and write",
            "Give it a clone, from_dlpack(p.grad.clone()), and write",
        ),
    },
    "unit/zero_core/test_checkpoint.py": {
        "test_a_bare_state_dict_needs_only_its_key": ("pass model_key= and optimizer_key=",),
    },
    "unit/zero_core/test_init.py": {
        "test_values_read_from_a_real_tensor_are_those_it_had": (
            "give it a copy, or build this part of the model outside",
        ),
    },
    "unit/zero_core/test_pretrained.py": {
        "test_misfits_are_reported_by_name": ("pass rename= where names differ, or strict=False",),
    },
    "unit/zero_core/test_safetensors.py": {
        "test_a_file_cut_short_is_named": ("the file at {}; fetch it again",),
    },
    "unit/zero_core/test_save_pretrained_full_disk.py": {
        "test_a_full_disk_is_told_with_figures_and_leaves_what_was_there": ("make room, or name another folder",),
    },
    "unit/zero_core/test_shard_device.py": {
        "test_a_gpu_that_is_not_there": ("leave device out to compute on the CPU",),
    },
}
_DURABLE = "integration/zero_offload/test_durable.py::test_advice_about_durable_runs_works"

_STAGES = "integration/zero_core/test_second_stage.py::"
_SECONDARY = "integration/zero_core/test_machines.py::test_secondary_shards_need_machines_of_several_ranks"

_BETWEEN = "integration/zero_core/test_between_stages.py::"

_GROUPS = (
    "integration/zero_core/test_stacked_experts_life.py::test_hooks_and_memory_in_common_are_refused_with_the_way_out"
)

_MUON = "integration/zero_offload/test_muon_refused.py::"
_OWN_MUON = "integration/zero_offload/test_own_muon.py::test_what_it_cannot_do_is_refused"
_SOAP = "integration/zero_offload/test_soap.py::test_states_that_no_store_keeps_are_refused"

FOLLOWED: dict[str, str] = {
    "Use an optimizer that steps each parameter by itself, or one that is": f"{_CONTRACTS}::"
    "test_the_contract_together_is_refused_on_a_tier_whoever_says_so",
    "or use an optimizer that has a contract, such as": "test_the_optimizers_that_are_named_run",
    "give each parameter a gradient, or use another optimizer": "integration/zero_core/test_together.py::"
    "test_a_step_of_what_had_no_gradient_is_an_error",
    "an elementwise optimizer keeps tensors of the parameter's shape": "unit/zero_core/test_elementwise.py::"
    "test_states_of_other_shapes_are_refused_of_an_elementwise_one_and_kept_of_one_by_itself",
    "Give the transform copies, {name:": "integration/zero_core/test_transforms.py"
    "::test_a_write_into_what_a_transform_is_given_is_refused",
    "give it torch.optim.Optimizers, each over": _MUON + "test_joint_optimizers_that_cannot_be_are_refused",
    "give each parameter to one of them": _MUON + "test_joint_optimizers_that_cannot_be_are_refused",
    "add the group to one of its": _MUON + "test_joint_optimizers_that_cannot_be_are_refused",
    "Make the parameter contiguous": _MUON
    + "test_a_matrix_with_other_strides_is_refused_and_trains_as_a_contiguous_one",
    "use stage=0, where every rank has all states": _MUON + "test_collectives_of_equal_shards_alone_are_refused",
    "give rates of at least 0 and three": _OWN_MUON,
    "Muon with {}={}: choose one of {}": _OWN_MUON,
    "give it matrices and stacks (E, m, n) of": _OWN_MUON,
    "let it count each step, the first one too": _SOAP,
    "call it otherwise in one of them": "integration/zero_offload/test_soap.py::"
    "test_one_name_of_two_shapes_is_refused_and_another_name_is_saved",
    "which leaves them in their block's unit": _MUON
    + "test_rows_of_stacked_experts_are_refused_for_what_is_needed_whole",
    "or pass expert_bytes=None to zero_core.shard, which": _GROUPS,
    "a hook on {}, whose experts are computed": _GROUPS,
    "has hooks for its gradient, which arrives": _GROUPS,
    "are to be in groups without a memory": _GROUPS,
    "build the model with two, in transformers by": "unit/zero_core/test_pretrained.py::"
    "test_two_values_for_one_parameter_are_refused_and_each_way_out_loads",
    "build the model again on all of them": f"{_BETWEEN}test_a_rank_whose_store_fails_says_that_others_may_lack_values",
    "swapped_in, of averages: leave": f"{_BETWEEN}test_a_model_with_its_averages_swapped_in_is_not_taken",
    "name a device with memory, or leave it out": f"{_BETWEEN}test_a_plain_model_is_not_on_meta",
    "step a plain optimizer, and run": "integration/zero_core/test_second_stage.py::"
    "test_what_belongs_to_the_first_stage_says_that_it_is_over",
    "call model.zero_grad() before": f"{_BETWEEN}test_gradients_that_no_optimizer_had_are_not_lost",
    "or call zero_core.unshard before": f"{_BETWEEN}"
    "test_an_adapter_that_was_merged_is_not_usable_and_unshard_keeps_what_was_removed",
    "Build their module anew": f"{_BETWEEN}test_a_module_that_was_removed_is_not_usable_and_says_so",
    "failed: build the model again": f"{_STAGES}test_ranks_that_lose_values_say_which",
    "cannot have their values again: build the model again": f"{_STAGES}test_ranks_that_lose_values_say_which",
    "again when the cause is gone": f"{_STAGES}test_a_store_that_fails_leaves_the_model_in_its_earlier_shards",
    "inside forward or backward: call it between steps": f"{_STAGES}test_a_model_in_use_is_not_taken",
    "before close() keeps the values": f"{_STAGES}test_a_model_in_use_is_not_taken",
    "with more room, or leave the model in its shards": f"{_STAGES}"
    "test_without_room_for_the_whole_model_it_stays_in_its_shards",
    "keeps gathers inside of its shard groups by itself": _SECONDARY,
    "which gathers a unit once a step: leave it out": _SECONDARY,
    "is not durable; give shard a store such as": _DURABLE,
    "give shard a store with durable=True, or save with": _DURABLE,
    "leave what is not trained out with trained_only=True, or": _DURABLE,
    "called before: call it once, after shard() and": _DURABLE,
    "start it as it was, or remove its slab to begin": _DURABLE,
    "only: give what it is made of": _DURABLE,
    "keep its steps: call zero_core.resume(model,": _DURABLE,
    "call zero_core.resume(model, optimizer) after shard()": _DURABLE,
    "load a checkpoint, after removing the slabs of all": _DURABLE.split("::")[0]
    + "::test_a_rank_without_its_slab_is_told",
    "write `optimizer = zero_core.shard(model, optimizer, ...)`": "test_the_optimizer_that_shard_returned_is_called",
    "call optimizer.step() or zero_grad() before": "test_gradients_before_shard_are_used_or_dropped",
    "give shard() the inner one": "test_the_inner_optimizer_is_given",
    "add it to the optimizer before zero_core.shard": (
        "integration/zero_offload/test_contracts.py::test_a_step_that_adds_a_group_is_an_error_and_before_shard_it_is_none"
    ),
    "use an optimizer that does both in a step() of its own": (
        "test_an_optimizer_that_wraps_another_does_both_in_a_step_of_its_own"
    ),
    "run the model once on a sample": "test_a_lazy_model_runs_once_on_a_sample",
    "use TiledLinear.from_linear": "test_a_linear_layer_is_tiled_as_a_class",
    "checkpoint.save(folder, model, optimizer) writes": "test_states_are_saved_by_the_calls_that_an_error_names",
    "Call optimizer.zero_grad() after each step()": "test_gradients_are_zeroed_after_each_step",
    "call it after the first step()": "test_a_state_is_written_after_the_first_step",
    "Call it between backward() and step()": "test_a_gradient_is_written_between_backward_and_step",
    "leave assign at False": "test_a_state_dict_is_loaded_by_copying",
    "has nowhere to put its bytes": "test_a_store_in_host_memory_sleeps_in_a_byte_store",
    "step() while the store sleeps": "test_a_store_in_host_memory_sleeps_in_a_byte_store",
    "for which the store has no memory. Give the optimizer": "integration/zero_offload/test_changed_options.py::"
    "test_the_advice_for_a_momentum_that_comes_later",
    "Set it back; to train with": "integration/zero_offload/test_changed_options.py::"
    "test_a_buffer_that_torch_does_not_begin_with_zeros_is_refused",
    "Set it back; what shall hold from the first step on": "unit/zero_core/test_options.py::"
    "test_a_change_that_torch_cannot_make_is_refused_before_the_step",
    "Put them back. A parameter that shall have other options": "unit/zero_core/test_options.py::"
    "test_a_parameter_that_stops_or_gets_other_options_later_trains_as_advised",
    "or take one step of the plain model before": "integration/zero_core/test_carried_state.py::"
    "test_a_state_from_before_the_first_step_is_refused_and_carried_over_after_one",
    "call it before zero_core.shard, or from its step()": "integration/zero_core/test_bad_input.py::"
    "test_another_method_of_the_optimizer_that_was_given_is_called_before_shard_or_in_step",
    "Let it make all of them in the first step": "integration/zero_core/test_full_states.py::"
    "test_a_state_that_a_later_step_makes_is_not_lost_in_silence",
    "or pass param_dtype=": "integration/zero_core/test_bad_input.py::"
    "test_parameters_that_a_float32_master_cannot_hold",
    "lies over the memory of the parameter": "integration/zero_core/test_shared_memory.py::"
    "test_the_advice_against_shared_memory_works",
    "has the strides {}, with which several": "integration/zero_core/test_shared_memory.py::"
    "test_the_advice_against_shared_memory_works",
    "To let the other show its values": "integration/zero_core/test_shared_memory.py::"
    "test_the_advice_against_shared_memory_works",
    "Before the forward, set support_avx512bf16_for_cpu": "integration/zero_core/test_parts.py::"
    "test_a_linear_that_would_be_repacked_in_eval_mode_is_refused",
    "or make one backward in each step": "integration/zero_core/test_parameter_hooks.py::"
    "test_a_hook_that_would_find_one_gradient_of_a_sum_is_refused",
    "To keep them apart, give one memory of its own": "integration/zero_core/test_shared_memory.py::"
    "test_the_advice_against_shared_memory_works",
    "assign one parameter to both": "integration/zero_core/test_shared_memory.py::"
    "test_the_advice_against_shared_memory_works",
    "is in .steps of its unit": "integration/zero_core/test_full_values.py::test_names_and_shapes_are_checked",
    "Read it before, norm.item()": "integration/zero_core/test_stock_clipping.py::"
    "test_an_old_gradient_and_an_old_norm_are_refused",
    "or script a plain model that loads": "integration/zero_core/test_bad_input.py::"
    "test_a_sharded_module_is_not_compiled_to_torchscript",
    "save into a folder that all machines share": "integration/zero_core/test_checkpoint_failures.py::"
    "test_a_folder_that_machines_do_not_share_is_told_when_it_is_saved",
    "take options with which it keeps no other states": f"{_CONTRACTS}::test_states_that_no_store_keeps_are_refused",
    "give it the option that draws none": f"{_CONTRACTS}::test_random_numbers_in_a_step_are_refused",
    "Use an optimizer that is, or an elementwise one": f"{_CONTRACTS}::"
    "test_a_step_that_shows_that_the_word_was_wrong_is_an_error",
    "steps its parameters together, as its contract says": f"{_CONTRACTS}::"
    "test_the_contract_together_is_refused_on_a_tier_whoever_says_so",
    "update_in_backward=True with {}, which is not elementwise": f"{_CONTRACTS}::test_update_in_backward_is_refused",
    "remove the slabs of all ranks to go on from the last": "integration/zero_train/test_other_ranks.py::"
    "test_all_ranks_fall_back_to_the_checkpoint_if_one_has_lost_its_steps",
    "not on this one: see their errors": "integration/zero_offload/test_sleep.py::"
    "test_what_one_rank_cannot_do_no_rank_does",
    **{part: f"{file}::{test}" for file, tests in _FILES.items() for test, parts in tests.items() for part in parts},
}

EXEMPT: dict[str, str] = {
    "the link to its machine is cut. End all ranks": "all processes end; others load the checkpoint",
    "{} after Ctrl-C inside of a hook of": "all processes end; others load the checkpoint",
    "and the process group ({}) {}: start it with": "needs a second kind of device",
    "parameters on {}: move the model to one device": "needs a second device",
    "faulty, restore a checkpoint": "a drive that returns wrong bytes is replaced, not configured",
}
