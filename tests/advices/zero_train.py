"""The advices of zero_train: which tests follow them. tests/advice.py says what the tables mean."""

from __future__ import annotations

_HERE = "integration/zero_train/test_followed_advice.py::"
_DATA = "integration/zero_train/test_followed_advice_on_data.py::"
_KEYS = _HERE + "test_keys_that_an_error_names_pass"
_CONVERTED = _DATA + "test_rows_that_an_error_asks_for_are_converted"
_UNUSED = "unit/zero_train/test_unused_keys.py::test_a_key_that_nothing_uses_and_the_way_out"

_DURABLE = "integration/zero_train/test_durable.py::test_what_cannot_be_durable_is_refused_and_the_way_out_works"

_ROOM = _DURABLE.split("::")[0] + "::test_a_disk_without_room_for_both_places_is_refused"
_LEFT = _DURABLE.split("::")[0] + "::test_steps_that_cannot_become_a_checkpoint_are_left"

_GROUPS = "integration/zero_train/test_replicas.py::"
_GROUPS += "test_groups_that_cannot_be_are_refused_and_the_way_out_works"

_BATCH = "integration/zero_train/test_other_ranks.py::"
_BATCH += "test_ranks_that_cannot_have_the_batch_are_refused_and_the_way_out_works"

_PLACES = "integration/zero_train/test_clusters.py::test_ranks_that_changed_places_are_told_and_the_way_out_works"
_SHARED = "integration/zero_train/test_clusters.py::test_a_run_folder_that_machines_do_not_share_is_told"

_TUNED = "integration/zero_train/test_finetune_data.py::"
_TEMPLATE = _TUNED + "test_a_template_of_a_file_is_learned_from_and_exported_and_a_row_that_it_refuses_is_told"
_EARLY = (
    "integration/zero_train/test_followed_advice_on_tuning.py::test_a_mistake_of_fine_tuning_is_corrected_as_it_says"
)

_FINETUNE = "integration/zero_train/test_finetune.py::"
_OWN = "integration/zero_train/test_own_optimizer.py::test_what_does_not_go_is_one_line"
_SETTINGS = _FINETUNE + "test_settings_that_do_not_go_are_one_line"
_ROWS = "unit/zero_train/test_rows.py::test_rows_that_are_corrected_are_read"

_STAGES = "integration/zero_train/test_two_stages.py::test_a_stage_takes_the_folder_that_it_is_told"

