"""Every key of a run, with its type, its default and what it means. No behaviour.

Hydra checks the YAML of conf/ and the command line against these dataclasses. A YAML key, a field here and, where
the value is handed on, the keyword of a sibling's constructor are the same word.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING

# OmegaConf reads the annotations at run time, also on Python 3.10: Optional[X], not X | None.
# ruff: noqa: UP045

FORMATS = ("fp32", "bf16", "fp16")
OPTIMIZERS = {  # the keys of OptimConfig that each one takes besides lr and weight_decay
    "adamw": ("betas", "eps"),
    "adam": ("betas", "eps"),
    "lion": ("betas",),
    "adagrad": ("eps",),
    "sgd": ("momentum",),
}


def _at_least(smallest: float, *, default: Any) -> Any:
    """Declares a key's default and its smallest value, which checks.py enforces."""
    return field(default=default, metadata={"least": smallest})


def _one_of(*allowed: object, default: Any = MISSING) -> Any:
    """Declares a key's default and all its values, which checks.py enforces."""
    return field(default=default, metadata={"allowed": allowed})


@dataclass
class RunConfig:
    """What one run does, and where it leaves its results."""

    steps: int = _at_least(1, default=300)
    """Optimizer steps."""
    micro_batch: int = _at_least(1, default=8)
    """Sequences that a rank computes at once."""
    accumulate: int = _at_least(1, default=1)
    """Micro-batches a step: their gradients are summed in fp32 before the update."""
    seed: int = _at_least(0, default=0)
    """Seeds the weights, the order of the data and the sampled text. The same seed gives the same run."""
    dir: str = MISSING
    """The run folder, made and locked by the run. A folder that holds a run is refused, unless it is resumed."""
    dry: bool = False
    """Print the plan, then exit without training and without writing anything."""
    probe: bool = False
    """Measure the machine, print it as YAML for conf/hardware, and exit."""
    resume: Optional[str] = None
    """Continue from a checkpoint. auto: the last one in run.dir, if any, of a run with the same model, data, seed,
    optimizer and precision. A run folder or a checkpoint folder: that one; only the model must be the same."""
    checkpoint_every: int = _at_least(0, default=0)
    """Steps between checkpoints; one more is saved at the end and at Ctrl-C. 0: none at all."""
    keep_checkpoints: int = _at_least(1, default=2)
    """Checkpoints kept in the run folder; older ones are deleted once a newer one is complete."""
    export: bool = False
    """After the run, write the model to `pretrained` in the run folder, as transformers reads it."""
    evaluate_every: int = _at_least(0, default=50)
    """Steps between two validation losses; one more is taken at the start and at the end. 0: none at all."""
    evaluate_batches: int = _at_least(1, default=8)
    """Micro-batches of one validation loss, over all ranks."""
    bar: Optional[bool] = None
    """Show a progress bar rather than plain lines; null: where the output is a terminal."""
    report_every: int = 10
    """Steps between two plain progress lines."""
    sample_bytes: int = _at_least(0, default=160)
    """Length of the text generated after the run. 0: none."""
    sample_prompt: str = "def "
    """What the generated text begins with."""
    sample_temperature: float = 0.7
    """Divides the logits when the sample is drawn. 0: the likeliest byte each time."""
    plots: bool = True
    """Draw report.png and timeline.png at the end."""
    threads: Optional[int] = _at_least(1, default=None)
    """Compute threads of a rank; null: torch's own choice, and beside a GPU those that do not disturb the update."""


@dataclass
class ModelConfig:
    """The architecture; random weights, unless `path` names a folder of pretrained ones."""

    kind: str = MISSING
    """llama, gpt2, moe or hf: the function of models.py that builds it."""
    hidden_size: int = _at_least(1, default=768)
    """Width of the residual stream."""
    intermediate_size: int = _at_least(1, default=1728)
    """Width of the feed-forward layer."""
    layers: int = _at_least(1, default=4)
    """Transformer blocks."""
    heads: int = _at_least(1, default=12)
    """Attention heads; hidden_size is a multiple of it."""
    key_value_heads: Optional[int] = None
    """Heads of keys and values (grouped-query attention); null: as many as heads. llama and moe."""
    vocab_size: int = _at_least(1, default=256)
    """Size of the vocabulary; the data are bytes, so at least 256."""
    tie_embeddings: bool = False
    """One matrix for embedding and head."""
    experts: int = 4
    """Experts of a block. moe only."""
    experts_per_token: int = 2
    """Experts that each token is routed to. moe only."""
    checkpointing: bool = False
    """Recompute activations in backward, by the model's own means; offload.activations takes its place."""
    path: Optional[str] = None
    """Folder of a pretrained model (config.json and safetensors). hf only."""


