"""Every architecture of the installed transformers with stacked experts, in groups and beside itself uncut.

`python -m tests.experts` prints a table and fails if a loss or a gradient differs, or if an architecture could not be
built; `nox -s experts` runs it. Names of architectures are read from transformers: each model is built from its own
configuration class, with small sizes for the fields that it has. Tests run a cover of the kinds of stacks.

With "again", the blocks of both models are in torch's checkpoints, forward and backward run twice, and whether a block
runs past its experts in backward has to be what the planner says of it.
"""

import argparse
import copy
import importlib
import inspect
import itertools
import pkgutil
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers.models
from torch import Tensor, nn

from zero_core.moe.expert_groups import find_stacks, make_groups, replace
from zero_offload.planning.meta_trial import followed_stacks

IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
EXPERTS = 8
LARGEST = 20_000_000  # parameters of a model that is built
TOLERANCE = 2e-5  # of a value, relative to the largest of its tensor

# Small sizes by the name of a field. A configuration gets those that it has; the rest keep their defaults.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "text_hidden_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "moe_intermediate_size"), 48),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_latent_size", "moe_hidden_size"), 48),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("shared_experts_intermediate_size", "intermediate_size_mlp", "share_expert_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_heads", "num_heads", "num_key_value_heads", "kv_n_heads"), 4),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "max_seq_len"), 128),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "pretraining_tp"), 1),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("head_dim", "v_head_dim", "index_head_dim", "q_lora_rank", "kv_lora_rank", "swa_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("vocab_size_per_layer_input",), 128),
    **dict.fromkeys(("hidden_size_per_layer_input",), 16),
    **dict.fromkeys(("first_k_dense_replace", "pad_token_id"), 0),
    **dict.fromkeys(("eos_token_id", "bos_token_id"), 1),
    "mlp_only_layers": [],
    "output_router_logits": True,  # the auxiliary loss, where there is one
}
WIDE = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2}
# What else an architecture's configuration must be given, so that it can be small or has experts at all.
OWN: dict[str, dict[str, Any]] = {
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "deepseek_ocr2": {"mlp_layer_types": ["dense", "sparse"]},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [48, 48], **WIDE},
    "gemma4": {"enable_moe_block": True},
    "glm4v_moe": WIDE,
    "glm5_next": {
        "qk_rope_head_dim": 0,
        "mlp_layer_types": ["dense", "sparse"],
        "linear_num_heads": 4,
        "linear_head_dim": 16,
    },
    "hy_v4_vl": {"qk_rope_head_dim": 64, "index_head_dim": 96},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mimo_v2_flash": {"num_key_value_heads": 2, "head_dim": 48, "swa_head_dim": 48},
    "qwen3_omni_moe": {"shared_expert_intermediate_size": 32},
    "zaya": {"num_experts_per_tok": 1},
}


@dataclass(frozen=True)
class Architecture:
    """A model class, the classes of its stacks, and what it is built from."""

    name: str
    model: Any  # a class
    config: Any
    embeds: bool = False

    def build(self, implementation: str, seed: int = 0) -> Any:
        torch.manual_seed(seed)
        config = copy.deepcopy(self.config)
        config._attn_implementation = "eager"
        config._experts_implementation = implementation
        model = self.model(config)
        for parameter in model.parameters():
            nn.init.normal_(parameter, 0, 0.05)
        return model.train()

    @property
    def recomputes(self) -> bool:
        """Whether its blocks can be in checkpoints: the class may say so where no module of it has the switch."""
        switched = (hasattr(module, "gradient_checkpointing") for module in self.build("eager").modules())
        return bool(self.model.supports_gradient_checkpointing) and any(switched)


def stack_classes(modeling: Any) -> list[type[nn.Module]]:
    """Classes of the module whose forward takes hidden states, indices and weights of experts."""
    return [
        kind
        for kind in vars(modeling).values()
        if inspect.isclass(kind)
        and issubclass(kind, nn.Module)
        and kind.__module__ == modeling.__name__
        and hasattr(kind.forward, "__wrapped__")
        and hasattr(kind, "_apply_gate")
    ]


def small(config_class: Any, own: dict[str, Any]) -> Any:
    """A configuration with small sizes, those of its parts too."""
    fields = {name for kind in config_class.__mro__ for name in vars(kind).get("__annotations__", ())}
    fields |= set(getattr(config_class, "attribute_map", {}))
    given = {name: value for name, value in (SMALL | own).items() if name in fields}
    aliases = getattr(config_class, "attribute_map", {})
    given = {name: value for name, value in given.items() if aliases.get(name) not in given}
    for name, part in getattr(config_class, "sub_configs", {}).items():
        if inspect.isclass(part) and part.__name__ != "AutoConfig":
            given[name] = small(part, own)
    config = config_class(**given)
    for name in own.keys() - fields:  # one that the model reads and the class does not declare
        setattr(config, name, own[name])
    return config


def architectures(names: Sequence[str] = ()) -> Iterator[tuple[str, Architecture | str]]:
    """Name -> an architecture, or why there is none, for each module of transformers that has stacked experts.

    names: parts of the names that are wanted; () for all.
    """
    for info in pkgutil.iter_modules(transformers.models.__path__):
        source = Path(info.module_finder.path, info.name, f"modeling_{info.name}.py")  # type: ignore[union-attr]
        if not source.is_file() or "use_experts_implementation" not in source.read_text(encoding="utf-8"):
            continue
        modeling = importlib.import_module(f"transformers.models.{info.name}.{source.stem}")
        for kind in stack_classes(modeling):
            full = f"{info.name}.{kind.__name__}"
            if not names or any(part in full for part in names):
                yield full, architecture(modeling, kind)


