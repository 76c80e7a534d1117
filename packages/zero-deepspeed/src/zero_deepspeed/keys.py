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

    kind: "mapped", "needless" or "refused". takes: returns a value as it is meant, or raises ValueError. remark: why it
    is needless, or why it is refused and what to write instead. default: DeepSpeed's own. off: says of a value of a
    refused key that it asks for nothing.
    """

    kind: str
    takes: Check
    remark: str = ""
    default: Any = None
    off: Callable[[Any], bool] = lambda value: not value


def mapped(takes: Check, default: Any = None, remark: str = "") -> Key:
    return Key("mapped", takes, remark, default)


def needless(takes: Check, remark: str) -> Key:
    return Key("needless", takes, remark)


def refused(takes: Check, remark: str, off: Callable[[Any], bool] = lambda value: not value) -> Key:
    return Key("refused", takes, remark, off=off)


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


_GATHERS = "units are gathered and reduced one at a time, ahead of their use, in buffers that the plan counts"
_DIVIDES = "it only moves the division by the ranks: communication_data_type=fp32 is what avoids overflow"
_LOGS = "logs are the loop's own: a Trainer has report_to, and optimizer.grad_norm is there for others"
_PLANNED = "buffers of the tiers are planned, not set: the plan names them"
_READS = "reads and writes run beside the update by themselves, with an error for each request that fails"
_AIO = "zero-nvme picks io_uring, Linux AIO or threads, and its queue, by itself"
_LEGACY = "DeepSpeed has removed it, too: leave it out"
_RECOMPUTES = (
    "the JSON alone recomputes nothing in DeepSpeed either: use model.gradient_checkpointing_enable() or "
    "torch.utils.checkpoint"
)

_TOP: dict[str, Key] = {
    "train_batch_size": mapped(whole(1, exponent=False)),
    "train_micro_batch_size_per_gpu": mapped(whole(1, exponent=False)),
    "gradient_accumulation_steps": mapped(whole(1, exponent=False)),
    "managed_gradient_accumulation": refused(
        flag,
        "a step is the micro-batches that the JSON says: leave it out, and let the script call "
        "engine.set_gradient_accumulation_boundary(True), after which each step() updates",
        lambda value: value,
    ),
    "gradient_clipping": mapped(number(), 1.0),
    "communication_data_type": mapped(one_of("fp32", "fp16", "bf16")),
    "seq_parallel_communication_data_type": needless(anything, "there is no sequence parallelism"),
    "prescale_gradients": needless(flag, _DIVIDES),
    "gradient_predivide_factor": needless(number(), _DIVIDES),
    "gradient_allreduce_op": refused(
        one_of("mean", "sum"),
        "gradients are averaged over the ranks: leave it out, and multiply the loss by the number of ranks",
        lambda value: value == "mean",
    ),
    "disable_allgather": needless(flag, "DeepSpeed reads it and does nothing with it"),
    "sequence_parallel_size": refused(
        whole(1),
        "there is no sequence parallelism: all ranks are data parallel; leave it out",
        lambda value: value == 1,
    ),
    "data_parallel_size": needless(whole(1), "all ranks are data parallel"),
    "use_data_before_expert_parallelism": needless(flag, "there is no expert parallelism"),
    "zero_allow_untested_optimizer": needless(
        flag, "every optimizer that looks at one element at a time works, and others are refused by name"
    ),
    "zero_force_ds_cpu_optimizer": needless(
        flag, "torch's optimizer is updated on the host by zero-optim-cpu's kernels where it has them"
    ),
    "dataloader_drop_last": mapped(flag, False),
    "steps_per_print": needless(anything, _LOGS),
    "wall_clock_breakdown": needless(flag, "torch.profiler and zero_offload.Timeline show what a step waits for"),
    "memory_breakdown": needless(flag, "the plan that is printed before training has it"),
    "dump_state": needless(flag, "zero-hf translate prints what was read"),
    "log_level": needless(anything, "nothing prints from this library"),
    "disable_python_gc": needless(flag, "call gc.disable() in the script"),
    "vocabulary_size": needless(anything, "DeepSpeed only warns where it is no multiple of 8"),
    "pipeline": needless(anything, "it is for DeepSpeed's PipelineModule only, which is not here"),
    "timers": needless(anything, "torch.profiler shows what a step waits for"),
    "flops_profiler": needless(anything, "torch.profiler counts operations, with_flops=True"),
    "comms_logger": needless(anything, "torch.profiler shows collectives"),
    "tensorboard": needless(anything, _LOGS),
    "wandb": needless(anything, _LOGS),
    "csv_monitor": needless(anything, _LOGS),
    "comet": needless(anything, _LOGS),
    "autotuning": needless(
        anything, "it is a mode of DeepSpeed's launcher; zero-train run.dry=true prints the plan of any settings"
    ),
    "hybrid_engine": refused(
        anything, "its kernels for generation are not here: generate inside zero_core.gathered(model)", _disabled
    ),
    "tensor_parallel": refused(
        anything, "layers are not split over ranks, parameters are sharded instead: leave it out, at stage 3", _one_way
    ),
    "expert_parallel": refused(
        anything, "experts are sharded like all parameters: leave it out, at stage 3", _disabled
    ),
    "compile": refused(
        anything,
        "DeepCompile is not here: leave it out, and compile the blocks (for block in model.model.layers: "
        "block.compile())",
        _eager,
    ),
    "data_efficiency": refused(
        anything, "it chooses samples and drops tokens: leave it out, and do that in the data set", _disabled
    ),
    "weight_quantization": refused(anything, "weights are not quantised while training: leave it out"),
    "datastates_ckpt": refused(anything, "checkpoints are written before save() returns: leave it out"),
    "elasticity": refused(
        anything, "batch sizes do not follow the number of ranks: write them out; a checkpoint loads at any", _disabled
    ),
    "compression_training": refused(anything, f"weights are not compressed while training. {_LEGACY}"),
    "quantize_training": refused(anything, f"weights are not quantised while training. {_LEGACY}", _disabled),
    "progressive_layer_drop": refused(anything, f"layers are not dropped. {_LEGACY}", _disabled),
    "curriculum_learning": refused(anything, f"the data set chooses the samples. {_LEGACY}", _disabled),
    "sparse_attention": refused(anything, f"attention is the model's own. {_LEGACY}"),
    "sparse_gradients": refused(flag, f"gradients of embeddings are dense. {_LEGACY}"),
    "eigenvalue": refused(anything, _LEGACY[0].upper() + _LEGACY[1:], _disabled),
    "amp": refused(anything, "NVIDIA's Apex is not here: write bf16 or fp16", _disabled),
    "nebula": refused(anything, f"checkpoints are written to folders. {_LEGACY}", _disabled),
    "graph_harvesting": refused(flag, f"no CUDA graphs are captured. {_LEGACY}"),
}

_ZERO: dict[str, Key] = {
    "stage": mapped(one_of(0, 1, 2, 3), 0),
    "contiguous_gradients": needless(flag, "gradients go into buffers of one unit as they arrive"),
    "reduce_scatter": needless(flag, "it reduces to the shards where there are any"),
    "reduce_bucket_size": needless(whole(1), _GATHERS),
    "allgather_bucket_size": needless(whole(), _GATHERS),
    "allgather_partitions": needless(flag, _GATHERS),
    "allgather_size": needless(whole(), _GATHERS),
    "use_multi_rank_bucket_allreduce": needless(flag, _GATHERS),
    "overlap_comm": needless(flag, "communication overlaps with computation by itself where there are streams"),
    "round_robin_gradients": needless(flag, "a rank copies the gradients of its own shards only"),
    "parameter_alignment": needless(flag, "shards are aligned to 128 bytes"),
    "compute_grad_norm": needless(flag, "the norm costs no pass of its own, and clipping needs it"),
    "load_from_fp32_weights": refused(
        flag,
        "masters are read where a checkpoint has them: leave it out, or load the weights alone",
        lambda value: value,
    ),
    "elastic_checkpoint": needless(flag, "a checkpoint loads at any number of ranks"),
    "ignore_unused_parameters": needless(flag, "parameters that no rank used in a step are left as they are"),
    "legacy_stage1": refused(flag, "DeepSpeed has removed it, too: leave it out; stage 1 is stage 1"),
    "sub_group_size": needless(whole(), "updates go tile by tile; ZeroConfig.tile_numel is the size of a tile"),
    "stage3_prefetch_bucket_size": mapped(whole(), 50_000_000),
    "stage3_max_live_parameters": mapped(whole(), 1_000_000_000),
    "stage3_max_reuse_distance": mapped(whole(), 1_000_000_000),
    "stage3_param_persistence_threshold": needless(
        whole(), "small parameters are gathered with their unit, so that none needs a collective of its own"
    ),
    "stage3_model_persistence_threshold": needless(whole(), "no parameter is kept unsharded for being small"),
    "stage3_gather_16bit_weights_on_model_save": needless(
        flag, "zero_core.save_pretrained writes safetensors from the shards; model.state_dict() gathers them"
    ),
    "stage3_module_granularity_threshold": needless(whole(), "units are blocks, whatever is inside them"),
    "stage3_use_all_reduce_for_fetch_params": needless(flag, _GATHERS),
    "stage3_allgather_sequential": needless(flag, _GATHERS),
    "memory_efficient_linear": needless(flag, "backward gathers weights again, and keeps none"),
    "pipeline_loading_checkpoint": needless(flag, "each rank reads its own slices"),
    "override_module_apply": needless(flag, "model.apply() works as it is, and nothing is patched"),
    "log_trace_cache_warnings": needless(flag, "there is no trace to invalidate"),
    "enable_sanity_checks": needless(flag, "the checks between ranks are always on"),
    "save_muon_momentum_buffer_in_memory": needless(flag, "there is no Muon"),
    "leaf_module": needless(anything, "units follow what a forward uses; zero_core.shard(units=) names classes"),
    "zenflow": refused(
        anything, "it updates parameters with old gradients: leave it out; updates overlap the next forward exactly"
    ),
    "zero_hpz_partition_size": needless(
        whole(),
        "backward gathers from all ranks, which takes less memory and more traffic; "
        "secondary_shards of zero_hf.ZeroConfig keeps the second copy",
    ),
    "zero_quantized_weights": refused(
        flag, "gathered weights would be rounded: leave it out, or give zero_core.shard your own collectives="
    ),
    "zero_quantized_nontrainable_weights": refused(
        flag, "frozen weights would be rounded: leave it out, and load the base quantised, by bitsandbytes or torchao"
    ),
    "zero_quantized_gradients": refused(
        flag, "gradients would be rounded to 4 bits: leave it out; communication_data_type=bf16 halves their bytes"
    ),
    "zeropp_loco_param": refused(anything, f"gradients are not quantised. {_LEGACY}"),
    "mics_shard_size": mapped(lambda value: value if value == -1 else whole(1)(value), -1),
    "mics_hierarchical_params_gather": needless(flag, "a gather stays inside its group of ranks"),
    "cpu_offload_use_pin_memory": needless(flag, _PLANNED),
    "offload_optimizer.device": mapped(one_of("none", "cpu", "nvme"), "none"),
    "offload_optimizer.nvme_path": mapped(text),
    "offload_optimizer.ratio": mapped(number(0, 1), 1.0),
    "offload_optimizer.buffer_count": needless(whole(), _PLANNED),
    "offload_optimizer.pin_memory": needless(flag, "host memory is registered where the device can do that"),
    "offload_optimizer.pipeline_read": needless(flag, _READS),
    "offload_optimizer.pipeline_write": needless(flag, _READS),
    "offload_optimizer.fast_init": needless(flag, "states are written once, when the model is sharded"),
    "offload_optimizer.super_offload": refused(
        flag, "it steps before it knows the norm, and steps back: leave it out; updates overlap exactly here"
    ),
    "offload_optimizer.cpuadam_cores_perc": needless(number(0, 1), "zero-optim-cpu picks the cores beside the device"),
    "offload_param.device": mapped(one_of("none", "cpu", "nvme"), "none"),
    "offload_param.nvme_path": mapped(text),
    "offload_param.max_in_cpu": mapped(whole(), 1_000_000_000),
    "offload_param.buffer_count": needless(whole(), _PLANNED),
    "offload_param.buffer_size": needless(whole(), _PLANNED),
    "offload_param.pin_memory": needless(flag, "host memory is registered where the device can do that"),
}

_MASTERS = (
    'masters are in fp32 here: leave it out; ZeroConfig(states="split") keeps a bf16 parameter\'s in 2 more bytes'
)
_FLOATS = one_of("fp32", "float32", "bf16", "bfloat16", "fp16", "float16")
_PRECISION: dict[str, Key] = {
    "bf16.enabled": mapped(flag, False),
    "bf16.immediate_grad_update": needless(flag, "gradients leave for the shards as they arrive"),
    "bf16.check_grad_overflow": needless(
        flag, "a gradient that is not finite stops the run with an error, and nothing is updated"
    ),
    "bf16.bf16_master_weights_and_grads": refused(flag, _MASTERS),
    "bf16.bf16_optimizer_states": refused(
        flag, 'leave it out; the nearest is ZeroConfig(states="split_bf16m"), which keeps one moment in bf16'
    ),
    "fp16.enabled": mapped(flag, False),
    "fp16.auto_cast": refused(flag, "inputs are not cast: leave it out, and cast those that are floats yourself"),
    "fp16.loss_scale": mapped(number(), 0),
    "fp16.initial_scale_power": mapped(whole(), 16),
    "fp16.loss_scale_window": mapped(whole(1), 1000),
    "fp16.hysteresis": mapped(whole(1), 2),
    "fp16.consecutive_hysteresis": mapped(flag, False),
    "fp16.min_loss_scale": mapped(whole(1), 1),
    "fp16.fp16_master_weights_and_grads": refused(flag, "masters are in fp32 here: leave it out"),
    "torch_autocast.enabled": mapped(flag, False),
    "torch_autocast.dtype": mapped(
        one_of("bf16", "bfloat16", "torch.bfloat16", "fp16", "float16", "half", "torch.float16"), "bf16"
    ),
    "torch_autocast.lower_precision_safe_modules": refused(
        anything, "parameters are gathered in their own dtype: leave it out; autocast casts what torch lists"
    ),
    "data_types.grad_accum_dtype": needless(
        _FLOATS, "micro-batches are added up in fp32: 4 bytes an element where there are several"
    ),
    "data_types.param_dtype": mapped(_FLOATS),
    "data_types.buffer_dtype": refused(
        anything, "buffers keep their dtype: leave it out, and cast them before the model is sharded"
    ),
    "data_types.keep_in_fp32_modules": needless(anything, "buffers keep their dtype"),
}

_OTHERS: dict[str, Key] = {
    **{f"aio.{name}": needless(whole(1), _AIO) for name in ("block_size", "queue_depth", "intra_op_parallelism")},
    **{f"aio.{name}": needless(flag, _AIO) for name in ("single_submit", "overlap_events")},
    "aio.thread_count": needless(whole(1), _AIO),
    "aio.use_gds": needless(flag, "tiles pass through host memory, where they are updated"),
    "activation_checkpointing.partition_activations": needless(
        flag, "it splits activations over model-parallel ranks, and there are none"
    ),
    "activation_checkpointing.cpu_checkpointing": refused(
        flag, 'leave it out, and call zero_offload.offload_activations(model, policy="host")'
    ),
    "activation_checkpointing.contiguous_memory_optimization": needless(flag, _RECOMPUTES),
    "activation_checkpointing.number_checkpoints": needless(anything, _RECOMPUTES),
    "activation_checkpointing.synchronize_checkpoint_boundary": needless(flag, _RECOMPUTES),
    "activation_checkpointing.profile": needless(flag, "torch.profiler shows recomputation"),
    "checkpoint.tag_validation": needless(anything, "ranks compare what is saved and what is loaded"),
    "checkpoint.load_universal": needless(flag, "every checkpoint loads at any number of ranks"),
    "checkpoint.use_node_local_storage": refused(
        flag, "each rank writes its part into one folder: leave it out, and save to a folder that all see"
    ),
    "checkpoint.parallel_write": needless(anything, "all ranks write at the same time"),
    "checkpoint.checkpoint_serialization": needless(flag, "values are written as they are in memory"),
    "checkpoint.writer": needless(anything, "checkpoints are streamed from the shards by all ranks"),
    "optimizer.type": mapped(text),
    "optimizer.legacy_fusion": needless(flag, "one kernel updates a whole tile"),
    "scheduler.type": mapped(text),
}

KEYS: dict[str, Key] = _TOP | {f"zero_optimization.{key}": made for key, made in _ZERO.items()} | _PRECISION | _OTHERS

# What a file may write instead: the key that is meant, and what the values are then.
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
