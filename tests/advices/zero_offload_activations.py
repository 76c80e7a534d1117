"""The advices of zero_offload about activations: which tests follow them. tests/advice.py says what the tables mean."""

FOLLOWED: dict[str, dict[str, tuple[str, ...]]] = {
    "integration/zero_offload/test_followed_activation_advice.py": {
        "test_a_unit_that_cannot_be_cut_keeps_its_activations_or_computes_all_rows": (
            " the policy 'keep', or leave {}= out",
        ),
        "test_a_dataclass_is_cut_once_torch_knows_it": ("call torch.export.register_dataclass({})",),
        "test_gradients_of_16_bit_parameters_are_added_in_fp32_by_torch_or_need_not_be": (
            "update to 2.13, use fp32 parameters, or leave {}= out",
        ),
        "test_a_unit_that_is_not_known_is_named_or_keeps_or_computes_all_rows": ("name it with row_modules=[{}]",),
    },
    "integration/zero_offload/test_followed_model_advice.py": {
        "test_what_blocks_record_is_not_asked_for_or_they_compute_all_rows": ("{}=True with {}=",),
    },
    "integration/zero_offload/test_long_rows.py": {
        "test_a_named_module_that_returns_its_input_is_refused_and_with_a_copy_it_takes_parts": ("return a copy, {}",),
    },
    "unit/zero_offload/test_buffers.py": {
        "test_a_write_that_the_first_call_did_not_do_is_refused": ("and not in its first call in this mode",),
        "test_a_write_between_forward_and_backward_is_refused": ("write it after backward",),
        "test_a_write_into_a_parameter_is_one_into_a_buffer_or_outside_of_the_unit_or_the_unit_keeps": (
            "make it a buffer, write outside of the unit",
        ),
    },
}

EXEMPT: dict[str, str] = {}
