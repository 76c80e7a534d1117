"""The advices of zero_optim_cpu: which tests follow them. tests/advice.py says what the tables mean."""

from __future__ import annotations

_HERE = "integration/zero_optim_cpu/test_followed_advice.py::"

FOLLOWED: dict[str, str] = {
    "leave it out for one per core": _HERE + "test_threads_and_cores_are_given_as_an_error_says",
    "leave threads out": _HERE + "test_threads_and_cores_are_given_as_an_error_says",
    "leave those out, or leave cores": _HERE + "test_threads_and_cores_are_given_as_an_error_says",
    "use to_dense()": _HERE + "test_a_tensor_is_made_what_the_kernels_take",
    "give it values first, or make": _HERE + "test_parameters_without_values_have_an_optimizer_of_torch",
    "use .contiguous()": _HERE + "test_a_tensor_is_made_what_the_kernels_take",
    "the kernels take float32, bfloat16 and float16: cast it": _HERE + "test_a_dtype_without_a_kernel_is_cast",
    "to ascend, pass maximize=True": _HERE + "test_an_optimizer_is_made_and_bound_as_an_error_says",
    "call bind(optimizer) first": _HERE + "test_an_optimizer_is_made_and_bound_as_an_error_says",
    "give some param group a momentum before bind()": _HERE + "test_momentum_is_given_before_bind",
    "has no CPU kernel; set it to False": "test_an_option_without_an_update_is_left_off",
    "if it was cast after a step, cast it before": "unit/zero_optim_cpu/test_bad_input.py::"
    "test_a_parameter_that_was_cast_between_steps_says_so",
}

EXEMPT: dict[str, str] = {"move it with .cpu()": "needs a device besides the CPU"}
