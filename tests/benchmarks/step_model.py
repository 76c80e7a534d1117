"""The Llama that a step is measured with: its sizes, its first values, and the tokens of a step."""

from importlib import import_module
from typing import Any

import torch
from torch import nn

SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}


class Missing(Exception):
    """The configuration cannot run here; the text says why."""


class Batch:
    """Tokens of a step, (rows, sequence): as many rows as were asked for last, in `accumulate` micro-batches."""

    def __init__(self, arguments: dict[str, Any], device: str) -> None:
        self.accumulate: int = arguments.get("accumulate", 1)
        self._length = 32 if arguments.get("tiny") else arguments.get("length", 256)
        self._device = device
        self.take(arguments["micro_batch"])

    def take(self, rows: int) -> None:
        self.tokens = torch.randint(0, 256, (rows, self._length), device=self._device)

    def parts(self) -> tuple[torch.Tensor, ...]:
        return self.tokens.chunk(self.accumulate)


def model_of(arguments: dict[str, Any]) -> tuple[nn.Module, Batch]:
    """The 119.6 M Llama, or one of `sizes`, or of another `kind` of transformers, in the benchmark's dtype; its batch.

    `device` is where both are made; `length` the sequence's; `attention` transformers' name of an implementation;
    `checkpointing` recomputes each block; `adapters` is the rank of LoRA on all linear layers, which alone are trained.
    `compiled`: torch.compile takes each block. `deferred`: the model has no memory yet.
    """
    import transformers

    if deferred := arguments.get("deferred"):
        from zero_core import deferred_init

    torch.manual_seed(0)
    kind = arguments.get("kind", "Llama")
    tiny, device = arguments.get("tiny"), arguments.get("device", "cpu")
    sizes = {"vocab_size": 256 if tiny else 8192, **(TINY if tiny else SIZES), **arguments.get("sizes", {})}
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, arguments.get("dtype", "float32")))
    try:
        with deferred_init() if deferred else torch.device(device):
            config = getattr(transformers, f"{kind}Config")(use_cache=False, **sizes)
            made = getattr(transformers, f"{kind}ForCausalLM")(config)
            if rank := arguments.get("adapters"):
                made = with_adapters(made, rank)
    finally:
        torch.set_default_dtype(default)
    if attention := arguments.get("attention"):
        made.set_attn_implementation(attention)
    if arguments.get("checkpointing"):
        made.gradient_checkpointing_enable({"use_reentrant": False})
    for block in made.model.layers if arguments.get("compiled") else ():
        block.compile()
    made.train()
    return made, Batch(arguments, device)


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"), autocast_adapter_dtype=False
    )


def optimizer_of(model: nn.Module, arguments: dict[str, Any], *, fused: bool) -> torch.optim.Optimizer:
    """AdamW; or what `optimizer` names: a class, MODULE:CLASS, with `optimizer_options`; or muon.

    That is Muon over the matrices inside of blocks and AdamW over the rest. Muon is torch's, or zero_core's if the
    options in `muon` have `orthogonal`.
    """
    module, _, kind = arguments.get("optimizer", "adamw").partition(":")
    trained = [p for p in model.parameters() if p.requires_grad]
    if kind:
        return getattr(import_module(module), kind)(trained, lr=1e-4, **arguments.get("optimizer_options", {}))
    if module != "muon":
        return torch.optim.AdamW(trained, lr=1e-4, fused=fused)
    import zero_core

    matrices, rest = matrices_and_rest(model)
    options = {"lr": 0.02, "weight_decay": 0.1, **arguments.get("muon", {})}
    muon: Any = zero_core.Muon if "orthogonal" in options else torch.optim.Muon
    return zero_core.JointOptimizer(muon(matrices, **options), torch.optim.AdamW(rest, lr=1e-4, fused=fused))


def matrices_and_rest(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices inside of blocks, and every other parameter."""
    inside = {name: p.ndim == 2 and ".layers." in name for name, p in model.named_parameters()}
    matrices, rest = ([p for name, p in model.named_parameters() if inside[name] is has] for has in (True, False))
    return matrices, rest


def skip_first_values() -> None:
    """Models of this process begin with whatever is in memory: one core draws three billion numbers for a minute."""
    import transformers

    transformers.PreTrainedModel._init_weights = lambda self, module: None
    for kind in (nn.Linear, nn.Embedding):
        kind.reset_parameters = lambda self: None  # type: ignore[method-assign]


def repeat_values(model: nn.Module) -> None:
    """The same four million random numbers in every matrix, over and over."""
    values = torch.randn(1 << 22) * 0.02
    for matrix in (p.data.view(-1) for p in model.parameters() if p.dim() > 1):
        for part in matrix.split(values.numel()):
            part.copy_(values[: part.numel()])
