"""The advices of zero_train: which tests follow them. tests/advice.py says what the tables mean."""

FOLLOWED: dict[str, dict[str, tuple[str, ...]]] = {
    "integration/zero_train/test_clusters.py": {
        "test_ranks_with_other_texts_are_told_before_the_first_step_and_the_way_out_works": (
            "copy rank 0's to every machine",
        ),
    },
    "integration/zero_train/test_finetune.py": {
        "test_a_plan_needs_neither_data_nor_weights": ("give run.steps in its place",),
        "test_a_prompt_and_what_is_generated_after_it_fit_into_what_is_planned": (
            "or lower trl.max_completion_length",
        ),
        "test_marks_against_learning_are_followed_or_refused": ("leaves an answer out, and {} has several",),
        "test_settings_that_do_not_go_are_one_line": (
            "; change trl.*, run.* or task.*",
            "names no {}: {}; write MODULE",
            "is not a {}; write MODULE",
            "TRL refuses its settings",
        ),
        "test_a_tokenizer_without_a_chat_template_takes_texts_and_no_messages": ("its tokenizer has no chat template",),
    },
    "integration/zero_train/test_followed_advice.py": {
        "test_keys_that_an_error_names_pass": (
            "says what each of its keys means here: set these",
            "is empty; name a folder with",
            "; set it to null for",
            "has no value; give one with",
            "add it with a plus before the key",
            "does not name {}; change",
        ),
        "test_a_run_without_a_package_chooses_what_an_error_names": (
            ", or choose optim=adamw",
            ", or choose offload=host",
            "{} needs {}, which is not installed; pip install 'zero-train[{}]'",
        ),
        "test_a_question_is_asked_as_an_error_says": (
            "write zero-train generate run.dir=FOLDER",
            "is not a number; change",
        ),
        "test_fine_tuning_without_a_package_passes_when_it_is_installed": ("tracker={} needs",),
        "test_models_that_an_error_asks_for_are_built": ("model.experts={}; change one",),
        "test_the_embeddings_are_as_many_as_the_tokens_or_the_tokenizer_is_the_models_own": (
            "set model.vocab_size={}",
        ),
    },
    "integration/zero_train/test_followed_advice_on_data.py": {
        "test_rows_that_an_error_asks_for_are_converted": (
            "{}={} does not exist; change",
            "write at least one, or change",
            "which leaves none for validation; write more",
            "has splits; name one",
        ),
    },
    "integration/zero_train/test_followed_advice_on_tuning.py": {
        "test_a_mistake_of_fine_tuning_is_corrected_as_it_says": (
            "task=grpo needs task.reward=MODULE:FUNCTION",
            "and task=grpo takes none; leave",
        ),
    },
    "integration/zero_train/test_generate.py": {
        "test_a_prompt_and_each_line_of_stdin_are_answered_alike": ("ask in one line",),
    },
    "integration/zero_train/test_interrupted.py": {
        "test_a_rank_that_waits_for_others_to_start_raises_after_its_timeout": ("Start all ranks within run.timeout=",),
    },
    "integration/zero_train/test_other_ranks.py": {
        "test_ranks_that_cannot_have_the_batch_are_refused_and_the_way_out_works": (
            "start a number of ranks that divides",
            "is no multiple of {}, the sequences that",
            "set run.micro_batch={}",
        ),
    },
    "integration/zero_train/test_own_optimizer.py": {
        "test_what_does_not_go_is_one_line": (
            "give arguments that it takes",
            "Here that key is optim.contract, and offload=none",
        ),
    },
    "integration/zero_train/test_replicas.py": {
        "test_groups_that_cannot_be_are_refused_and_the_way_out_works": (
            "start a multiple of {} ranks, or set zero.replicas",
        ),
    },
    "integration/zero_train/test_reward.py": {
        "test_a_reward_model_is_trained_on_and_neither_answers_nor_takes_another_task": (
            "is a reward model, which scores texts and has no head",
        ),
        "test_what_is_exported_scores_and_its_validation_is_torchs_on_one_rank_and_on_two": (
            "holds a reward model, which scores texts",
        ),
    },
    "integration/zero_train/test_run_folder.py": {
        "test_the_way_out_that_is_named_works": (
            "is after step {} of {}; raise",
            ", or continue it after step",
        ),
    },
    "integration/zero_train/test_two_stages.py": {
        "test_a_stage_takes_the_folder_that_it_is_told": (
            "is the folder of a run; name what it has exported",
            "name {}, which has both",
            "write both as one model with `zero-hf merge",
        ),
    },
    "unit/zero_train/test_checks.py": {
        "test_figures_of_a_tier_go_with_the_tier_or_are_left_out": (
            "has figures of a tier that offload.tiers does not have",
        ),
    },
    "unit/zero_train/test_planning.py": {
        "test_checkpoints_and_slab_need_room_on_the_disk_of_the_run_folder": ("save none with run.checkpoint_every=0",),
    },
    "unit/zero_train/test_rows.py": {
        "test_rows_that_are_corrected_are_read": (
            "so there is nothing to learn from; add one",
            "write one object with",
            "and all of it is learned from; delete",
            "which is not learned from; delete",
        ),
    },
    "unit/zero_train/test_unused_keys.py": {
        "test_a_key_that_nothing_uses_and_the_way_out": ("is given, but nothing uses it with",),
    },
}

EXEMPT: dict[str, str] = {
    "upgrade it with pip install -U trl": "needs an old TRL",
    "# Measured by zero-train run.probe=true; save as": "the heading of a file that is printed",
    "ranks see different last checkpoints": "needs a second machine",
    "there is no validation loss, as none of": "the TRL of today leaves out such rows, of which none is then left",
    "cannot run on the CPU: {}; change one": "no optim and precision.states of today are refused: it guards later ones",
}
