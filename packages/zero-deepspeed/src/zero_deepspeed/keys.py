"""The table of DeepSpeed's keys: which are mapped, needless or refused, and what values they take. Data.

Written for DeepSpeed 0.19.8; keys of earlier versions that it has removed are in the table, too. What a mapped key
becomes is in `translation`; the parameters of optimizers and schedules are in `optimizers` and `schedules`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .values import Check, anything, flag, number, one_of, text, whole

__all__ = ["KEYS", "RENAMED", "SECTIONS", "Key", "mapped", "nearest", "needless", "refused"]


@dataclass(frozen=True)
class Key:
    """What becomes of one key of DeepSpeed's.

    kind: "mapped", "needless" or "refused". takes: returns a value of a mapped key as it is meant, or raises
    ValueError. default: DeepSpeed's own. ours: the name that it has here. remark: why it is needless, or why it is
    refused and what to write instead. off: says of a value of a refused key that it asks for nothing.
    """

    kind: str
    takes: Check = anything
    default: Any = None
    ours: str = ""
    remark: str = ""
    off: Callable[[Any], bool] = lambda value: not value


def mapped(takes: Check, default: Any = None, ours: str = "", remark: str = "") -> Key:
    return Key("mapped", takes, default, ours, remark)


def needless(remark: str) -> Key:
    return Key("needless", remark=remark)


def refused(remark: str, off: Callable[[Any], bool] = lambda value: not value) -> Key:
    return Key("refused", remark=remark, off=off)


def _disabled(value: Any) -> bool:
    """Whether a section that DeepSpeed turns on with "enabled" asks for nothing."""
    return not value or isinstance(value, Mapping) and not value.get("enabled", False)


def _one_way(value: Any) -> bool:
    """Whether a section of tensor parallelism asks for one rank."""
    if not isinstance(value, Mapping):
        return not value
    inner = value.get("tensor_parallel") or value.get("tp")
    sizes = (value.get("autotp_size"), inner.get("tp_size") if isinstance(inner, Mapping) else inner)
    return all(size in (None, 0, 1) for size in sizes)


def _eager(value: Any) -> bool:
    """Whether a section of compilation asks for none."""
    return not value or isinstance(value, Mapping) and not value.get("deepcompile") and not value.get("enabled")


_LEGACY = "DeepSpeed has removed it, too: leave it out"
_ZERO = "zero_optimization."
_MASTERS = (
    'masters are in fp32 here: leave it out; ZeroConfig(states="split") keeps a bf16 parameter\'s in 2 more bytes'
)
_FLOATS = one_of("fp32", "float32", "bf16", "bfloat16", "fp16", "float16")
_HALVES = one_of("bf16", "bfloat16", "torch.bfloat16", "fp16", "float16", "half", "torch.float16")
_TIER = one_of("none", "cpu", "nvme")
_ELEMENTS = "elements there, bytes here"
_STATES = "optimizer, gradients"
_LEAST = f"{_ELEMENTS}: what stays unsharded between uses is the lesser of the two keys"
_SCALE = "fp16's loss scale"

_MAPPED = {
    "train_batch_size": mapped(whole(1, exponent=False), ours="train_batch_size"),
    "train_micro_batch_size_per_gpu": mapped(whole(1, exponent=False), ours="micro_batch_size"),
    "gradient_accumulation_steps": mapped(whole(1, exponent=False), ours="accumulate"),
    "gradient_clipping": mapped(number(), 1.0, "max_grad_norm"),
    "communication_data_type": mapped(one_of("fp32", "fp16", "bf16"), ours="reduce_dtype"),
    "dataloader_drop_last": mapped(flag, False, "drop_last"),
    "zero_optimization.stage": mapped(one_of(0, 1, 2, 3), 0, "stage"),
    "zero_optimization.stage3_prefetch_bucket_size": mapped(whole(), 50_000_000, "prefetch_bytes", _ELEMENTS),
    "zero_optimization.stage3_max_live_parameters": mapped(whole(), 1_000_000_000, "resident_bytes", _LEAST),
    "zero_optimization.stage3_max_reuse_distance": mapped(whole(), 1_000_000_000, "resident_bytes", _LEAST),
    "zero_optimization.mics_shard_size": mapped(
        lambda value: value if value == -1 else whole(1)(value), -1, "shard_size"
    ),
    "zero_optimization.offload_optimizer.device": mapped(_TIER, "none", _STATES),
    "zero_optimization.offload_optimizer.nvme_path": mapped(text, ours="nvme_paths"),
    "zero_optimization.offload_optimizer.ratio": mapped(number(0, 1), 1.0, _STATES),
    "zero_optimization.offload_param.device": mapped(_TIER, "none", "parameters"),
    "zero_optimization.offload_param.nvme_path": mapped(text, ours="nvme_paths"),
    "zero_optimization.offload_param.max_in_cpu": mapped(
        whole(),
        1_000_000_000,
        "parameters",
        "of NVMe, elements there and a share here, which needs their number: pass model=",
    ),
    "bf16.enabled": mapped(
        flag, False, "param_dtype", "masters start from the model's own values, which DeepSpeed rounds first"
    ),
    "fp16.enabled": mapped(
        flag, False, "param_dtype", "masters start from the model's own values, which DeepSpeed rounds first"
    ),
    "fp16.loss_scale": mapped(
        number(), 0, _SCALE, "constant, it stops a run at a gradient that is not finite, where DeepSpeed skips the step"
    ),
    "fp16.initial_scale_power": mapped(whole(), 16, _SCALE),
    "fp16.loss_scale_window": mapped(whole(1), 1000, _SCALE),
    "fp16.hysteresis": mapped(whole(1), 2, _SCALE, "at stage 0 DeepSpeed has none, whatever the file says"),
    "fp16.consecutive_hysteresis": mapped(flag, False, _SCALE),
    "fp16.min_loss_scale": mapped(whole(1), 1, _SCALE),
    "torch_autocast.enabled": mapped(
        flag, False, "autocast", "gradients are reduced in the parameters' dtype, where DeepSpeed takes autocast's"
    ),
    "torch_autocast.dtype": mapped(_HALVES, "bf16", "autocast"),
    "data_types.param_dtype": mapped(_FLOATS, ours="param_dtype"),
    "optimizer.type": mapped(text, ours="optimizer"),
    "scheduler.type": mapped(text, ours="schedule"),
}

# Why keys are needless, and which.
_NEEDLESS = {
    "it only moves the division by the ranks: communication_data_type=fp32 is what avoids overflow": (
        "prescale_gradients gradient_predivide_factor"
    ),
    "logs are the loop's own: a Trainer has report_to, and optimizer.grad_norm is there for others": (
        "steps_per_print tensorboard wandb csv_monitor comet"
    ),
    "torch.profiler shows what a step waits for, and its operations, memory and collectives": (
        "wall_clock_breakdown timers flops_profiler comms_logger activation_checkpointing.profile"
    ),
    "call gc.disable() in the script": "disable_python_gc",
    "the plan and the table of keys, which are printed, have it": "memory_breakdown dump_state autotuning",
    "it changes no value": "log_level vocabulary_size pipeline disable_allgather",
    "all ranks are data parallel": (
        "data_parallel_size seq_parallel_communication_data_type use_data_before_expert_parallelism "
        "activation_checkpointing.partition_activations"
    ),
    "every optimizer that looks at one element at a time works, on the host in zero-optim-cpu's kernels where it has "
    "them, and others are refused by name": "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
    "zero-nvme picks io_uring, Linux AIO or threads, and its queue, by itself": (
        "aio.block_size aio.queue_depth aio.intra_op_parallelism aio.single_submit aio.overlap_events aio.thread_count "
        "aio.use_gds"
    ),
    "the JSON alone recomputes nothing in DeepSpeed either: use model.gradient_checkpointing_enable() or "
    "torch.utils.checkpoint": (
        "activation_checkpointing.contiguous_memory_optimization activation_checkpointing.number_checkpoints "
        "activation_checkpointing.synchronize_checkpoint_boundary"
    ),
    "a checkpoint is of all ranks, which compare their parts, and any number of ranks reads it": (
        "checkpoint.tag_validation checkpoint.load_universal checkpoint.parallel_write "
        "checkpoint.checkpoint_serialization checkpoint.writer"
    ),
    "one kernel updates a whole tile": "optimizer.legacy_fusion",
    "gradients leave for the shards as they arrive": "bf16.immediate_grad_update",
    "a gradient that is not finite stops the run with an error, and nothing is updated": "bf16.check_grad_overflow",
    "micro-batches are added up in fp32: 4 bytes an element where there are several": "data_types.grad_accum_dtype",
    "buffers keep their dtype": "data_types.keep_in_fp32_modules",
}
_NEEDLESS_ZERO = {
    "units are gathered and reduced one at a time, ahead of their use, in buffers that the plan counts": (
        "contiguous_gradients reduce_scatter reduce_bucket_size allgather_bucket_size allgather_partitions "
        "allgather_size use_multi_rank_bucket_allreduce overlap_comm round_robin_gradients parameter_alignment "
        "compute_grad_norm stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential memory_efficient_linear "
        "mics_hierarchical_params_gather stage3_param_persistence_threshold stage3_model_persistence_threshold "
        "stage3_module_granularity_threshold leaf_module"
    ),
    "a checkpoint loads at any number of ranks, each reads its own slices, and zero_core.save_pretrained writes "
    "safetensors from the shards": (
        "elastic_checkpoint stage3_gather_16bit_weights_on_model_save pipeline_loading_checkpoint"
    ),
    "parameters that no rank used in a step are left as they are": "ignore_unused_parameters",
    "updates go tile by tile, in buffers that are planned, not set, and reads and writes run beside them": (
        "sub_group_size cpu_offload_use_pin_memory offload_optimizer.buffer_count offload_optimizer.pin_memory "
        "offload_optimizer.pipeline_read offload_optimizer.pipeline_write offload_optimizer.fast_init "
        "offload_optimizer.cpuadam_cores_perc offload_param.buffer_count offload_param.buffer_size "
        "offload_param.pin_memory"
    ),
    "the checks between ranks are always on, nothing is patched, and there is no trace": (
        "override_module_apply log_trace_cache_warnings enable_sanity_checks"
    ),
    "there is no Muon": "save_muon_momentum_buffer_in_memory",
    "backward gathers from all ranks, which takes less memory and more traffic; secondary_shards of zero_hf.ZeroConfig "
    "keeps the second copy": "zero_hpz_partition_size",
}

_REFUSED = {
    "managed_gradient_accumulation": refused(
        "a step is the micro-batches that the JSON says: leave it out, and let the script call "
        "engine.set_gradient_accumulation_boundary(True), after which each step() updates",
        lambda value: value is True,
    ),
    "gradient_allreduce_op": refused(
        "gradients are averaged over the ranks: leave it out, and multiply the loss by the number of ranks",
        lambda value: value == "mean",
    ),
    "sequence_parallel_size": refused(
        "there is no sequence parallelism: all ranks are data parallel; leave it out", lambda value: value == 1
    ),
    "hybrid_engine": refused(
        "its kernels for generation are not here: generate inside zero_core.gathered(model)", _disabled
    ),
    "tensor_parallel": refused(
        "layers are not split over ranks, parameters are sharded instead: leave it out, at stage 3", _one_way
    ),
    "expert_parallel": refused("experts are sharded like all parameters: leave it out, at stage 3", _disabled),
    "compile": refused(
        "DeepCompile is not here: leave it out, and compile the blocks (for block in model.model.layers: "
        "block.compile())",
        _eager,
    ),
    "data_efficiency": refused(
        "it chooses samples and drops tokens: leave it out, and do that in the data set", _disabled
    ),
    "weight_quantization": refused("weights are not quantised while training: leave it out"),
    "datastates_ckpt": refused("checkpoints are written before save() returns: leave it out"),
    "elasticity": refused(
        "batch sizes do not follow the number of ranks: write them out; a checkpoint loads at any", _disabled
    ),
    **dict.fromkeys(("compression_training", "sparse_attention", "sparse_gradients"), refused(_LEGACY)),
    **dict.fromkeys(("graph_harvesting", f"{_ZERO}legacy_stage1", f"{_ZERO}zeropp_loco_param"), refused(_LEGACY)),
    **dict.fromkeys(
        ("quantize_training", "progressive_layer_drop", "curriculum_learning", "eigenvalue", "nebula"),
        refused(_LEGACY, _disabled),
    ),
    "amp": refused("NVIDIA's Apex is not here: write bf16 or fp16", _disabled),
    "zero_optimization.load_from_fp32_weights": refused(
        "masters are read where a checkpoint has them: leave it out, or load the weights alone",
        lambda value: value is True,
    ),
    "zero_optimization.zenflow": refused(
        "it updates parameters with old gradients: leave it out; updates overlap the next forward exactly"
    ),
    "zero_optimization.zero_quantized_weights": refused(
        "gathered weights would be rounded: leave it out, or give zero_core.shard your own collectives="
    ),
    "zero_optimization.zero_quantized_nontrainable_weights": refused(
        "frozen weights would be rounded: leave it out, and load the base quantised, by bitsandbytes or torchao"
    ),
    "zero_optimization.zero_quantized_gradients": refused(
        "gradients would be rounded to 4 bits: leave it out; communication_data_type=bf16 halves their bytes"
    ),
    "zero_optimization.offload_optimizer.super_offload": refused(
        "it steps before it knows the norm, and steps back: leave it out; updates overlap exactly here"
    ),
    "bf16.bf16_master_weights_and_grads": refused(_MASTERS),
    "bf16.bf16_optimizer_states": refused(
        'leave it out; the nearest is ZeroConfig(states="split_bf16m"), which keeps one moment in bf16'
    ),
    "fp16.auto_cast": refused("inputs are not cast: leave it out, and cast those that are floats yourself"),
    "fp16.fp16_master_weights_and_grads": refused("masters are in fp32 here: leave it out"),
    "torch_autocast.lower_precision_safe_modules": refused(
        "parameters are gathered in their own dtype: leave it out; autocast casts what torch lists"
    ),
    "data_types.buffer_dtype": refused(
        "buffers keep their dtype: leave it out, and cast them before the model is sharded"
    ),
    "activation_checkpointing.cpu_checkpointing": refused(
        'leave it out, and call zero_offload.offload_activations(model, policy="host")'
    ),
    "checkpoint.use_node_local_storage": refused(
        "each rank writes its part into one folder: leave it out, and save to a folder that all see"
    ),
}

KEYS: dict[str, Key] = {
    **_MAPPED,
    **{key: needless(why) for why, names in _NEEDLESS.items() for key in names.split()},
    **{_ZERO + key: needless(why) for why, names in _NEEDLESS_ZERO.items() for key in names.split()},
    **_REFUSED,
}

# Other names of keys: the key that is meant, and what true and false mean there.
RENAMED: dict[str, tuple[str, dict[Any, Any]]] = {
    "zero_optimization": ("zero_optimization.stage", {True: 1, False: 0}),
    "zero_optimization.cpu_offload": ("zero_optimization.offload_optimizer.device", {True: "cpu", False: "none"}),
    "zero_optimization.cpu_offload_param": ("zero_optimization.offload_param.device", {True: "cpu", False: "none"}),
    "zero_optimization.cpu_offload_params": ("zero_optimization.offload_param.device", {True: "cpu", False: "none"}),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        {},
    ),
    **{
        key.replace("stage3_", ""): (key, {})
        for key in KEYS
        if key.startswith("zero_optimization.stage3_")  # DeepSpeed takes these without their prefix, too
    },
    **{key.replace("bf16", "bfloat16", 1): (key, {}) for key in KEYS if key.startswith("bf16.")},
    "allgather_size": ("zero_optimization.allgather_size", {}),
}
SECTIONS = frozenset(key[:at] for key in (*KEYS, *RENAMED) for at, letter in enumerate(key) if letter == ".") | {
    "optimizer.params",
    "scheduler.params",
}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns the known key that is most like `name`: among those of its section first, then by its last part."""
    names = list(known)
    section, _, last = name.rpartition(".")
    inside = {key.rpartition(".")[2]: key for key in names if key.rpartition(".")[0] == section}
    for among in (inside, {key.rpartition(".")[2]: key for key in reversed(names)}):
        found = [key for key in among if key == last or len(last) > 6 and key.startswith(last)][:1]
        found = found or difflib.get_close_matches(last, list(among), n=1, cutoff=0.7)
        if found:
            return among[found[0]]
    return None
