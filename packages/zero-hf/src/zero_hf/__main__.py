"""`zero-hf`: the command line. Owns its subcommands and exit codes: 0, and 2 where something cannot be followed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import nn

import zero_core

from .config import ConfigError
from .deepspeed.translation import translate
from .sharding import describe, plan


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="zero-hf", description="What DeepSpeed's users have, read by zero-hf.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_translate(commands)
    given = parser.parse_args(arguments)
    try:
        return int(given.run(given))
    except ConfigError as error:
        sys.stderr.write(f"zero-hf: {error}\n")
        return 2


def _add_translate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("translate", help="say what each key of a DeepSpeed JSON becomes, and train nothing")
    parser.add_argument("config", metavar="ds_config.json")
    parser.add_argument("--model", metavar="FOLDER", help="with config.json, or that file: also print the plan")
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks (else WORLD_SIZE, or 1)")
    parser.set_defaults(run=_translate)


def _translate(given: argparse.Namespace) -> int:
    model = None if given.model is None else _empty(given.model)
    found = translate(given.config, model=model, world_size=given.world_size)
    sys.stdout.write(f"{found.table()}\n")
    if model is not None:
        ranks = found.shard_size or found.ranks
        optimizer = found.optimizer(model.parameters()) or torch.optim.AdamW(model.parameters())
        planned, _ = plan(
            model, optimizer, found.zero, ranks=ranks, accumulate=found.accumulate or 1, reduce_dtype=found.reduce_dtype
        )
        sys.stdout.write(f"\n{describe(model, found.zero, planned, ranks)}\n")
    return 2 if found.refused else 0


def _empty(where: str) -> nn.Module:
    """A model without values, of a folder with config.json or of that file. Reads nothing else, and runs no code."""
    try:
        config = transformers.AutoConfig.from_pretrained(where, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {where}: {error}") from error
    names = config.architectures or []
    made: Any = getattr(transformers, names[0], None) if names else None
    with zero_core.deferred_init():
        model: nn.Module = (made or transformers.AutoModel)._from_config(config, dtype=config.dtype)
    return model


if __name__ == "__main__":
    sys.exit(main())
