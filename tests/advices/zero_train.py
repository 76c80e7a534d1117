"""The advices of zero_train: which tests follow them. tests/advice.py says what the tables mean."""

from __future__ import annotations

FOLLOWED: dict[str, str] = {
    "set precision.states=fp32 or precision=bf16": "test_settings_that_zero_train_names_pass",
    "set optim.max_grad_norm=null or zero.update_in_backward": "test_settings_that_zero_train_names_pass",
    "set run.accumulate=1 or zero.update_in_backward=false": "test_settings_that_zero_train_names_pass",
    "or choose zero.stage=2, which reduces": "test_settings_that_zero_train_names_pass",
    "set offload.activations=recompute, or choose offload=host": "test_settings_that_zero_train_names_pass",
    "set offload.activations=recompute, host{} or auto": "test_settings_that_zero_train_names_pass",
    "set one of them to null or false": "test_settings_that_zero_train_names_pass",
    "lower optim.warmup_steps, leave it out": "test_settings_that_zero_train_names_pass",
    "has figures of a tier that offload.tiers does not have": "unit/zero_train/test_checks.py::"
    "test_figures_of_a_tier_go_with_the_tier_or_are_left_out",
    "is given, but nothing uses it with": "unit/zero_train/test_unused_keys.py::test_keys_that_are_used_pass",
    "was saved with {}; set {}, or leave run.resume out": "integration/zero_train/test_run_folder.py::"
    "test_the_way_out_that_is_named_works",
    "of run.steps={}; raise run.steps": "integration/zero_train/test_run_folder.py::"
    "test_the_way_out_that_is_named_works",
    "holds a run already": "integration/zero_train/test_run_folder.py::test_the_way_out_that_is_named_works",
}

EXEMPT: dict[str, str] = {}

NOT_FOLLOWED: dict[str, int] = {
    "zero_train/answers.py": 2,
    "zero_train/checks.py": 11,
    "zero_train/config.py": 5,
    "zero_train/conversations.py": 12,
    "zero_train/data.py": 6,
    "zero_train/deepspeed.py": 6,
    "zero_train/explain.py": 2,
    "zero_train/finetune.py": 7,
    "zero_train/generate.py": 4,
    "zero_train/loop.py": 1,
    "zero_train/models.py": 4,
    "zero_train/planning.py": 4,
    "zero_train/pretrained.py": 2,
    "zero_train/probing.py": 2,
    "zero_train/resume.py": 3,
    "zero_train/row_files.py": 5,
    "zero_train/rows.py": 3,
    "zero_train/run_folder.py": 1,
    "zero_train/schema.py": 7,
    "zero_train/tokens.py": 1,
    "zero_train/train.py": 3,
}
