"""Defines the table of DeepSpeed's keys: the name of each key here, and the values that it takes.

Written for DeepSpeed 0.19.8, with keys that it has removed. The parameters of optimizers and schedules follow from
their classes (optimizers.py, schedules.py).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple


class Takes(NamedTuple):
    """The values that a key takes. what: the same in words."""

    fits: Callable[[Any], bool]
    what: str


class Key(NamedTuple):
    """A key that is followed. default: DeepSpeed's own. ours: the name that the key has here."""

    takes: Takes
    default: Any = None
    ours: str = ""


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _one_of(*allowed: Any) -> Takes:
    return Takes(
        lambda value: any(value == each and type(value) is type(each) for each in allowed),
        f"one of {', '.join(map(repr, allowed))}",
    )


def _numbers(value: Any) -> bool:
    return isinstance(value, tuple) and all(map(_number, value))


_WHOLE = Takes(lambda value: type(value) is int and value >= 0, "an integer of at least 0")
_COUNT = Takes(lambda value: type(value) is int and value >= 1, "an integer of at least 1")
_POSITIVE = Takes(lambda value: _number(value) and value >= 0, "a number of at least 0")
_SHARE = Takes(lambda value: _number(value) and 0 <= value <= 1, "a number from 0 to 1")
_NUMBER = Takes(_number, "a number")
_PAIR = Takes(lambda value: _numbers(value) and len(value) == 2, "two numbers")  # all tuples of torch.optim are pairs
_TEXT = Takes(lambda value: isinstance(value, str), "a text")
_FLAG, _TIER = _one_of(True, False), _one_of("none", "cpu", "nvme")


def parameter(default: Any) -> Key:
    """Returns the key of an optimizer's or a schedule's parameter, which takes values of the kind of its default."""
    return Key({bool: _FLAG, str: _TEXT, tuple: _PAIR}.get(type(default), _NUMBER), default)


_ZERO = "zero_optimization."
_BILLION = 1_000_000_000

KEYS = {
    "train_batch_size": Key(_COUNT, None, "train_batch_size"),
    "train_micro_batch_size_per_gpu": Key(_COUNT, None, "micro_batch_size"),
    "gradient_accumulation_steps": Key(_COUNT, None, "accumulate"),
    "gradient_clipping": Key(_POSITIVE, 1.0, "max_grad_norm"),
    "communication_data_type": Key(_one_of("fp32", "fp16", "bf16"), None, "reduce_dtype"),
    "dataloader_drop_last": Key(_FLAG, False, "drop_last"),
    f"{_ZERO}stage": Key(_one_of(0, 1, 2, 3), 0, "stage"),
    f"{_ZERO}stage3_prefetch_bucket_size": Key(_WHOLE, 50_000_000, "prefetch_bytes"),
    f"{_ZERO}stage3_max_live_parameters": Key(_WHOLE, _BILLION, "resident_bytes"),
    f"{_ZERO}stage3_max_reuse_distance": Key(_WHOLE, _BILLION, "resident_bytes"),
    f"{_ZERO}mics_shard_size": Key(
        Takes(lambda value: value == -1 or _COUNT.fits(value), _COUNT.what), -1, "shard_size"
    ),
    f"{_ZERO}offload_optimizer.device": Key(_TIER, "none", "optimizer, gradients"),
    f"{_ZERO}offload_optimizer.nvme_path": Key(_TEXT, None, "nvme_paths"),
    f"{_ZERO}offload_optimizer.ratio": Key(_SHARE, 1.0, "optimizer, gradients"),
    f"{_ZERO}offload_param.device": Key(_TIER, "none", "parameters"),
    f"{_ZERO}offload_param.nvme_path": Key(_TEXT, None, "nvme_paths"),
    f"{_ZERO}offload_param.max_in_cpu": Key(_WHOLE, _BILLION, "parameters"),
    "bf16.enabled": Key(_FLAG, False, "param_dtype"),
    "fp16.enabled": Key(_FLAG, False, "param_dtype"),
    "fp16.loss_scale": Key(_POSITIVE, 0, "loss_scale"),
    "fp16.initial_scale_power": Key(_WHOLE, 16, "loss_scale"),
    "fp16.loss_scale_window": Key(_COUNT, 1000, "loss_scale"),
    "fp16.hysteresis": Key(_COUNT, 2, "loss_scale"),
    "fp16.consecutive_hysteresis": Key(_FLAG, False, "loss_scale"),
    "fp16.min_loss_scale": Key(_COUNT, 1, "loss_scale"),
    "torch_autocast.enabled": Key(_FLAG, False, "autocast"),
    "torch_autocast.dtype": Key(_one_of("bf16", "bfloat16", "torch.bfloat16"), "bf16", "autocast"),
    "optimizer.type": Key(_TEXT, None, "optimizer"),
    "scheduler.type": Key(_TEXT, None, "schedule"),
}


