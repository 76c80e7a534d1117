"""The advices of zero_optim_cpu: which tests follow them. tests/advice.py says what the tables mean."""

FOLLOWED: dict[str, dict[str, tuple[str, ...]]] = {
    "integration/zero_optim_cpu/test_followed_advice.py": {
        "test_a_tensor_is_made_what_the_kernels_take": (
            "use to_dense()",
            "use .contiguous()",
        ),
        "test_a_dtype_without_a_kernel_is_cast": ("the kernels take float32, bfloat16 and float16: cast it",),
    },
    "unit/test_followed_advice.py": {
        "test_an_option_without_an_update_is_left_off": ("has no CPU kernel; set it to False",),
    },
    "unit/zero_optim_cpu/test_bad_input.py": {
        "test_a_parameter_that_was_cast_between_steps_says_so": ("if it was cast after a step, cast it before",),
    },
}

EXEMPT: dict[str, str] = {"move it with .cpu()": "needs a device besides the CPU"}
