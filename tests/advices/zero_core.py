"""The advices of zero_core: which tests follow them. tests/advice.py says what the tables mean."""

from __future__ import annotations

_CONTRACTS = "integration/zero_offload/test_contracts.py"
# Tests of integration/zero_core/test_followed_*.py, by file: the parts of advices that each of them follows.
_FILES: dict[str, dict[str, tuple[str, ...]]] = {
    "building": {
        "test_experts_in_groups_are_called_as_advised": (
            "flatten the tokens before they are called",
            "give slots that are not used an index of",
        ),
        "test_one_of_two_parameters_is_kept_and_indexed_in_the_forward": ("keep one, and index it in forward()",),
        "test_a_deferred_model_is_written_inside_the_context_or_after_shard": (
            "were written after deferred_init() was left, which",
        ),
        "test_an_attribute_follows_a_deferred_parameter_and_a_clone_does_not": (
            "which follows the parameter, or give the buffer memory of its own",
        ),
        "test_a_pretrained_model_is_built_from_its_config": ("with which every rank reads its slices only",),
        "test_a_deferred_model_is_moved_cast_and_run_after_the_context": (
            "move, cast or run the model after the context",
        ),
        "test_a_model_on_meta_is_built_inside_the_context": (
            "build the model inside `with zero_core.deferred_init():`",
            "is on the meta device; build the model in",
        ),
        "test_a_table_is_initialised_where_it_is_built_or_by_load_pretrained": (
            "or give it values with load_pretrained before shard()",
        ),
        "test_a_tensor_that_a_deferred_value_was_read_from_is_a_copy": (
            "give it a copy, or build this part of the model outside",
        ),
        "test_a_meta_tensor_is_made_inside": ("meta tensor made outside deferred_init(); make it inside",),
        "test_ranks_that_differ_do_what_is_advised": (
            "call torch.manual_seed with one seed on every rank",
            "or two (replicate, shard) with stage 1, 2 or 3",
            "ranks bring optimizers of different steps",
        ),
        "test_what_cannot_follow_a_parameter_is_deleted_or_cloned": (
            "is a part of one contiguous parameter: delete it, or give it memory",
        ),
        "test_memory_of_another_sharded_model_is_cloned_or_shared_by_one_model": (
            "or shard one module that has both models",
        ),
        "test_bitsandbytes_weights_are_quantised_before_shard": (
            'call model.to("cpu"), or .to(device), before zero_core.shard',
        ),
        "test_parts_that_cannot_be_cut_are_frozen_converted_or_made_anew": (
            "shard a model that was not evaluated since it was quantised",
            "cannot be cut into shards: convert it to a plain parameter",
            "call requires_grad_(False) on it, or convert it",
        ),
        "test_a_class_of_parameters_that_cannot_be_cut_is_converted": (
            "convert them to plain parameters before zero_core.shard",
        ),
        "test_the_module_inside_a_wrapper_is_given": ("the module inside (.module), and leave the wrapper out",),
        "test_an_optimizer_is_built_for_each_model_of_its_parameters": (
            "is sharded already: build a new one for another model",
            "build it from model.parameters() of the model given",
        ),
        "test_a_sharded_model_is_sharded_again_whole_and_by_itself": (
            " on the whole ",
            "of a model whose store sleeps: call zero_core.wake(model) first",
            "use the optimizer that the last shard() returned",
            "call zero_core.unshard on each of them first",
        ),
        "test_the_modules_of_a_script_are_sharded_and_compiled": ("and compile blocks with torch.compile",),
        "test_integers_and_quantised_values_are_left_out": (
            "leave them to an optimizer of their own",
            "dequantise it, or keep it as a buffer",
        ),
        "test_processes_that_never_met_are_met_or_alone": ("remove WORLD_SIZE from the environment",),
        "test_updates_in_backward_go_with_the_stages_that_are_named": ("use stage 0, 2 or 3",),
        "test_a_device_that_is_not_there_is_left_out": ("leave device out to compute on the CPU",),
        "test_an_optimizer_that_memory_does_not_know_is_given_as_a_number_or_a_name": (
            "give its number of fp32 states, or one of",
        ),
    },
    "checkpoints": {
        "test_a_checkpoint_without_a_scheduler_is_loaded_without_one": ("load it with scheduler=None",),
        "test_a_model_is_sharded_before_it_loads_or_read_by_torch": (
            "is not sharded; call zero_core.shard first (any stage)",
        ),
        "test_a_file_that_is_lost_or_cut_is_copied_anew": (
            "the manifest lists it: copy it anew",
            "the manifest lists {}: copy it anew",
        ),
        "test_a_folder_with_other_keys_is_loaded_by_them": ("pass model_key= and optimizer_key=",),
        "test_weights_that_were_saved_alone_are_loaded_alone": (
            "it was saved without its optimizer; load it without one",
        ),
        "test_groups_are_those_that_were_saved": ("build the optimizer with the groups it was saved with",),
        "test_options_that_are_not_read_are_saved_again_by_torch_or_left": (
            "read it with torch.distributed.checkpoint into a plain model and its optimizer",
            "make them numbers in its groups and save both with get_state_dict",
            "save both with get_state_dict",
        ),
        "test_names_that_differ_are_renamed_or_left_out": ("pass rename= where names differ, or strict=False",),
        "test_a_safetensors_file_that_is_cut_is_fetched_again": ("the file at {}; fetch it again",),
        "test_a_folder_of_pickles_is_saved_again_by_transformers": ("holds no *.safetensors ({}); load the model",),
        "test_a_disk_without_room_gets_it_or_another_folder_is_named": ("make room, or name another folder",),
        "test_two_sharded_models_are_saved_apart": ("sharded models: save each apart",),
    },
    "advice": {
        "test_ranks_that_differ_do_what_is_advised": (
            "Call it on every rank, outside of `if rank == 0`",
            "or freeze it with requires_grad_(False), or run it",
        ),
        "test_averages_are_updated_after_the_with_block": ("the averages are swapped in: leave the with block first",),
        "test_what_a_with_block_refuses_is_done_after_it": ("back at its end: leave the with block first",),
        "test_a_model_is_sharded_first": (
            "has no sharded parameter: call zero_core.shard first",
            "is not sharded: call zero_core.shard(model, optimizer)",
        ),
        "test_a_plain_optimizer_in_gathered_gets_gradients_of_its_own": (
            "or set p.grad yourself from torch.autograd.grad",
        ),
        "test_a_hook_that_would_find_no_gradient_is_put_on_outside": ("Put it on outside of both, before or after",),
        "test_an_embedding_is_dense": ("with sparse=False (nn.Embedding, nn.EmbeddingBag)",),
        "test_a_store_is_given_all_that_is_called": ("give it all that zero_core.ShardStore has",),
        "test_a_parameter_in_no_group_is_given_to_the_optimizer": ("backward: give it to the optimizer before",),
        "test_a_gradient_is_asked_for_between_backward_and_step": ("call optimizer.zero_grad() after each step()",),
        "test_backwards_are_repeated_after_one_that_raised": ("and repeat the backwards of this step",),
        "test_old_gradients_and_views_are_asked_for_again_or_copied": (
            "Ask for p.grad again after backward(), or keep",
            "which has no memory: use zero_core.full_gradient",
            "a view of {}.grad is used after",
            "would be lost: write p.grad.copy_(tensor)",
        ),
        "test_a_gradient_inside_of_a_forward_is_taken_by_grad_or_comes_after_it": (
            "Call zero_grad() before this forward, or backward() after it, or take the gradients",
        ),
        "test_an_optimizer_in_backward_is_an_option_of_shard": ("Leave it out, and pass update_in_backward=True",),
        "test_gradients_in_another_dtype_are_reduced_in_it": ("Pass reduce_dtype= to zero_core.shard for the dtype",),
        "test_a_gradient_is_zeroed_by_the_optimizer": ("call optimizer.zero_grad(), which forgets it",),
        "test_loss_scale_takes_the_place_of_a_grad_scaler": ("leave the GradScaler out",),
    },
    "optimizer": {
        "test_what_a_pass_refuses_is_called_after_backward": (
            "{} inside forward or backward: call it after loss.backward()",
            "step() inside forward or backward: call it after",
        ),
        "test_gradients_are_zeroed_and_a_store_sleeps_between_steps": (
            "zero_grad() inside backward: call it between steps",
            "sleep() inside forward or backward: call it between",
        ),
        "test_a_gradient_can_be_changed_on_its_way": ("A gradient can be changed on its way, too",),
        "test_a_second_backward_goes_without_updates_in_backward": (
            "use outside of its module. Leave update_in_backward",
        ),
        "test_a_use_inside_backward_goes_without_updates_in_backward": (
            "than the forward did. Leave update_in_backward out",
        ),
        "test_gradients_that_are_used_up_in_backward_are_kept_or_changed_on_their_way": (
            "leave that out, or change the gradient in parameter",
        ),
        "test_an_optimizer_that_has_not_stepped_is_given_or_its_state_is_loaded": (
            "give shard() an optimizer that has not stepped",
        ),
        "test_parameters_that_are_looked_up_become_a_group": ("group of their own, with an option in param_groups",),
        "test_states_begin_anew_with_zeros": ("writes a state, zeros to begin anew",),
        "test_a_state_dict_that_lacks_states_is_one_that_has_them": (
            "training would go on with empty states. Load what",
        ),
        "test_weights_are_loaded_before_their_masters_or_masters_are_left_out": (
            "load the weights first, with model.load_state_dict",
        ),
        "test_values_of_a_state_are_whole_and_of_a_parameter_that_is_sharded": (
            "give it one of model.parameters() after zero_core",
            "give real numbers for the whole parameter, on every",
        ),
        "test_a_compiled_step_goes_without_fullgraph_or_outside": (
            "leave fullgraph=True out, or call step() outside",
            "leave fullgraph=True out, or compile the blocks one",
        ),
        "test_a_norm_that_is_not_finite_and_a_scale_that_is_lowered": (
            "With parameters in fp16, give zero_core.shard",
        ),
        "test_a_loss_that_overflows_in_fp16_is_trained_in_bf16": ("that is not finite, or train in bf16",),
        "test_groups_are_added_before_shard": ("put the parameters in a group now and set",),
        "test_each_shard_gets_a_device_store_of_its_own": ("make a new DeviceStore for each zero_core.shard",),
        "test_a_store_that_cannot_sleep_or_wake_gets_what_it_lacks": (
            "make room, or give sleep(to=) another ByteStore",
            "call wake() again when the cause is gone",
            "call zero_core.wake(model), or wake() of the store",
        ),
        "test_a_gradient_is_read_from_a_store_after_a_backward": ("none to read or write: run a backward first",),
        "test_a_state_is_written_with_the_options_that_keep_it": ("the options with which the values were saved",),
        "test_a_model_whose_store_failed_is_built_again": ("Build the model again before the next shard()",),
        "test_a_model_that_was_updated_by_half_is_loaded_from_a_checkpoint": (
            "Build the model and its optimizer anew, and load",
        ),
    },
    "model": {
        "test_a_model_is_copied_and_pickled_before_shard_or_by_its_state_dict": (
            "Copy it before zero_core.shard; to keep",
            "copy the model before zero_core.shard, or its",
            "use zero_core.checkpoint.save, or model.state_dict()",
        ),
        "test_memory_is_shown_by_gathered": (
            "have no memory: use zero_core.gathered(module)",
            "was asked for: use zero_core.gathered(module)",
        ),
        "test_values_of_a_quantised_parameter_are_written_by_copy": (
            "before zero_core.shard; write values with copy_()",
            "write with p.copy_() or inside zero_core.gathered",
        ),
        "test_values_of_a_quantised_parameter_are_changed_before_shard": ("move, cast and quantise the model before",),
        "test_a_view_from_before_a_step_is_taken_anew_or_cloned": (
            "a view (p.data, p.detach(), p[i] ...) of a {} is used",
        ),
        "test_new_values_are_copied_into_a_view": ("write into the view with copy_(tensor)",),
        "test_a_model_is_moved_and_cast_before_shard_or_by_its_options": (
            "move or cast the model before zero_core.shard",
            "do it before, write values inside zero_core.gathered",
        ),
        "test_a_parameter_that_a_forward_changed_is_of_a_model_built_anew": ("shard again a model built anew",),
        "test_memory_is_not_shared_by_assigning_data": ("write p.data.copy_(q.data)",),
        "test_values_are_assigned_to_the_attribute_that_holds_a_tensor": (
            "assign the values to the attribute that holds the tensor",
        ),
        "test_a_tensor_that_was_assigned_is_copied_or_let_go": ("Write p.data.copy_(tensor) instead, or let go",),
        "test_a_parameter_is_made_before_shard_or_of_a_copy": ("write nn.Parameter(p.detach().clone())",),
        "test_a_gradient_is_cloned_to_be_a_leaf": ("Clone it first, p.grad.clone()",),
        "test_storages_and_dlpack_are_written_by_the_view_or_by_a_clone": (
            "would be lost: write into the view itself, with copy_(tensor)",
            "Give it a clone, from_dlpack(p.detach().clone()), and write",
            "Give it a clone, from_dlpack(p.grad.clone()), and write",
        ),
        "test_a_state_dict_from_inside_gathered_is_loaded": ("write into the parameter itself, or load_state_dict",),
        "test_a_model_is_traced_before_shard_or_as_a_plain_one": ("or with a plain model that loads its state_dict()",),
        "test_what_is_trained_later_requires_a_gradient_at_shard": (
            "Call zero_core.shard while all that will be trained",
        ),
        "test_a_forked_process_runs_a_plain_model": ("or run it in the training process",),
        "test_threads_take_turns_with_a_lock": ("with one threading.Lock around forward, backward",),
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
    "not on this one: see their errors": "integration/zero_offload/test_sleep.py::"
    "test_what_one_rank_cannot_do_no_rank_does",
    **{
        part: f"integration/zero_core/test_followed_{file}.py::{test}"
        for file, tests in _FILES.items()
        for test, parts in tests.items()
        for part in parts
    },
}

EXEMPT: dict[str, str] = {
    "the link to its machine is cut. End all ranks": "all processes end; others load the checkpoint",
    "{} after Ctrl-C inside of a hook of": "all processes end; others load the checkpoint",
    "and the process group ({}) {}: start it with": "needs a second kind of device",
    "parameters on {}: move the model to one device": "needs a second device",
    "faulty, restore a checkpoint": "a drive that returns wrong bytes is replaced, not configured",
}
