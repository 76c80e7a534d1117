"""The advices of zero_core: which tests follow them. tests/advice.py says what the tables mean."""

from __future__ import annotations

FOLLOWED: dict[str, str] = {
    "write `optimizer = zero_core.shard(model, optimizer, ...)`": "test_the_optimizer_that_shard_returned_is_called",
    "call optimizer.step() or zero_grad() before": "test_gradients_before_shard_are_used_or_dropped",
    "give shard() the inner one": "test_the_inner_optimizer_is_given",
    "run the model once on a sample": "test_a_lazy_model_runs_once_on_a_sample",
    "use TiledLinear.from_linear": "test_a_linear_layer_is_tiled_as_a_class",
    "checkpoint.save(folder, model, optimizer) writes": "test_states_are_saved_by_the_calls_that_an_error_names",
    "Call optimizer.zero_grad() after each step()": "test_gradients_are_zeroed_after_each_step",
    "call it after the first step()": "test_a_state_is_written_after_the_first_step",
    "Call it between backward() and step()": "test_a_gradient_is_written_between_backward_and_step",
    "leave assign at False": "test_a_state_dict_is_loaded_by_copying",
    "has nowhere to put its bytes": "test_a_store_in_host_memory_sleeps_in_a_byte_store",
    "step() while the store sleeps": "test_a_store_in_host_memory_sleeps_in_a_byte_store",
    "name all models in one block": "test_models_that_a_block_runs_are_named_together",
    "name those that the block runs": "test_models_that_a_block_runs_are_named_together",
    "Set it back; what shall hold from the first step on": "unit/zero_core/test_options.py::"
    "test_a_change_that_torch_cannot_make_is_refused_before_the_step",
    "it needs whole parameters, and a rank has slices of them": "test_the_optimizers_that_are_named_run",
    "or use AdamW, Adam, SGD or Adagrad of torch.optim": "test_the_optimizers_that_are_named_run",
    "or pass param_dtype=": "integration/zero_core/test_bad_input.py::"
    "test_parameters_that_a_float32_master_cannot_hold",
    "lies over the memory of the parameter": "integration/zero_core/test_shared_memory.py::"
    "test_the_advice_against_shared_memory_works",
    "has the strides {}, with which several": "integration/zero_core/test_shared_memory.py::"
    "test_the_advice_against_shared_memory_works",
    "To let the other show its values": "integration/zero_core/test_shared_memory.py::"
    "test_the_advice_against_shared_memory_works",
}

EXEMPT: dict[str, str] = {
    "faulty, restore a checkpoint": "a drive that returns wrong bytes is replaced, not configured",
}

NOT_FOLLOWED: dict[str, int] = {
    "zero_core/averaging.py": 1,
    "zero_core/building/deferred.py": 4,
    "zero_core/building/init.py": 6,
    "zero_core/building/overlaps.py": 3,
    "zero_core/building/parts.py": 4,
    "zero_core/building/replay.py": 2,
    "zero_core/checkpoint/__init__.py": 2,
    "zero_core/checkpoint/files.py": 2,
    "zero_core/checkpoint/match.py": 3,
    "zero_core/checkpoint/pretrained.py": 3,
    "zero_core/checkpoint/safetensors.py": 2,
    "zero_core/checkpoint/shards.py": 1,
    "zero_core/comm/patience.py": 2,
    "zero_core/comm/ranks.py": 1,
    "zero_core/device.py": 1,
    "zero_core/full_values.py": 2,
    "zero_core/gathering.py": 3,
    "zero_core/memory.py": 1,
    "zero_core/optim/backward_updates.py": 1,
    "zero_core/optim/carried.py": 3,
    "zero_core/optim/device_store.py": 6,
    "zero_core/optim/elementwise.py": 2,
    "zero_core/optim/full_states.py": 4,
    "zero_core/optim/handover.py": 1,
    "zero_core/optim/optimizer.py": 5,
    "zero_core/runtime/attaching.py": 6,
    "zero_core/runtime/calls.py": 2,
    "zero_core/runtime/gradient.py": 1,
    "zero_core/runtime/gradient_access.py": 8,
    "zero_core/runtime/held.py": 4,
    "zero_core/runtime/hooks.py": 8,
    "zero_core/runtime/outputs.py": 1,
    "zero_core/runtime/parameter.py": 12,
    "zero_core/runtime/place.py": 4,
    "zero_core/runtime/scaling.py": 1,
    "zero_core/runtime/snapshots.py": 1,
    "zero_core/runtime/unit.py": 1,
    "zero_core/runtime/whole.py": 1,
    "zero_core/runtime/writes.py": 1,
    "zero_core/sharding.py": 12,
    "zero_core/sleeping.py": 1,
    "zero_core/unequal.py": 2,
}
