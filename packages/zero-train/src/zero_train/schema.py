"""Declares every key of a run: its type, its default, the values that it accepts, and its meaning.

Hydra checks the YAML of conf/ and the command line against these dataclasses. A key has the same name in the YAML, here
and, if its value is passed on, in a sibling's constructor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING, SI

from zero_train.declare import BYTES, COUNT, FORMATS, OPTIMIZERS, SIZE, TUNES, count, number, one_of

# OmegaConf reads the annotations at run time, also on Python 3.10: Optional[X], not X | None.
# ruff: noqa: UP045


@dataclass
class RunConfig:
    """Sets the length and the outputs of a run, and the folder of its results."""

    steps: int = count(300)
    """Optimizer steps."""
    epochs: Optional[float] = number(None, above=0, at_most=SIZE)
    """Passes over the data, in place of run.steps, which follows from it: 2, or 0.5 for half of the data."""
    micro_batch: int = count(8, SIZE)
    """Sequences that a rank computes at once."""
    accumulate: int = count(1, SIZE)
    """Micro-batches in a step. Their gradients are summed in fp32 before the update."""
    global_batch: Optional[int] = count(None)
    """Sequences of a step over all ranks, from which run.accumulate follows. null: run.micro_batch x run.accumulate x
    ranks; of a run that run.resume=auto continues, as many as it had, also on another number of ranks."""
    seed: int = number(0, at_least=0, below=1 << 32)
    """Seeds the weights, the order of the data and the sampled text. The same seed gives the same run."""
    dir: str = MISSING
    """The run folder, which the run makes and locks. A folder with an earlier run is refused unless it is resumed."""
    dry: bool = False
    """Print the plan, then exit without training and without writing anything."""
    probe: bool = False
    """Measure the machine, print it as YAML for conf/hardware, and exit."""
    resume: Optional[str] = None
    """Continue from a checkpoint. auto: from the last one in run.dir, whose model, data, seed, optimizer and precision
    must be the same; without one the run starts. A run or checkpoint folder: from there, if the model is the same."""
    checkpoint_every: int = number(0, at_least=0, at_most=COUNT)
    """Steps between checkpoints. The end of the run and Ctrl-C save one more. 0: save none."""
    keep_checkpoints: int = count(2)
    """Checkpoints to keep in the run folder. Older ones are deleted when a newer one is complete."""
    durable: Optional[str] = one_of(None, "power", "process", default=None)
    """Keep each step on nvme, so that a run that was killed goes on from its last step with run.resume=auto. power: it
    survives a power cut as well. process: it survives the end of the process, and writes without waiting for the disk.
    Trained values then take twice their room on nvme. It needs offload=nvme or offload=host, and task=pretrain."""
    export: bool = False
    """After the run, write the model to `pretrained` in the run folder, in the format of transformers."""
    evaluate_every: Any = 50
    """Steps between validation losses, or `epoch`: one after each pass over the data. The run also takes one before the
    first and after the last step. 0: none."""
    evaluate_batches: Optional[int] = count(8)
    """Micro-batches that one validation loss averages, over all ranks. null: all that is held out. Of task=sft it is
    the mean over tokens, of task=dpo and task=reward over pairs."""
    keep_best: bool = False
    """Keep the checkpoint with the lowest validation loss, name it in best.json, and export it rather than the last. It
    counts among run.keep_checkpoints, at least 2 of them then. Not for task=pretrain."""
    patience: Optional[int] = count(None)
    """Stop once so many validation losses in a row were not lower. null: take all steps. Not for task=pretrain."""
    bar: Optional[bool] = None
    """Show a progress bar rather than plain lines. null: show it if the output is a terminal."""
    report_every: int = count(10)
    """Steps between two plain progress lines."""
    sample_bytes: int = number(160, at_least=0, at_most=COUNT)
    """Bytes of text to generate after the run. 0: none."""
    sample_prompt: str = "def "
    """The text to continue."""
    sample_temperature: float = number(0.7, at_least=0, at_most=100)
    """Divides the logits before a byte is drawn. 0: always take the most likely byte."""
    timeout: float = number(600.0, above=0, at_most=COUNT)
    """Seconds that a rank waits for the others, while they start and in a collective, before it raises. Longer than the
    slowest rank takes to load the model or to write a checkpoint."""
    plots: bool = True
    """Draw report.png at the end."""
    threads: Optional[int] = count(None, 10_000)
    """Compute threads of a rank. null: torch's default, or with a GPU as many as do not disturb the update."""


