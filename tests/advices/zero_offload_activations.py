"""The advices of zero_offload about activations: which tests follow them. tests/advice.py says what the tables mean."""

from __future__ import annotations

_HERE = "integration/zero_offload/test_followed_activation_advice.py::"
_MODELS = "integration/zero_offload/test_followed_model_advice.py::"
_LONG = "integration/zero_offload/test_long_rows.py::"
_BUFFERS = "unit/zero_offload/test_buffers.py::"

FOLLOWED: dict[str, str] = {
    " the policy 'keep', or leave {}= out": _HERE
    + "test_a_unit_that_cannot_be_cut_keeps_its_activations_or_computes_all_rows",
    "call torch.export.register_dataclass({})": _HERE + "test_a_dataclass_is_cut_once_torch_knows_it",
    "where shared=[] says that there are none": _HERE + "test_what_all_rows_share_is_named_where_shapes_do_not_tell",
    "name it in shared=[...]; else": _HERE
    + "test_an_argument_without_which_no_part_can_be_computed_is_named_as_shared",
    "give the number of {} computed at once": _HERE + "test_rows_are_a_number_of_at_least_one",
    "leave zero_core.tile_linear out, or shard with expert_bytes=None, or leave {}= out": _HERE
    + "test_units_are_not_tiled_or_compute_all_rows",
    "update to 2.13, use fp32 parameters, or leave {}= out": _HERE
    + "test_gradients_of_16_bit_parameters_are_added_in_fp32_by_torch_or_need_not_be",
    "{} policies for {} units; give one, or one a unit": _HERE + "test_one_policy_is_given_or_one_for_each_unit",
    "no room on {} for {} of activations": _HERE + "test_nvme_has_room_for_fewer_tokens_or_fewer_units",
    "the activation offload is closed": _HERE + "test_activations_that_were_closed_are_offloaded_again",
    "close what offload_activations returned, free threads": _HERE
    + "test_a_thread_for_activations_is_started_when_there_are_threads_again",
    "make that operation out of place": _HERE + "test_an_input_is_changed_out_of_place_or_kept_where_torch_allows_it",
    "train with use_cache=False": _MODELS + "test_a_cache_is_not_used_or_the_units_keep_their_activations",
    "{} checkpoints itself": _MODELS + "test_a_model_that_checkpoints_itself_is_told_not_to",
    "{}=True with {}=": _MODELS + "test_what_blocks_record_is_not_asked_for_or_they_compute_all_rows",
    "computes sequences that are packed over {} rows": _LONG + "test_offsets_of_packed_sequences_reach_attention_whole",
    "name it with row_modules=[{}]": _HERE + "test_a_unit_that_is_not_known_is_named_or_keeps_or_computes_all_rows",
    "see model.named_modules()": _HERE + "test_a_unit_that_is_not_known_is_named_or_keeps_or_computes_all_rows",
    "token_modules=['*.mlp']; else give the unit the policy 'keep', or leave tokens= out": _LONG
    + "test_a_named_module_that_mixes_tokens_is_refused_and_a_block_of_which_none_is_known",
    "return a copy, {}": _LONG + "test_a_named_module_that_returns_its_input_is_refused_and_with_a_copy_it_takes_parts",
    "where tokens= needs (rows, tokens, width)": _LONG
    + "test_hidden_states_that_are_no_rows_of_tokens_and_units_inside_of_units_are_refused",
    "use them, or logits.clone() them, before step()": _MODELS + "test_logits_are_used_or_copied_before_a_step",
    "a gradient of all logits never exists": _MODELS + "test_the_gradient_of_all_logits_is_asked_for_without_rows",
    "use logits.clone() there, or leave rows= and tokens= out": _MODELS
    + "test_what_cannot_follow_logits_is_given_copies_or_all_of_them",
    "and not in its first call in this mode": _BUFFERS + "test_a_write_that_the_first_call_did_not_do_is_refused",
    "write it after backward": _BUFFERS + "test_a_write_between_forward_and_backward_is_refused",
    "make it a buffer, write outside of the unit": _BUFFERS
    + "test_a_write_into_a_parameter_is_one_into_a_buffer_or_outside_of_the_unit_or_the_unit_keeps",
}

EXEMPT: dict[str, str] = {}