def _by_key(texts: Mapping[str, str]) -> dict[str, str]:
    """Maps each key to its text. `texts` maps a text to its keys, where zero.X abbreviates zero_optimization.X."""
    return {key.replace("zero.", _ZERO, 1): text for text, keys in texts.items() for key in keys.split()}


NEEDLESS = _by_key(
    {
        "it changes no number: ranks are data parallel, and logs, profiles and gc.disable() are the script's own": (
            "steps_per_print tensorboard wandb csv_monitor comet wall_clock_breakdown timers flops_profiler pipeline "
            "comms_logger activation_checkpointing.profile memory_breakdown dump_state autotuning log_level "
            "vocabulary_size disable_allgather disable_python_gc prescale_gradients gradient_predivide_factor "
            "data_parallel_size seq_parallel_communication_data_type use_data_before_expert_parallelism "
            "activation_checkpointing.partition_activations zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"
        ),
        "the JSON alone recomputes nothing in DeepSpeed either: use model.gradient_checkpointing_enable() or "
        "torch.utils.checkpoint": (
            "activation_checkpointing.contiguous_memory_optimization activation_checkpointing.number_checkpoints "
            "activation_checkpointing.synchronize_checkpoint_boundary"
        ),
        "a checkpoint loads at any number of ranks, and zero_core.save_pretrained writes safetensors from the shards": (
            "checkpoint.tag_validation checkpoint.load_universal checkpoint.parallel_write checkpoint.writer "
            "checkpoint.checkpoint_serialization zero.elastic_checkpoint zero.pipeline_loading_checkpoint "
            "zero.stage3_gather_16bit_weights_on_model_save zero.stage3_gather_fp16_weights_on_model_save"
        ),
        "micro-batches are added up in fp32, buffers keep their dtype, a gradient that is not finite stops the run, "
        "and parameters that no rank used are left as they are": (
            "data_types.grad_accum_dtype data_types.keep_in_fp32_modules bf16.check_grad_overflow "
            "zero.ignore_unused_parameters"
        ),
        "backward gathers from all ranks: secondary_shards of zero_hf.ZeroConfig keeps the second copy": (
            "zero.zero_hpz_partition_size"
        ),
        "units are gathered, reduced, updated and moved in buffers that the plan counts, ahead of their use": (
            "aio allgather_size optimizer.legacy_fusion optimizer.params.foreach optimizer.params.fused "
            "optimizer.params.set_grad_none bf16.immediate_grad_update zero.contiguous_gradients zero.reduce_scatter "
            "zero.reduce_bucket_size zero.allgather_bucket_size zero.allgather_partitions zero.allgather_size "
            "zero.use_multi_rank_bucket_allreduce zero.overlap_comm zero.round_robin_gradients zero.leaf_module "
            "zero.compute_grad_norm zero.stage3_use_all_reduce_for_fetch_params zero.stage3_allgather_sequential "
            "zero.memory_efficient_linear zero.mics_hierarchical_params_gather zero.parameter_alignment "
            "zero.stage3_param_persistence_threshold zero.stage3_model_persistence_threshold zero.sub_group_size "
            "zero.stage3_module_granularity_threshold zero.cpu_offload_use_pin_memory zero.enable_sanity_checks "
            "zero.offload_optimizer.buffer_count zero.offload_optimizer.pin_memory zero.offload_optimizer.fast_init "
            "zero.offload_optimizer.pipeline_read zero.offload_optimizer.pipeline_write "
            "zero.offload_optimizer.cpuadam_cores_perc zero.offload_param.buffer_count zero.offload_param.buffer_size "
            "zero.offload_param.pin_memory zero.override_module_apply zero.log_trace_cache_warnings "
            "zero.save_muon_momentum_buffer_in_memory"
        ),
    }
)