@dataclass
class ModelConfig:
    """Describes the architecture. The weights are random unless `path` names a folder of pretrained ones."""

    kind: str = MISSING
    """llama, gpt2, moe or hf: the function of model/causal_lm.py that builds it."""
    hidden_size: int = count(768, SIZE)
    """Width of the residual stream."""
    intermediate_size: int = count(1728, SIZE)
    """Width of the feed-forward layer."""
    layers: int = count(4, 10_000)
    """Transformer blocks."""
    heads: int = count(12, SIZE)
    """Attention heads. hidden_size must be an even multiple of this."""
    key_value_heads: Optional[int] = count(None, SIZE)
    """Key and value heads (grouped-query attention). null: as many as `heads`. llama and moe only."""
    vocab_size: int = number(256, at_least=256, at_most=1 << 24)
    """Size of the vocabulary: at least 256, for bytes, and at least what data.tokenizer has."""
    tie_embeddings: bool = False
    """Use one matrix for the embedding and the head."""
    experts: int = count(4, 10_000)
    """Experts in a block. moe only."""
    experts_per_token: int = count(2, 10_000)
    """Experts that each token is routed to. moe only."""
    path: Optional[str] = None
    """Folder of a pretrained model (config.json and safetensors). hf only."""


@dataclass
class DataConfig:
    """Says what to train on: text, read as bytes or by a tokenizer, or rows for a tokenizer."""

    kind: str = MISSING
    """stdlib, text or synthetic: text. jsonl, parquet, csv or datasets: rows with the columns that the task reads, of
    files whose ending says how they are read (jsonl, json, csv, tsv, parquet, arrow; .gz too). mixture: several."""
    sequence_length: int = number(256, at_least=2, at_most=COUNT)
    """Bytes of one sequence; tokens, where a tokenizer reads the text."""
    path: Optional[str] = None
    """A file, or a folder of files. datasets: a folder that `save_to_disk` wrote. Not for stdlib and synthetic."""
    pattern: str = "*"
    """Pattern of the files to read in the folder. text, jsonl, parquet and csv only."""
    sources: Any = field(default_factory=list)
    """What data=mixture interleaves, such as [{path: a.jsonl, weight: 2}, {path: b.parquet, weight: 1}]. An entry may
    have a kind and a validation_fraction of its own. Rows are drawn by weight until each entry is used up, and rows of
    others come again; without any weight all rows are taken equally often."""
    validation_path: Optional[str] = None
    """Rows to hold out, like `path`. null: hold out validation_fraction. jsonl, parquet, csv and datasets only."""
    tokenizer: Optional[str] = None
    """Folder of the tokenizer that reads the text. null: that of model.path, or if it has none, text is read as bytes.
    task=pretrain only; the other tasks take the model's own."""
    chat_template: Optional[str] = None
    """File of a Jinja chat template in place of the tokenizer's own. The exported model has it. Where it has
    {% generation %}, TRL learns from that. Not for task=pretrain."""
    as_bytes: bool = False
    """Feed bytes as token numbers even if the model has a tokenizer or another vocabulary. model=hf only."""
    validation_fraction: float = number(0.05, at_least=0, below=1)
    """Share of the files to hold out for validation. A single file is cut instead. Of rows, so many are drawn, the same
    in every run; 0: none."""