@dataclass
class DataConfig:
    """The text. Always bytes, so that no tokenizer is needed."""

    kind: str = MISSING
    """stdlib, text or synthetic: the function of data.py that reads it."""
    sequence_length: int = _at_least(2, default=256)
    """Bytes of one sequence."""
    path: Optional[str] = None
    """A text file, or a folder of them. text only."""
    pattern: str = "*"
    """Which files of the folder. text only."""
    as_bytes: bool = False
    """Feed bytes as token numbers to a model of another vocabulary, or one that has a tokenizer. model=hf only."""
    validation_fraction: float = 0.05
    """Share of the files held out; a single file is cut instead."""


@dataclass
class ZeroConfig:
    """What is sharded over the ranks."""

    stage: int = _one_of(0, 1, 2, 3, default=3)
    """0: nothing. 1: optimizer states. 2: and gradients. 3: and parameters."""
    resident_bytes: int = _at_least(0, default=0)
    """Stage 3: bytes of units that may stay unsharded between forward and backward."""
    prefetch_bytes: Optional[int] = 64 << 20
    """Bytes of units gathered ahead of their use, each a slot of a tiered store; null leaves zero-core's own choice."""
    no_sync: Optional[bool] = None
    """With run.accumulate on several ranks: gradients of all micro-batches but the last wait on their rank, so that one
    reduction a step takes the place of one a micro-batch, for a whole fp32 gradient on every rank (4 bytes a parameter,
    in the plan). null: at stages 0 and 1, of which stage 1 always does so; stages 2 and 3 reduce every micro-batch."""
    update_in_backward: bool = False
    """Start a unit's update when its gradient arrives; excludes optim.max_grad_norm."""


@dataclass
class OffloadConfig:
    """Where parameters, gradients and optimizer states live between uses."""

    kind: str = _one_of("none", "placed", "auto")
    """none: zero-core's own device store. placed: the three tiers below. auto: the planner chooses them."""
    parameters: Any = "host"
    """device, host or nvme, or fractions of the tiles: {host: 0.37, nvme: 0.63}."""
    gradients: Any = "host"
    """device, host or nvme, or fractions."""
    optimizer: Any = "host"
    """device, host or nvme, or fractions. Master weights count as optimizer states."""
    nvme_paths: Any = field(default_factory=list)
    """Folders that hold the slab, one file each; `{local_rank}` is filled in. Empty: the run folder."""
    activations: Any = None
    """What a block keeps for its backward: keep, recompute, host or nvme (its input, there), auto (planned), or one of
    the first four a unit, as a list. null: recompute where model.checkpointing, else keep."""
    tile_numel: int = _at_least(1, default=1 << 22)
    """Elements of a tile, the atom of placement, I/O and update."""
    slots: Optional[int] = _at_least(1, default=None)
    """Tiles in memory at once; null leaves zero-offload's own choice."""
    host_bytes: Optional[int] = _at_least(0, default=None)
    """Budget of host memory for tiers and slots of one rank; null: what they need."""
    overlap: bool = True
    """Update in the background while the next forward proceeds. The numbers are the same either way."""


@dataclass
class IoConfig:
    """How the slab is read and written."""

    backend: str = _one_of("auto", "io_uring", "libaio", "threads", "aiofiles", default="auto")
    """auto, io_uring, libaio, threads or aiofiles. auto says what it chose and why."""
    allow_memory: bool = False
    """Accept a path on a filesystem that is memory (tmpfs); only good for tests."""


