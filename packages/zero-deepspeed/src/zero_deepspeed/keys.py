"""The table of DeepSpeed's keys: what each becomes here, and which values it takes. Data.

Written for DeepSpeed 0.19.8, with keys that it has removed. The parameters of optimizers and schedules follow from
their classes (optimizers.py, schedules.py).
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    *("KEYS", "RENAMED", "SECTIONS", "Check", "Key", "anything", "flag", "nearest", "needless", "number", "numbers"),
    *("one_of", "refused", "text", "whole"),
]

Check = Callable[[Any], Any]  # returns a value as it is meant, or raises ValueError


def _fits(fits: bool, value: Any, what: str) -> Any:
    if not fits:
        raise ValueError(f"{value!r} is not {what}")
    return value


def whole(least: int = 0) -> Check:
    """Takes an integer of at least `least`, also as 5e8, which JSON reads as a float."""

    def check(value: Any) -> int:
        value = int(value) if isinstance(value, float) and value.is_integer() else value
        return int(_fits(type(value) is int and value >= least, value, f"an integer of at least {least}"))

    return check


def number(least: float = 0.0, most: float = math.inf) -> Check:
    def check(value: Any) -> Any:
        fits = type(value) in (int, float) and math.isfinite(value) and least <= value <= most
        return _fits(fits, value, "a number" + (f" from {least:g} to {most:g}" if least > -math.inf else ""))

    return check


def numbers(count: int | None = None) -> Check:
    """Takes a list of `count` numbers. None: of any length, one for each group, or a number for all of them."""

    def check(value: Any) -> Any:
        if count is None and not isinstance(value, (list, tuple)):
            return number(-math.inf)(value)
        _fits(isinstance(value, (list, tuple)) and count in (None, len(value)), value, f"{count or 'some'} numbers")
        return tuple(number(-math.inf)(item) for item in value)

    return check


def one_of(*allowed: Any) -> Check:
    def check(value: Any) -> Any:
        wanted = value.lower() if isinstance(value, str) else value
        fits = any(wanted == each and type(wanted) is type(each) for each in allowed)
        _fits(fits, value, f"one of {', '.join(map(repr, allowed))}")
        return wanted

    return check


def flag(value: Any) -> Any:
    return _fits(type(value) is bool, value, "true or false")


def text(value: Any) -> Any:
    return _fits(type(value) is str, value, "a text")


def anything(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Key:
    """What becomes of one key of DeepSpeed's.

    default: DeepSpeed's own. ours: the name that it has here. kind: "mapped", "needless" or "refused". remark: why it
    is needless, or what to do instead of it. off: the JSON of the only value of a refused key that asks for nothing;
    without it these are false, 0 and what is empty.
    """

    takes: Check = anything
    default: Any = None
    ours: str = ""
    remark: str = ""
    kind: str = "mapped"
    off: str = ""

    def asks(self, value: Any) -> bool:
        """Whether a value of a refused key asks for anything. A section asks for nothing where its switch is off."""
        if self.off:
            return json.dumps(value, separators=(",", ":")) != self.off
        if isinstance(value, Mapping):
            return any(value[name] for name in _SWITCHES if name in value) if _SWITCHES & {*value} else bool(value)
        return bool(value)


_SWITCHES = {"enabled", "deepcompile"}


def refused(remark: str, off: str = "") -> Key:
    return Key(remark=remark, kind="refused", off=off)


def needless(remark: str) -> Key:
    return Key(remark=remark, kind="needless")


_FLOATS = ("fp32", "float32", "bf16", "bfloat16", "fp16", "float16")
_HALVES = ("bf16", "bfloat16", "torch.bfloat16", "fp16", "float16", "half", "torch.float16")
_TIER = one_of("none", "cpu", "nvme")
_ELEMENTS = "elements there, bytes here"
_LEAST = f"{_ELEMENTS}: what stays unsharded between uses is the lesser of the two keys"
_MASTERS = "masters start from the model's own values, which DeepSpeed rounds first"
_SCALE = "fp16's loss scale"
_CONSTANT = "constant, it stops a run at a gradient that is not finite, where DeepSpeed skips the step"
_IN_CPU = "of NVMe, elements there and a share here, which needs their number: pass model="
_AUTOCAST = "gradients are reduced in the parameters' dtype, where DeepSpeed takes autocast's"

_MAPPED = {
    "train_batch_size": Key(whole(1), ours="train_batch_size"),
    "train_micro_batch_size_per_gpu": Key(whole(1), ours="micro_batch_size"),
    "gradient_accumulation_steps": Key(whole(1), ours="accumulate"),
    "gradient_clipping": Key(number(), 1.0, "max_grad_norm"),
    "communication_data_type": Key(one_of("fp32", "fp16", "bf16"), ours="reduce_dtype"),
    "dataloader_drop_last": Key(flag, False, "drop_last"),
    "zero_optimization.stage": Key(one_of(0, 1, 2, 3), 0, "stage"),
    "zero_optimization.stage3_prefetch_bucket_size": Key(whole(), 50_000_000, "prefetch_bytes", _ELEMENTS),
    "zero_optimization.stage3_max_live_parameters": Key(whole(), 1_000_000_000, "resident_bytes", _LEAST),
    "zero_optimization.stage3_max_reuse_distance": Key(whole(), 1_000_000_000, "resident_bytes", _LEAST),
    "zero_optimization.mics_shard_size": Key(lambda size: size if size == -1 else whole(1)(size), -1, "shard_size"),
    "zero_optimization.offload_optimizer.device": Key(_TIER, "none", "optimizer, gradients"),
    "zero_optimization.offload_optimizer.nvme_path": Key(text, ours="nvme_paths"),
    "zero_optimization.offload_optimizer.ratio": Key(number(0, 1), 1.0, "optimizer, gradients"),
    "zero_optimization.offload_param.device": Key(_TIER, "none", "parameters"),
    "zero_optimization.offload_param.nvme_path": Key(text, ours="nvme_paths"),
    "zero_optimization.offload_param.max_in_cpu": Key(whole(), 1_000_000_000, "parameters", _IN_CPU),
    "bf16.enabled": Key(flag, False, "param_dtype", _MASTERS),
    "fp16.enabled": Key(flag, False, "param_dtype", _MASTERS),
    "fp16.loss_scale": Key(number(), 0, _SCALE, _CONSTANT),
    "fp16.initial_scale_power": Key(whole(), 16, _SCALE),
    "fp16.loss_scale_window": Key(whole(1), 1000, _SCALE),
    "fp16.hysteresis": Key(whole(1), 2, _SCALE, "at stage 0 DeepSpeed has none, whatever the file says"),
    "fp16.consecutive_hysteresis": Key(flag, False, _SCALE),
    "fp16.min_loss_scale": Key(whole(1), 1, _SCALE),
    "torch_autocast.enabled": Key(flag, False, "autocast", _AUTOCAST),
    "torch_autocast.dtype": Key(one_of(*_HALVES), "bf16", "autocast"),
    "data_types.param_dtype": Key(one_of(*_FLOATS), ours="param_dtype"),
    "optimizer.type": Key(text, ours="optimizer"),
    "scheduler.type": Key(text, ours="schedule"),
}

_NEEDLESS = {
    "it changes no number: logs and profiles are the script's own (report_to of a Trainer, torch.profiler)": (
        "steps_per_print tensorboard wandb csv_monitor comet wall_clock_breakdown timers flops_profiler comms_logger "
        "activation_checkpointing.profile memory_breakdown dump_state autotuning log_level vocabulary_size pipeline "
        "disable_allgather"
    ),
    "call gc.disable() in the script": "disable_python_gc",
    "it only moves the division by the ranks: communication_data_type=fp32 is what avoids overflow": (
        "prescale_gradients gradient_predivide_factor"
    ),
    "all ranks are data parallel, and what cannot be followed is refused by name": (
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
        "zero.stage3_gather_16bit_weights_on_model_save"
    ),
    "a gradient that is not finite stops the run with an error": "bf16.check_grad_overflow",
    "micro-batches are added up in fp32, and buffers keep their dtype": (
        "data_types.grad_accum_dtype data_types.keep_in_fp32_modules"
    ),
    "parameters that no rank used in a step are left as they are": "zero.ignore_unused_parameters",
    "backward gathers from all ranks: secondary_shards of zero_hf.ZeroConfig keeps the second copy": (
        "zero.zero_hpz_partition_size"
    ),
    "units are gathered, reduced, updated and moved in buffers that the plan counts, ahead of their use": (
        "aio optimizer.legacy_fusion bf16.immediate_grad_update zero.contiguous_gradients zero.reduce_scatter "
        "zero.reduce_bucket_size zero.allgather_bucket_size zero.allgather_partitions zero.allgather_size "
        "zero.use_multi_rank_bucket_allreduce zero.overlap_comm zero.round_robin_gradients zero.parameter_alignment "
        "zero.compute_grad_norm zero.stage3_use_all_reduce_for_fetch_params zero.stage3_allgather_sequential "
        "zero.memory_efficient_linear zero.mics_hierarchical_params_gather zero.stage3_param_persistence_threshold "
        "zero.stage3_model_persistence_threshold zero.stage3_module_granularity_threshold zero.leaf_module "
        "zero.sub_group_size zero.cpu_offload_use_pin_memory zero.offload_optimizer.buffer_count "
        "zero.offload_optimizer.pin_memory zero.offload_optimizer.pipeline_read zero.offload_optimizer.pipeline_write "
        "zero.offload_optimizer.fast_init zero.offload_optimizer.cpuadam_cores_perc zero.offload_param.buffer_count "
        "zero.offload_param.buffer_size zero.offload_param.pin_memory zero.override_module_apply "
        "zero.log_trace_cache_warnings zero.enable_sanity_checks zero.save_muon_momentum_buffer_in_memory"
    ),
}

# Refused if they ask for anything. The way out is to leave them out, unless another is named.
_REFUSED = {
    "": (
        'sequence_parallel_size:1 tensor_parallel:{"autotp_size":1} expert_parallel data_efficiency elasticity '
        "weight_quantization datastates_ckpt compression_training sparse_attention sparse_gradients graph_harvesting "
        "quantize_training progressive_layer_drop curriculum_learning eigenvalue nebula zero.legacy_stage1 "
        "zero.zeropp_loco_param zero.load_from_fp32_weights:true zero.zenflow zero.zero_quantized_weights "
        "zero.zero_quantized_gradients zero.zero_quantized_nontrainable_weights zero.offload_optimizer.super_offload "
        "fp16.fp16_master_weights_and_grads bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states "
        "torch_autocast.lower_precision_safe_modules checkpoint.use_node_local_storage"
    ),
    ", and let the script call engine.set_gradient_accumulation_boundary(True), after which each step() updates": (
        "managed_gradient_accumulation:true"
    ),
    ", and multiply the loss by the number of ranks": 'gradient_allreduce_op:"mean"',
    ", and generate inside zero_core.gathered(model)": "hybrid_engine",
    ", and compile the blocks (for block in model.model.layers: block.compile())": "compile",
    ", and write bf16 or fp16": "amp",
    ", and cast inputs that are floats yourself": "fp16.auto_cast",
    ", and cast buffers before the model is sharded": "data_types.buffer_dtype",
    ', and call zero_offload.offload_activations(model, policy="host")': "activation_checkpointing.cpu_checkpointing",
}


def _named(names: str) -> list[str]:
    return [name.replace("zero.", "zero_optimization.", 1) for name in names.split()]


KEYS: dict[str, Key] = {
    **_MAPPED,
    **{key: needless(why) for why, names in _NEEDLESS.items() for key in _named(names)},
    **{
        key: refused(f"it is not followed here: leave it out{also}", off)
        for also, names in _REFUSED.items()
        for key, _, off in (name.partition(":") for name in _named(names))
    },
}

# Other names of keys: the key that is meant, and what true and false mean there.
_OFFLOADS = {True: "cpu", False: "none"}
RENAMED: dict[str, tuple[str, dict[Any, Any]]] = {
    "zero_optimization": ("zero_optimization.stage", {True: 1, False: 0}),
    "zero_optimization.cpu_offload": ("zero_optimization.offload_optimizer.device", _OFFLOADS),
    "zero_optimization.cpu_offload_param": ("zero_optimization.offload_param.device", _OFFLOADS),
    "zero_optimization.cpu_offload_params": ("zero_optimization.offload_param.device", _OFFLOADS),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        *("zero_optimization.stage3_gather_16bit_weights_on_model_save", {}),
    ),
    # DeepSpeed takes these without their prefix, too
    **{key.replace("stage3_", ""): (key, {}) for key in KEYS if key.startswith("zero_optimization.stage3_")},
    **{key.replace("bf16", "bfloat16", 1): (key, {}) for key in KEYS if key.startswith("bf16.")},
    "allgather_size": ("zero_optimization.allgather_size", {}),
}
SECTIONS = frozenset(key[:at] for key in (*KEYS, *RENAMED) for at, letter in enumerate(key) if letter == ".") | {
    *("optimizer.params", "scheduler.params"),
}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns the known key that is most like `name`: among those of its section first, then by its last part."""
    (section, _, last), names = name.rpartition("."), [key.rpartition(".") for key in known]
    inside = {each[2]: "".join(each) for each in names if each[0] == section}
    for among in (inside, {each[2]: "".join(each) for each in reversed(names)}):
        if found := difflib.get_close_matches(last, among, n=1, cutoff=0.7):
            return among[found[0]]
    return None
