"""The advices of zero_hf: which tests follow them. tests/advice.py says what the tables mean."""

from __future__ import annotations

FOLLOWED: dict[str, str] = {
    "has no update on the host": "integration/zero_hf/test_trainer_use.py::"
    "test_the_optimizers_that_a_refusal_names_train_on_nvme_as_in_the_stock_trainer",
    "keep all on the device with offload: none": "integration/zero_hf/test_trainer_use.py::"
    "test_the_optimizers_that_a_refusal_names_train_on_nvme_as_in_the_stock_trainer",
}

EXEMPT: dict[str, str] = {}

NOT_FOLLOWED: dict[str, int] = {
    "zero_hf/accelerating.py": 9,
    "zero_hf/commands.py": 2,
    "zero_hf/config.py": 6,
    "zero_hf/loading.py": 13,
    "zero_hf/merging.py": 8,
    "zero_hf/sharding.py": 5,
    "zero_hf/trainer.py": 16,
    "zero_hf/trl.py": 4,
}
