"""The advices of zero_optim_cpu: which tests follow them. tests/advice.py says what the tables mean."""

from __future__ import annotations

FOLLOWED: dict[str, str] = {
    "has no CPU kernel; set it to False": "test_an_option_without_an_update_is_left_off",
}

EXEMPT: dict[str, str] = {}

NOT_FOLLOWED: dict[str, int] = {
    "zero_optim_cpu/dispatch.py": 1,
    "zero_optim_cpu/kernels.py": 3,
    "zero_optim_cpu/optimizer.py": 1,
    "zero_optim_cpu/rules.py": 1,
    "zero_optim_cpu/step.py": 1,
    "zero_optim_cpu/tensors.py": 4,
}