# Keys that are refused if they ask for anything, by the way out besides leaving them out.
REFUSED = _by_key(
    {
        "": (
            "sequence_parallel_size tensor_parallel expert_parallel data_efficiency elasticity weight_quantization "
            "datastates_ckpt compression_training sparse_attention sparse_gradients graph_harvesting quantize_training "
            "progressive_layer_drop curriculum_learning eigenvalue nebula zero.legacy_stage1 zero.zeropp_loco_param "
            "zero.load_from_fp32_weights zero.zenflow zero.zero_quantized_weights zero.zero_quantized_gradients "
            "zero.zero_quantized_nontrainable_weights zero.offload_optimizer.super_offload "
            "fp16.fp16_master_weights_and_grads bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states "
            "torch_autocast.lower_precision_safe_modules checkpoint.use_node_local_storage "
            "optimizer.params.fp32_optimizer_states optimizer.params.bias_correction"
        ),
        ", and let the script call engine.set_gradient_accumulation_boundary(True), after which each step() updates": (
            "managed_gradient_accumulation"
        ),
        ", and multiply the loss by the number of ranks": "gradient_allreduce_op",
        ", and generate inside zero_core.gathered(model)": "hybrid_engine",
        ", and compile the blocks (for block in model.model.layers: block.compile())": "compile",
        ", and write bf16 or fp16": "amp data_types.param_dtype",
        ", and write gradient_clipping at the top of the file": "optimizer.params.max_grad_norm",
        ", and cast inputs that are floats yourself": "fp16.auto_cast",
        ", and cast buffers before the model is sharded": "data_types.buffer_dtype",
        ', and call zero_offload.offload_activations(model, policy="host")': (
            "activation_checkpointing.cpu_checkpointing"
        ),
    }
)
_ASKS_FOR_NOTHING = {  # refused keys whose neutral value is not false, 0 or empty, and that value
    "sequence_parallel_size": 1,
    "tensor_parallel": {"autotp_size": 1},
    "managed_gradient_accumulation": True,
    "gradient_allreduce_op": "mean",
    f"{_ZERO}load_from_fp32_weights": True,
    "optimizer.params.fp32_optimizer_states": True,
    "optimizer.params.bias_correction": True,
}


def asks(key: str, value: Any) -> bool:
    """Returns whether a refused key's value asks for anything. A section asks for nothing if its switch is off."""
    if key in _ASKS_FOR_NOTHING:
        return bool(value != _ASKS_FOR_NOTHING[key])
    section = value if isinstance(value, Mapping) else {}
    switches = [section[name] for name in ("enabled", "deepcompile") if name in section]
    return any(switches) if switches else bool(value)


# Other names of keys: the key that is meant, and what true means there; false means its default.
RENAMED: dict[str, tuple[str, Any]] = {
    "zero_optimization": (f"{_ZERO}stage", 1),
    f"{_ZERO}cpu_offload": (f"{_ZERO}offload_optimizer.device", "cpu"),
    f"{_ZERO}cpu_offload_param": (f"{_ZERO}offload_param.device", "cpu"),
    f"{_ZERO}cpu_offload_params": (f"{_ZERO}offload_param.device", "cpu"),
    # DeepSpeed takes these without their prefix, too
    **{key.replace("stage3_", ""): (key, None) for key in (*KEYS, *NEEDLESS) if key.startswith(f"{_ZERO}stage3_")},
    **{f"bfloat16.{key[5:]}": (key, None) for key in (*KEYS, *NEEDLESS, *REFUSED) if key.startswith("bf16.")},
}
_ALL = (*KEYS, *NEEDLESS, *REFUSED, *RENAMED)
SECTIONS = {key[:at] for key in _ALL for at, letter in enumerate(key) if letter == "."} | {"scheduler.params"}


def nearest(name: str, more: Iterable[str]) -> str | None:
    """Returns the key, or one of `more`, whose last part is most like that of `name`: first in its section."""
    section, _, last = name.rpartition(".")
    known = sorted((*sorted(SECTIONS), *_ALL, *more), key=lambda key: key.rpartition(".")[0] == section)
    by_last = {key.rpartition(".")[2]: key for key in known}
    return next((by_last[end] for end in difflib.get_close_matches(last, by_last, n=1, cutoff=0.7)), None)
