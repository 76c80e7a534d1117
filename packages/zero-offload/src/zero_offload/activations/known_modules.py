"""Lists the modules whose rows, or tokens, do not depend on each other: the only ones that take parts.

Owns that list, and the names that a user adds to it. Not here: the comparison of a real batch (in recompute.py).

[Note: known modules]
One comparison of values cannot show a router whose capacity is not yet exceeded, a gate that begins at zero, a sum over
the batch in training alone, or a neighbour that is far away. So a module takes parts only if it is known to compute
each row, or each token, by itself:

    rows      a block of a family in `_FAMILIES`, and whatever takes parts of a row
    tokens    an MLP or a norm of such a family, torch's LayerNorm and RMSNorm
    named     modules that `row_modules=` and `token_modules=` name, with all modules inside

A class is known by its full name, so a subclass is not, and neither is a module whose forward was replaced. A module
inside of a known one must be of the same file of transformers, or in `_INSIDE`. bitsandbytes' Linear8bitLt is not
there: it multiplies a column in 16 bits if any token has an outlier in it.
tests/integration/zero_offload/test_known.py trains each family whole and in parts.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Sequence
from fnmatch import fnmatchcase

from torch import nn

from .spill import ActivationError

# Blocks, modules that take parts of a row, and families of transformers. A class is called by its family and one of
# these words, as LlamaDecoderLayer is, in whatever case.
_FAMILIES = (
    ("block", "mlp", "gpt2 gpt_neo gptj"),
    ("block", "layerff layernorm", "mt5 t5 umt5"),
    ("decoderlayer", "", "gpt_oss opt"),
    ("decoderlayer", "mlp", "falcon phi stablelm starcoder2"),
    ("decoderlayer", "mlp layernorm", "cohere cohere2 olmo"),
    ("decoderlayer", "mlp layernorm1p", "nemotron"),
    ("decoderlayer", "mlp moe rmsnorm", "deepseek_v2 deepseek_v3"),
    ("decoderlayer", "mlp sparsemoeblock rmsnorm", "mixtral olmoe qwen2_moe qwen3_moe"),
    ("decoderlayer", "mlp rmsnorm", "apertus arcee exaone4 gemma gemma2 gemma3 glm glm4 granite llama ministral"),
    ("decoderlayer", "mlp rmsnorm", "mistral olmo2 olmo3 phi3 qwen2 qwen3 seed_oss smollm3"),
    ("encoderlayer", "mlp", "clip siglip"),
    ("encoderlayer decoderlayer", "", "bart mbart whisper"),
    ("layer", "", "bert electra roberta"),
    ("layer", "mlp", "dinov2 gpt_neox vit"),
)
_NORMS = {f"torch.nn.modules.normalization.{name}" for name in ("layernorm", "rmsnorm")}
_INSIDE = _NORMS | {
    *(f"torch.nn.modules.activation.{name}" for name in ("gelu", "relu", "sigmoid", "silu", "tanh")),
    *(f"torch.nn.modules.container.{name}" for name in ("moduledict", "modulelist", "parameterdict", "sequential")),
    *("torch.nn.modules.dropout.dropout", "torch.nn.modules.linear.identity", "torch.nn.modules.linear.linear"),
    *("torch.nn.modules.sparse.embedding", "transformers.pytorch_utils.conv1d"),
    *("bitsandbytes.nn.modules.linear4bit", "peft.tuners.lora.bnb.linear4bit", "peft.tuners.lora.dora.doralinearlayer"),
    *("peft.tuners.lora.layer.linear", "peft.tuners.lora.layer.paramwrapper"),
}


def _listed(which: int) -> set[str]:
    """The full names, in lower case, of blocks or of modules that take parts of a row."""
    return {
        f"transformers.models.{family}.modeling_{family}.{family.replace('_', '')}{word}"
        for row in _FAMILIES
        for family in row[2].split()
        for word in row[which].split()
    }


_KNOWN = {"rows": _NORMS | _listed(0) | _listed(1), "tokens": _NORMS | _listed(1)}


def named_modules(model: nn.Module, patterns: Sequence[str], option: str) -> set[nn.Module]:
    """Returns the modules that the user names. Raises ActivationError for a name or pattern that fits none."""
    names = dict(model.named_modules())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ActivationError(f"{option} has {pattern!r}, and no module is called that: see model.named_modules()")
    return {each for name, each in names.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}


def stranger(module: nn.Module, option: str, named: Container[nn.Module], path: str = "", file: str = "") -> str:
    """Describes a part of the module that is neither known to take parts nor named, as "is of class Mixer"; or "".

    option: "rows" or "tokens". path: the path of `module` inside of a known one. file: the Python module of the known
    one's class.
    """
    kind = type(module)
    name = f"{kind.__module__}.{kind.__qualname__}".lower()
    if module in named:
        return ""
    known = name in _INSIDE or kind.__module__ in (file, "transformers.activations") if path else name in _KNOWN[option]
    if not known:
        return f"contains {path!r} of class {kind.__name__}" if path else f"is of class {kind.__name__}"
    file = file or kind.__module__
    foreign = kind.__module__ == file and inspect.unwrap(kind.forward).__module__ != file
    if foreign or "forward" in module.__dict__:
        return f"replaces the forward of class {kind.__name__}{path and f' in {path!r}'}"
    inside = ((f"{path}.{child}".lstrip("."), each) for child, each in module.named_children())
    return next(filter(None, (stranger(each, option, named, at, file) for at, each in inside)), "")