FOLLOWED: dict[str, str] = {
    "leave optim.schedule out, or choose optim=adamw": "unit/zero_train/test_engine.py::"
    "test_muon_takes_no_schedule_that_gives_all_parameters_one_rate",
    "copy rank 0's to every machine": "integration/zero_train/test_clusters.py::"
    "test_ranks_with_other_texts_are_told_before_the_first_step_and_the_way_out_works",
    "; correct the row, or name another template": _TEMPLATE,
    "marks no answer in {}": _TEMPLATE,
    "set run.evaluate_batches to a number": _EARLY,
    "takes none; set it to epoch": _EARLY,
    "in 4 bits, which is not supported; choose adapter=lora": _EARLY,
    "and merge with PEFT's merge_and_unload": _EARLY,
    "set data.validation_fraction=0.05 or data.validation_path": _EARLY,
    "set run.keep_best=false to export": _TUNED
    + "test_the_best_checkpoint_is_kept_and_exported_and_an_early_end_is_remembered",
    "name it once, with the weight of both": _EARLY,
    "give each of data.sources a weight, or none": _EARLY,
    "has no path; write {path": _EARLY,
    "leave an entry out for 0": _EARLY,
    "give run.steps in its place": "integration/zero_train/test_finetune.py::"
    "test_a_plan_needs_neither_data_nor_weights",
    "set run.steps, or leave optim.schedule out": _EARLY,
    "shards nothing; set zero.replicas=1": _GROUPS,
    "makes several; set zero.replicas=1": _GROUPS,
    "start a multiple of {} ranks, or set zero.replicas": _GROUPS,
    "make room, start the run as it was, on {} ranks": "integration/zero_train/test_other_ranks.py::"
    "test_durable_steps_of_which_a_machine_has_a_part_are_refused_and_the_way_out_works",
    "start a number of ranks that divides": _BATCH,
    "is no multiple of {}, the sequences that": _BATCH,
    "set run.micro_batch={}": _BATCH,
    "; start as many ranks as there were, each on the machine": _PLACES,
    "name a folder that all machines share with run.dir": _SHARED,
    "Start all ranks within run.timeout=": "integration/zero_train/test_interrupted.py::"
    "test_a_rank_that_waits_for_others_to_start_raises_after_its_timeout",
    "name a folder on a larger disk with run.dir": _ROOM,
    "set run.durable=null, as with it": _ROOM,
    "without a store cannot read; choose offload=host": _LEFT,
    "set run.durable=null, and run.checkpoint_every": _DURABLE,
    "choose offload=nvme or offload=host, or set run.durable=null": _DURABLE,
    "name another folder with run.dir=…": _DURABLE.split("::")[0]
    + "::test_another_run_is_refused_and_the_way_out_works",
    "saves none; set run.checkpoint_every to a number": _KEYS,
    "is empty; name a folder with": _KEYS,
    "write one as in conf/tier/compressed.yaml": _KEYS,
    "give a number, dynamic, null, or arguments": _KEYS,
    "; set it to null for": _KEYS,
    "; plan for that machine with run.dry=true": _KEYS,
    "plan for them with run.dry=true": _KEYS,
    "has no value; give one with": _KEYS,
    "looks into run.dir, and the default run.dir is new": _KEYS,
    "needs quotes; write": _KEYS,
    "add it with a plus before the key": _KEYS,
    "set offload.activations=recompute": _KEYS,
    "leave it out, as run.durable keeps each step": _KEYS,
    "leave it out, as run.patience counts": _KEYS,
    "leave it out, or call zero_core.shard(update_in_backward=True)": _KEYS,
    "give {type: NAME, params: {...}}": _KEYS,
    "needs a pretrained model, but": _KEYS,
    "merges what run.export=true writes": _KEYS,
    "has no loss scaling; set": _KEYS,
    ", or choose optim=adamw": _HERE + "test_a_run_without_a_package_chooses_what_an_error_names",
    ", or choose offload=none": _HERE + "test_a_run_without_a_package_chooses_what_an_error_names",
    ", or use optim.warmup_steps": _HERE + "test_a_run_without_a_package_chooses_what_an_error_names",
    ", or choose offload=host": _HERE + "test_a_run_without_a_package_chooses_what_an_error_names",
    "{} needs {}, which is not installed; pip install 'zero-train[{}]'": _HERE
    + "test_a_run_without_a_package_chooses_what_an_error_names",
    "has rows for a tokenizer, and this run reads bytes": _DATA + "test_text_that_an_error_asks_for_is_read",
    "a sequence needs {}; name more text": _DATA + "test_text_that_an_error_asks_for_is_read",
    "is not text: it has zero bytes": _DATA + "test_text_that_an_error_asks_for_is_read",
    "name text that exists with data.path": _DATA + "test_text_that_an_error_asks_for_is_read",
    "there is no text file; change": _DATA + "test_text_that_an_error_asks_for_is_read",
    "write one object with": _ROWS,
    "}`; write both alike": _ROWS,
    "name what to train on with data.path": _CONVERTED,
    "write all rows alike": _CONVERTED,
    "has rows of {}, and {}={} of {}; write both alike": _TUNED + "test_parts_with_other_columns_are_refused",
    "{}={} does not exist; change": _CONVERTED,
    "save the file as UTF-8, or remove it": _DATA + "test_half_of_a_character_and_another_encoding_are_told",
    "begin with different messages; write a": _ROWS,
    "and all of it is learned from; delete": _ROWS,
    "that `datasets` rounds": "unit/zero_train/test_row_sets.py::test_a_number_that_datasets_would_round_is_told",
    "or lower trl.max_completion_length": _FINETUNE
    + "test_a_prompt_and_what_is_generated_after_it_fit_into_what_is_planned",
    "write at least one, or change": _CONVERTED,
    "which leaves none for validation; write more": _CONVERTED,
    "has no config.json; name a folder saved by": _HERE + "test_models_that_an_error_asks_for_are_built",
    "is the folder of a run; name what it has exported": _STAGES,
    "name {}, which has both": _STAGES,
    "write both as one model with `zero-hf merge": _STAGES,
    "too small for the 256 values of a byte": _HERE + "test_models_of_bytes_are_named_or_data_is_given_as_bytes",
    "name a model that was trained on bytes": _HERE + "test_models_of_bytes_are_named_or_data_is_given_as_bytes",
    "holds no complete checkpoint; name a run folder": _HERE + "test_folders_that_an_error_asks_for_are_taken",
    "run.resume=auto: run.dir={} holds {}; name another": _HERE + "test_folders_that_an_error_asks_for_are_taken",
    "write zero-train generate run.dir=FOLDER": _HERE + "test_a_question_is_asked_as_an_error_says",
    "is too small; set it to 1": _HERE + "test_a_question_is_asked_as_an_error_says",
    "computes in the parameters' format: write bf16": _HERE + "test_a_file_of_deepspeed_is_written_as_its_table_says",
    "write deepspeed=ds_config.json once": _HERE + "test_one_file_of_deepspeed_is_named",
    "wait until that run ends": _HERE + "test_a_folder_in_use_is_not_taken_twice",
    "set precision.states=fp32 or precision=bf16": "test_settings_that_zero_train_names_pass",
    "or choose zero.stage=2, which reduces": "test_settings_that_zero_train_names_pass",
    "set offload.activations=recompute, or choose offload=host": "test_settings_that_zero_train_names_pass",
    "set offload.tokens instead, which cuts such a row, or one of": "test_settings_that_zero_train_names_pass",
    "lower optim.warmup_steps, leave it out": "test_settings_that_zero_train_names_pass",
    "has figures of a tier that offload.tiers does not have": "unit/zero_train/test_checks.py::"
    "test_figures_of_a_tier_go_with_the_tier_or_are_left_out",
    "is given, but nothing uses it with": _UNUSED,
    "was saved with {}; set {}, or leave run.resume out": "integration/zero_train/test_run_folder.py::"
    "test_the_way_out_that_is_named_works",
    "is after step {} of {}; raise": "integration/zero_train/test_run_folder.py::test_the_way_out_that_is_named_works",
    "holds a run already": "integration/zero_train/test_run_folder.py::test_the_way_out_that_is_named_works",
    # answers and fine-tuning
    "; name a file of UTF-8": _FINETUNE + "test_a_template_that_cannot_be_read_is_told",
    "leaves an answer out, and {} has several": _FINETUNE + "test_marks_against_learning_are_followed_or_refused",
    "TRL knows none for it that has": _FINETUNE + "test_answers_that_trl_would_not_find_are_refused_with_their_line",
    "and task=pretrain has none; choose task=sft": _EARLY,
    "task=grpo needs task.reward=MODULE:FUNCTION": _EARLY,
    "and task=grpo takes none; leave": _EARLY,
    "is for task=grpo, and this is": _EARLY,
    "names no {}: {}; write MODULE": _SETTINGS,
    "is not a {}; write MODULE": _SETTINGS,
    "takes no weight_decay: set optim.weight_decay=0": _OWN,
    "give arguments that it takes": _OWN,
    "Here that key is optim.contract, and offload=none": _OWN,
    "leave it out, and set that": _SETTINGS,
    "is a setting of transformers' Trainer": _SETTINGS,
    "; change trl.*, run.* or task.*": _SETTINGS,
    "is a reward model, which scores texts and has no head": "integration/zero_train/test_reward.py::"
    "test_a_reward_model_is_trained_on_and_neither_answers_nor_takes_another_task",
    "holds a reward model, which scores texts": "integration/zero_train/test_reward.py::"
    "test_what_is_exported_scores_and_its_validation_is_torchs_on_one_rank_and_on_two",
    "would keep every row": "integration/zero_train/test_finetune.py::"
    "test_rows_longer_than_a_sequence_are_counted_before_the_run_and_in_its_folder",
    "its tokenizer has no chat template": "integration/zero_train/test_finetune.py::"
    "test_a_tokenizer_without_a_chat_template_takes_texts_and_no_messages",
    "tracker={} needs": _HERE + "test_fine_tuning_without_a_package_passes_when_it_is_installed",
    "the data differ from the saved run's": _HERE + "test_other_rows_are_brought_back_or_learned_from_on_purpose",
    # keys
    "does not load ({}); reinstall it": _HERE + "test_a_package_that_does_not_load_is_installed_again",
    "does not name {}; change": _KEYS,
    "of the weights after a step; lower one": _KEYS,
    "write KEY=VALUE, or see zero-train --help": _HERE + "test_a_command_line_has_keys_or_asks_for_help",
    "in the first line of the file": "integration/zero_train/test_app.py::"
    "test_a_mistake_in_a_recipe_of_ones_own_is_one_line",
    # data
    "has no file of rows that matches": _CONVERTED,
    "has splits; name one": _CONVERTED,
    "datasets cannot keep the rows": _DATA + "test_rows_that_find_no_room_go_to_the_folder_that_is_named",
    "cannot write its tokens to": "integration/zero_train/test_tokens.py::"
    "test_tokens_that_find_no_room_go_to_the_folder_that_is_named",
    "; name a whole file": _DATA + "test_lines_that_are_corrected_are_read",
    "write one whole object a line, or one array": _DATA + "test_lines_that_are_corrected_are_read",
    "delete the column or the row": _ROWS,
    "write [[question, answer], …]": _ROWS,
    "and `system` beside it; delete one": _ROWS,
    "a function_call; write JSON with": _ROWS,
    "choose task=kto, or delete `label`": _ROWS,
    "write it as one text": _ROWS,
    ", or set task.loss_on=everything": _ROWS,
    "so there is nothing to learn from; add one": _ROWS,
    "no other answer to learn from; delete the row": _ROWS,
    "with its only answer to learn; write a row for each": _ROWS,
    "which is not learned from; delete": _ROWS,
    "; change data.path or data.pattern": _DATA + "test_text_that_an_error_asks_for_is_read",
    # models, files of DeepSpeed, folders and commands
    "is not an even multiple of model.heads": _HERE + "test_models_that_an_error_asks_for_are_built",
    "is more than model.experts={}; change one": _HERE + "test_models_that_an_error_asks_for_are_built",
    "is not a multiple of model.key_value_heads": _HERE + "test_models_that_an_error_asks_for_are_built",
    "name its own tokenizer": _HERE
    + "test_the_embeddings_are_as_many_as_the_tokens_or_the_tokenizer_is_the_models_own",
    "set model.vocab_size={}": _HERE
    + "test_the_embeddings_are_as_many_as_the_tokens_or_the_tokenizer_is_the_models_own",
    "deepspeed={} needs zero-deepspeed": _HERE + "test_a_file_of_deepspeed_is_read_when_zero_deepspeed_is_installed",
    "start as many ranks with torchrun": _HERE + "test_a_file_of_deepspeed_for_two_ranks_is_started_on_two",
    "zero-train has {}: take one of them": _HERE + "test_a_file_of_deepspeed_is_written_as_its_table_says",
    "zero-train has no key for it: leave it out": _HERE + "test_a_file_of_deepspeed_is_written_as_its_table_says",
    "is not a number; change": _HERE + "test_a_question_is_asked_as_an_error_says",
    "ask in one line": "integration/zero_train/test_generate.py::"
    "test_a_prompt_and_each_line_of_stdin_are_answered_alike",
    "it has no config.yaml; name one": "integration/zero_train/test_generate.py::"
    "test_the_command_of_a_run_is_repeated_to_be_asked",
    "has no exported model": "integration/zero_train/test_generate.py::"
    "test_the_command_of_a_run_is_repeated_to_be_asked",
    "; change offload.parameters or offload.optimizer (with": "unit/zero_train/test_planning.py::"
    "test_an_arena_that_cannot_be_mapped_is_smaller_where_an_error_says",
    "save none with run.checkpoint_every=0": "unit/zero_train/test_planning.py::"
    "test_checkpoints_and_slab_need_room_on_the_disk_of_the_run_folder",
    "keep fewer with run.keep_checkpoints=1": "unit/zero_train/test_planning.py::"
    "test_checkpoints_and_slab_need_room_on_the_disk_of_the_run_folder",
    ", or continue it after step": "integration/zero_train/test_run_folder.py::test_the_way_out_that_is_named_works",
    "bring that text back, or continue": "integration/zero_train/test_run_folder.py::"
    "test_another_text_under_the_same_name_is_told",
    "the run stopped, out of memory": "integration/zero_train/test_out_of_memory.py::"
    "test_memory_that_runs_out_before_the_first_step_has_ways_out_that_need_less",
    "it goes on with the same command and run.resume=auto": "integration/zero_train/test_resume.py::"
    "test_after_ctrl_c_the_rest_is_the_same",
}

EXEMPT: dict[str, str] = {
    "upgrade it with pip install -U trl": "needs an old TRL",
    "# Measured by zero-train run.probe=true; save as": "the heading of a file that is printed",
    "ranks see different last checkpoints": "needs a second machine",
    "there is no validation loss, as none of": "the TRL of today leaves out such rows, of which none is then left",
    "cannot run on the CPU: {}; change one": "no optim and precision.states of today are refused: it guards later ones",
}