@dataclass
class TaskConfig:
    """Chooses the task. pretrain is zero-train's own loop over text; the others are TRL's trainers."""

    kind: str = one_of("pretrain", *TUNES, default="pretrain")
    """pretrain: the next byte or token. sft: answers of conversations. dpo: to say the preferred one of two answers.
    reward: to score texts, so that the preferred one of two has the higher score. kto: to say answers with the label
    true rather than those with false. grpo: to say what task.reward rewards."""
    loss_on: str = one_of("answers", "everything", default="answers")
    """answers: only the assistant's tokens count in the loss. everything: all tokens do. sft only."""
    packing: bool = False
    """Put several conversations into one sequence of data.sequence_length. sft only."""
    beta: float = number(0.1, above=0, at_most=100)
    """How closely the model stays to the reference. dpo and kto only."""
    reward: Optional[str] = None
    """MODULE:FUNCTION, which TRL's GRPOTrainer calls for the rewards of generated texts. grpo only."""


@dataclass
class AdapterConfig:
    """Says whether the model's own weights are trained, or low-rank adapters beside them."""

    kind: str = one_of("none", "lora", "qlora", default="none")
    """none: all weights. lora: adapters of PEFT. qlora: the same, beside weights in bitsandbytes' 4 bits."""
    rank: int = count(16, SIZE)
    """Rank of an adapter."""
    alpha: float = number(32.0, above=0, at_most=SIZE)
    """The adapter's output is multiplied by alpha / rank."""
    dropout: float = number(0.0, at_least=0, below=1)
    """Share of the adapter's inputs that is set to zero in training."""
    rslora: bool = False
    """Multiply the adapter's output by alpha / sqrt(rank) instead, so that a larger rank learns as fast (rsLoRA)."""
    dora: bool = False
    """Also train the length of each output's weights (DoRA). Each rank reads the whole model into host memory before it
    trains, as these lengths begin with the weights' own."""
    targets: Any = "all-linear"
    """Layers that get an adapter: a name, a list of names such as [q_proj,v_proj], a pattern of whole names, or
    all-linear."""
    merge: bool = False
    """After the run, also write `merged`: the model with the adapter added to its weights. Needs run.export=true."""


@dataclass
class TrackerConfig:
    """Says where the figures of a run go besides its folder."""

    kind: str = one_of("none", "tensorboard", "wandb", "trackio", default="none")
    """none, tensorboard, wandb or trackio, whose own package is needed. Files of the first two are in `tracker` in the
    run folder; all other settings are their own environment variables."""


@dataclass
class ZeroConfig:
    """Chooses the values that are sharded over the ranks."""

    stage: int = one_of(0, 1, 2, 3, default=3)
    """0: shard nothing. 1: optimizer states. 2: also gradients. 3: also parameters."""
    replicas: int = count(1, SIZE)
    """Groups of ranks that each hold all shards: the first of N groups are the first N-th of the ranks, and so on.
    Units are gathered within a group, which may be a machine, and gradients averaged over all ranks. Stages 1 to 3."""
    secondary_shards: bool = False
    """hpZ: on several machines each rank keeps, of all parameters, its part among the ranks of its machine. Then a unit
    is gathered over the link once a step, and inside the machine after that. Stage 3 without replicas only."""
    resident_bytes: int = number(0, at_least=0, at_most=BYTES)
    """Bytes of units that may stay unsharded between forward and backward. Stage 3 only."""
    prefetch_bytes: Optional[int] = number(64 << 20, at_least=0, at_most=BYTES)
    """Bytes of units to gather ahead of their use. Each takes a slot of a tiered store. null: zero-core's default."""
    expert_bytes: Optional[int] = number(64 << 20, at_least=1, at_most=BYTES)
    """Bytes of a group of a mixture's stacked experts. Groups are gathered or read, used and freed in turn. Each has an
    expert at least. Weights in 4 bits count as they are computed with. null: a block's unit has all. Stage 3 only."""
    no_sync: Optional[bool] = None
    """With run.accumulate on several ranks: reduce gradients once a step instead of once a micro-batch. Every rank then
    keeps an unsharded fp32 gradient (4 bytes a parameter, which the plan includes). null: true at stages 0 and 1, false
    at stages 2 and 3. Stage 1 accepts only true."""


