"""The advices of zero_hf/deepspeed: which tests follow them. tests/advice.py says what the tables mean."""

from __future__ import annotations

FOLLOWED: dict[str, str] = {}

EXEMPT: dict[str, str] = {}

NOT_FOLLOWED: dict[str, int] = {
    "zero_hf/deepspeed/checkpoint.py": 2,
    "zero_hf/deepspeed/convert.py": 1,
    "zero_hf/deepspeed/engine.py": 14,
    "zero_hf/deepspeed/files.py": 14,
    "zero_hf/deepspeed/keys.py": 38,
    "zero_hf/deepspeed/optimizers.py": 17,
    "zero_hf/deepspeed/pickles.py": 5,
    "zero_hf/deepspeed/reading.py": 7,
    "zero_hf/deepspeed/schedules.py": 1,
    "zero_hf/deepspeed/translation.py": 18,
    "zero_hf/deepspeed/zero.py": 4,
}