@dataclass
class OptimConfig:
    """The optimizer, its schedule and clipping."""

    kind: str = _one_of(*OPTIMIZERS)
    """adamw, adam, lion, adagrad or sgd."""
    lr: float = _at_least(0, default=1e-3)
    """Learning rate after warm-up."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay of the first and second moment. adamw, adam and lion."""
    eps: float = _at_least(0, default=1e-8)
    """Added to the root of the second moment. adamw, adam and adagrad."""
    momentum: float = 0.9
    """Momentum. sgd only."""
    weight_decay: float = _at_least(0, default=0.1)
    """Decay of matrices; vectors are not decayed."""
    max_grad_norm: Optional[float] = 1.0
    """Clip the global gradient norm to this; null: no clipping."""
    warmup_steps: int = _at_least(0, default=20)
    """Steps of linear warm-up."""
    final_fraction: float = _at_least(0, default=0.1)
    """Learning rate at the last step over `lr`: a cosine leads there. 1: constant."""
    threads: Optional[int] = _at_least(1, default=None)
    """Threads of the CPU update. null: one a core; beside a GPU they stay on the cores of its NUMA node (this rank's
    share), of which two are left to launches and I/O. A number: as many, wherever the process may run."""


@dataclass
class PrecisionConfig:
    """Number formats. Whatever the parameters are, the optimizer updates an fp32 master."""

    parameters: str = _one_of("auto", *FORMATS, default="auto")
    """fp32, bf16 or fp16; auto: bf16 where the device computes in it, else fp32."""
    reduce: Optional[str] = _one_of(*FORMATS, default=None)
    """Format of the gradient reduction: fp32, bf16 or fp16; null: that of the parameters."""
    states: str = _one_of("auto", "split", "fp32", "split_bf16m", "split_8bit", default="auto")
    """Layout of the optimizer states on host and nvme: split, fp32, split_bf16m or split_8bit; auto: the exact one."""
    loss_scale: Any = None
    """A number, `dynamic`, or null. fp16 wants `dynamic`."""


@dataclass
class HardwareConfig:
    """What the machine has: the fields of `zero_offload.Hardware`. null: ask the machine, or unknown."""

    name: str = "this machine"
    """What reports call it."""
    nodes: Optional[int] = None
    """Hosts; null: the world size of this run over its ranks_per_node."""
    ranks_per_node: Optional[int] = None
    """Ranks (one a device) that share one host's memory and NVMe; null: the local world size of this run."""
    device: Optional[str] = None
    """torch device type that the ranks compute on; null: torch's accelerator where there is one, else cpu."""
    device_gib: Optional[float] = None
    """Memory of one device; 0: the device tier is host memory; null: ask."""
    device_reserved_gib: Optional[float] = None
    """Memory of one device that is not for tiers: context, libraries, fragments."""
    host_gib: Optional[float] = None
    """Memory of one host that runs may use; null: what is available now."""
    host_reserved_gib: Optional[float] = None
    """Host memory of one rank that is not for tiers: interpreter, libraries."""
    nvme_gib: Optional[float] = None
    """Room on one NVMe path; null: the free space of the path that has least."""
    nvme_paths: Optional[int] = None
    """NVMe paths of one host; null: as many as offload.nvme_paths."""
    tflops: Optional[float] = None
    """TFLOP/s that a model's forward and backward reach on one device; null: the step time is not predicted."""
    device_gbps: Optional[float] = None
    """GB/s of device memory."""
    link_gbps: Optional[float] = None
    """GB/s from the host to a device."""
    link_out_gbps: Optional[float] = None
    """GB/s from a device to its host; null: as the other way."""
    link_mixed_gbps: Optional[float] = None
    """GB/s of both directions together when both are in use; null: neither slows the other."""
    update_gbps: Optional[float] = None
    """GB/s that a host's optimizer step moves."""
    nvme_read_gbps: Optional[float] = None
    """GB/s read from one path."""
    nvme_write_gbps: Optional[float] = None
    """GB/s written to one path."""
    nvme_mixed_gbps: Optional[float] = None
    """GB/s of reads plus writes to one path when both are in flight."""
    network_gbps: Optional[float] = None
    """GB/s that a collective moves for one rank."""
    nvme_endurance_tb: Optional[float] = None
    """Terabytes that one path is rated to take in its life."""


@dataclass
class Config:
    """One run: the root of conf/train.yaml."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    io: IoConfig = field(default_factory=IoConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
