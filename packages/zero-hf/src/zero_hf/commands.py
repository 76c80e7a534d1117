"""Runs the subcommands of `zero-hf`. Exit codes: 0, or 2 for a setting or a folder that cannot be used."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import nn

import zero_core
from zero_core import ZeroError

from .config import ConfigError
from .merging import merge_adapter
from .sharding import describe, plan

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    try:
        return int(given.run(given))
    except (ConfigError, ZeroError, ImportError, OSError) as error:
        sys.stderr.write(f"zero-hf: {error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(prog="zero-hf", description="Tools for models and checkpoints.")
    commands = whole.add_subparsers(required=True, metavar="COMMAND")
    parser = commands.add_parser("translate", help="say what each key of a DeepSpeed JSON becomes, and train nothing")
    parser.add_argument("config", metavar="ds_config.json")
    parser.add_argument("--model", metavar="FOLDER", help="with config.json, or that file: also print the plan")
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks (else WORLD_SIZE, or 1)")
    parser.set_defaults(run=_translate)
    parser = commands.add_parser("convert", help="make a checkpoint of DeepSpeed's one for zero_core.checkpoint.load")
    parser.add_argument("folder", metavar="DEEPSPEED_FOLDER", help="what save_checkpoint was given")
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    parser.add_argument("--tag", help="which checkpoint in it (else the one that `latest` names)")
    parser.add_argument("--inert", action="append", default=[], metavar="CLASS", help="of client_state: read as a dict")
    parser.add_argument("--weights", action="store_true", help="write safetensors, and no states")
    parser.add_argument("--dtype", choices=_DTYPES, help="of the safetensors (else fp32, and frozen ones as saved)")
    parser.add_argument("--model", metavar="FOLDER", help="copy its config.json beside the safetensors")
    parser.set_defaults(run=_convert)
    parser = commands.add_parser("merge", help="add a LoRA adapter to the weights of a model, tile by tile")
    parser.add_argument("base", metavar="BASE", help="folder of the model that the adapter was trained beside")
    parser.add_argument("adapter", metavar="ADAPTER", help="folder that PEFT wrote")
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    parser.set_defaults(run=_merge)
    return whole


def _translate(given: argparse.Namespace) -> int:
    from .deepspeed.translation import translate

    model = None if given.model is None else _empty(given.model)
    found = translate(given.config, model=model, world_size=given.world_size)
    sys.stdout.write(f"{found.table()}\n")
    if model is not None:
        ranks = found.shard_size or found.ranks
        optimizer = found.optimizer(model.parameters()) or torch.optim.AdamW(model.parameters())
        planned, _ = plan(
            model,
            optimizer,
            found.zero,
            ranks=ranks,
            replicas=found.ranks // ranks,
            accumulate=found.accumulate or 1,
            reduce_dtype=found.reduce_dtype,
        )
        sys.stdout.write(f"\n{describe(model, found.zero, planned, ranks)}\n")
    return 2 if found.refused else 0


def _empty(where: str) -> nn.Module:
    """Returns a model without values from config.json or its folder. Reads no other file, and runs no code from it."""
    try:
        config = transformers.AutoConfig.from_pretrained(where, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read --model {where}: name a config.json or its folder ({error})") from error
    names = config.architectures or []
    made: Any = getattr(transformers, names[0] if names else "", None)
    known = isinstance(made, type) and issubclass(made, transformers.PreTrainedModel)
    build: Any = made._from_config if known else transformers.AutoModel.from_config
    with zero_core.deferred_init():
        model: nn.Module = build(config, dtype=config.dtype)
    return model


def _convert(given: argparse.Namespace) -> int:
    from . import deepspeed

    if given.weights:
        dtype = _DTYPES.get(given.dtype)
        options = {"tag": given.tag, "inert": given.inert, "model": given.model}
        found = deepspeed.convert.convert_weights(given.folder, given.out, dtype=dtype, **options)
    elif given.dtype or given.model:
        raise ConfigError("--dtype and --model only work with --weights: add --weights, or leave them out")
    else:
        found = deepspeed.convert.convert(given.folder, given.out, tag=given.tag, inert=given.inert)
    what = "its weights are" if given.weights else "it is"
    sys.stdout.write(
        f"{found.folder}: {len(found.parameters)} parameters after step {found.global_steps}, saved at stage "
        f"{found.stage} on {found.world_size} ranks; {what} in {given.out}\n"
    )
    return 0


def _merge(given: argparse.Namespace) -> int:
    changed = merge_adapter(given.base, given.adapter, given.out)
    sys.stdout.write(f"{len(changed)} weights of {given.base} changed; the model is in {given.out}\n")
    return 0