@dataclass
class OffloadConfig:
    """Says where parameters, gradients and optimizer states are kept between uses."""

    kind: str = one_of("none", "placed", "auto")
    """none: keep all on the device. placed: use the next three keys. auto: let the planner choose the tiers."""
    parameters: Any = "host"
    """device, host, nvme or one of offload.tiers, or fractions of the tiles: {host: 0.37, nvme: 0.63}. On a
    discrete device fractions count whole units."""
    gradients: Any = "host"
    """device, host, nvme or one of offload.tiers, or fractions."""
    optimizer: Any = "host"
    """device, host, nvme or one of offload.tiers, or fractions. Master weights are optimizer states."""
    planned: Any = None
    """Written by offload=auto beside a GPU: each rank's placements. run.resume=auto keeps them on as many ranks, since
    a GPU's updates have other bits than a CPU's."""
    update_share: Optional[float] = number(None, at_least=0, at_most=1)
    """The part of the tiles with states outside of a GPU that the GPU updates. null: as before in a run that
    run.resume=auto continues, else hardware.update_share, or 0."""
    nvme_paths: Any = field(default_factory=list)
    """Folders that hold the slab, one file in each. `{local_rank}` is filled in. Empty: the run folder."""
    tiers: dict[str, Any] = field(default_factory=dict)
    """More tiers by name, between host and nvme: `_target_` names the class of a ByteStore, the rest are its arguments,
    in which `{local_rank}` is filled in. Each file of conf/tier describes one."""
    activations: Any = None
    """Values that a block keeps for backward. keep: all. recompute: its input, on the device. host, nvme: its input
    there. auto: planned. A list: one policy for each unit. null: keep."""
    rows: Any = None
    """Rows of a micro-batch that a block computes at a time where offload.activations does not keep them: it reads its
    parameters once, in the memory of these rows. auto: as many as fit and are fastest. null: all."""
    tokens: Any = None
    """Tokens of a row that an MLP or a norm of such a block, and the head, compute at a time; attention takes whole
    rows. auto: all, or the largest part that fits, for rows that are too long. null: all."""
    row_modules: list[str] = field(default_factory=list)
    """Names or patterns of modules whose rows do not depend on each other, for offload.rows, if they are not known."""
    token_modules: list[str] = field(default_factory=list)
    """The same for offload.tokens: modules inside of blocks that act on each token alone, such as "*.mlp"."""
    tile_numel: int = count(1 << 22, 1 << 40)
    """Elements of a tile, the smallest piece that is placed, read, written and updated."""
    slots: Optional[int] = count(None)
    """Tiles in memory at the same time. All but four of them stay there from step to step, and are neither read nor
    written. null: a quarter of the tiles. 3 takes the least memory."""
    host_bytes: Optional[int] = number(None, at_least=0, at_most=BYTES)
    """Host memory that one rank's tiers and slots may use. null: as much as they need."""
    overlap: bool = True
    """Update in the background during the next forward. The results are the same either way."""


@dataclass
class IoConfig:
    """Says how the slab is read and written."""

    backend: str = "auto"
    """auto, or one of zero_nvme.BACKENDS, such as io_uring or threads. auto prints which one it chose and why."""
    allow_memory: bool = False
    """Accept a path on a filesystem in memory (tmpfs), which is useful for tests only."""