def architecture(modeling: Any, kind: type[nn.Module]) -> Architecture | str:
    """The first of the module's models that has such a stack and computes from token ids, or what each failed of."""
    own = [kind for kind in vars(modeling).values() if inspect.isclass(kind) and kind.__module__ == modeling.__name__]
    models = [kind for kind in own if issubclass(kind, transformers.PreTrainedModel) and kind.config_class]
    models.sort(key=lambda m: ("ForCausalLM" not in m.__name__, "TextModel" not in m.__name__, m.__name__))
    folder, reasons = modeling.__name__.split(".")[2], []
    for model, embeds in itertools.product(models, (False, True)):
        try:
            found = Architecture(kind.__name__, model, small(model.config_class, OWN.get(folder, {})), embeds)
            with torch.device("meta"):
                outline = model(copy.deepcopy(found.config))
            if not any(isinstance(m, kind) for m in outline.modules()):
                continue
            if (size := sum(p.numel() for p in outline.parameters())) > LARGEST:
                raise ValueError(f"{size} parameters, more than {LARGEST}")
            loss(found.build("eager"), embeds)
        except Exception as error:  # any of other people's code
            reasons.append(f"{model.__name__}: {type(error).__name__}: {' '.join(str(error).split())}")
            continue
        return found
    return "; ".join(reasons) or "no model has it"


def loss(model: Any, embeds: bool = False) -> Tensor:
    """embeds: the model takes hidden states in the place of token ids."""
    ids = torch.randint(2, 128, (2, 24), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)  # routers may draw random numbers
    names = inspect.signature(model.forward).parameters
    given = {"input_ids": ids, "labels": ids, "use_cache": False}
    if embeds:
        given |= {"input_ids": None, "inputs_embeds": torch.randn(*ids.shape, model.config.hidden_size)}
    out = model(**{name: value for name, value in given.items() if name in names or name == "use_cache"})
    found = getattr(out, "loss", None)
    return found if found is not None else out[0].float().square().mean()


def in_groups(model: nn.Module, groups: int) -> dict[str, Any]:
    """Replaces the forward of every stack. Returns the groups by the path of their stack."""
    found = {}
    for path, stack in find_stacks(model).items():
        one = sum(p.numel() // stack.experts * p.element_size() for p in stack.parameters.values())
        edges = stack.cut(one * -(-stack.experts // groups))
        found[path] = make_groups(stack, edges)
        replace(stack, found[path], edges)
    return found


def compare(
    architecture: Architecture, implementation: str, groups: int, again: bool = False
) -> tuple[float, float, int]:
    """Difference of the losses, the worst one of the gradients (relative to a tensor's largest), and the stacks."""
    plain = architecture.build(implementation)
    twin = copy.deepcopy(plain)
    planned = followed_stacks(twin, find_stacks(twin).values(), None)
    cut = in_groups(twin, groups)
    for model in (plain, twin) if again else ():
        model.gradient_checkpointing_enable({"use_reentrant": False})
    of_loss = 0.0
    for _ in range(1 + again):
        losses = [loss(model, architecture.embeds) for model in (plain, twin)]
        of_loss = max(of_loss, abs(losses[0].item() - losses[1].item()))
        for value in losses:
            value.backward()
    passed = {path for path in cut if twin.get_submodule(path).forward.again.passed}
    if again and passed != planned:
        raise AssertionError(f"blocks run past {sorted(passed)} in backward, and {sorted(planned)} are planned")
    theirs = dict(twin.named_parameters())
    worst = 0.0
    for name, parameter in plain.named_parameters():
        if parameter.grad is None:
            continue
        path, _, key = name.rpartition(".")
        if path in cut and key in cut[path][0]._parameters:
            other = torch.cat([group._parameters[key].grad for group in cut[path]])
        else:
            other = theirs[name].grad
        largest = parameter.grad.abs().max().clamp_min(1e-12)
        worst = max(worst, float((parameter.grad - other).abs().max() / largest))
    return of_loss, worst, len(cut)


def table(names: Sequence[str], counts: Sequence[int], implementations: Sequence[str]) -> int:
    """Prints a row for each architecture, implementation and number of groups. Returns how many differ or fail."""
    bad = 0
    for name, found in architectures(names):
        if isinstance(found, str):
            print(f"{name:44s} not built: {found[:300]}", flush=True)
            bad += 1
            continue
        cases = [(count, False) for count in counts] + ([(counts[-1], True)] if found.recomputes else [])
        for implementation, (groups, again) in itertools.product(implementations, cases):
            try:
                of_loss, of_gradients, stacks = compare(found, implementation, groups, again)
                wrong = not stacks or of_loss > TOLERANCE or not of_gradients <= TOLERANCE
                told = f"{of_loss:.0e} {of_gradients:.0e}{' DIFFERS' if wrong else ''}"
            except Exception as error:
                wrong, told = True, f"{type(error).__name__}: {error}"[:200]
            bad += wrong
            print(f"{name:44s} {implementation:10s} {groups}{' again' * again}: {told}", flush=True)
    return bad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names to run; all if there is none")
    parser.add_argument("--groups", type=int, nargs="*", default=[1, 3, EXPERTS])
    parser.add_argument("--implementations", nargs="*", default=list(IMPLEMENTATIONS))
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    started = time.monotonic()
    print("groups: difference of the loss, worst difference of a gradient relative to its tensor's largest value")
    bad = table(given.names, given.groups, given.implementations)
    print(f"{bad} of these differ or were not built; {time.monotonic() - started:.0f} s")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