@dataclass
class OptimConfig:
    """Describes the optimizer, its learning rate schedule and gradient clipping."""

    kind: str = one_of(*OPTIMIZERS)
    """adamw, adam, lion, adagrad, sgd or muon, which is zero_core.Muon for the matrices inside of the model, of each
    expert of a stack too, and AdamW for embeddings, the head and vectors. own is the class that `target` names."""
    target: Optional[str] = None
    """A torch optimizer's class, MODULE:CLASS. own only. It gets lr, and weight_decay where it has one."""
    options: dict[str, Any] = field(default_factory=dict)
    """The other arguments of the class by name. own only."""
    contract: Optional[str] = one_of("elementwise", "by itself", "together", default=None)
    """The contract of the class, as optimizer_contract of zero_core.shard. own only. null: as it or its list says."""
    base_lr: float = number(1e-3, at_least=0, at_most=10)
    """The learning rate of AdamW where all weights are trained, which a recipe sets. `lr` follows from it."""
    lr: float = number(SI("${rate:${optim.base_lr},${optim.kind},${adapter.kind}}"), at_least=0, at_most=10)
    """Learning rate after warm-up. If it is not given: base_lr for adamw, adam and what muon leaves to AdamW, 0.3 of it
    for lion, 10 times it for adagrad and 100 times it for sgd; 10 times that for adapters."""
    matrix_lr: float = number(0.02, at_least=0, at_most=10)
    """Learning rate of matrices after warm-up. muon only; its schedule is that of `lr`."""
    adjust_lr: str = one_of("original", "match_rms_adamw", default="original")
    """How the rate of a matrix depends on its shape. muon only: original, or match_rms_adamw, with which matrix_lr is a
    rate of AdamW."""
    orthogonal: str = one_of("bfloat16", "float32", default="bfloat16")
    """What matrices are orthogonalised in. muon only: bfloat16, which has the bits of torch.optim.Muon, or float32."""
    betas: list[float] = number(lambda: [0.9, 0.95], at_least=0, below=1)
    """Decay of the first and second moment. adamw, adam and lion, and muon where it has AdamW."""
    eps: float = number(1e-8, at_least=0, at_most=1)
    """Added to the root of the second moment. adamw, adam and adagrad, and muon where it has AdamW."""
    momentum: float = number(0.9, at_least=0, below=1)
    """Momentum. sgd and muon."""
    weight_decay: float = number(0.1, at_least=0, at_most=10)
    """Weight decay of matrices. Vectors are not decayed."""
    max_grad_norm: Optional[float] = number(1.0, above=0, at_most=1e9)
    """Clip the global gradient norm to this. null: do not clip."""
    warmup_steps: Optional[int] = number(SI("${tenth:${run.steps},${run.epochs}}"), at_least=0, at_most=COUNT)
    """Steps of linear warm-up. If they are not given, or null: a tenth of run.steps."""
    final_fraction: float = number(0.1, at_least=0, at_most=1)
    """Learning rate at the last step as a fraction of `lr`. A cosine leads there. 1: keep it constant."""
    threads: Optional[int] = count(None, 10_000)
    """Threads of the CPU update. null: one for each core; with a GPU, for each core of this rank's share of its NUMA
    node, except two for launches and I/O. A number: that many, on any core that the process may use."""


@dataclass
class PrecisionConfig:
    """Chooses number formats. The optimizer updates an fp32 master in every case."""

    parameters: str = one_of("auto", *FORMATS, default="auto")
    """fp32, bf16 or fp16. auto: bf16 if the device has bf16 arithmetic, else fp32."""
    reduce: Optional[str] = one_of(*FORMATS, default=None)
    """Format in which gradients are reduced: fp32, bf16 or fp16. null: the format of the parameters."""
    states: str = one_of("auto", "split", "fp32", "split_bf16m", "split_8bit", default="auto")
    """Layout of the optimizer states on host and nvme: split, fp32, split_bf16m or split_8bit; auto: the exact one."""
    loss_scale: Any = None
    """A number, `dynamic`, arguments of zero_core.LossScale ({hysteresis: 2}), or null. fp16 wants one."""


@dataclass
class Config:
    """One run: the root of conf/train.yaml."""

    run: RunConfig = field(default_factory=RunConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    trl: dict[str, Any] = field(default_factory=dict)  # fields of TRL's own configuration of the task, as it names them
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    io: IoConfig = field(default_factory=IoConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    # Fields of zero_offload.Hardware. A run asks this machine for those that are absent or null: nodes follow from its
    # ranks, `device` from torch's accelerator, nvme from offload.nvme_paths. Other facts stay unknown.
    hardware: dict[str, Any] = field(default_factory=dict)
