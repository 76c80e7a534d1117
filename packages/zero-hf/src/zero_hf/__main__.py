"""`zero-hf`: the command line. Owns its subcommands and exit codes: 0, and 2 where something cannot be followed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .config import ConfigError
from .deepspeed.translation import translate


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
    found = translate(given.config, world_size=given.world_size)
    sys.stdout.write(f"{found.table()}\n")
    return 2 if found.refused else 0


if __name__ == "__main__":
    sys.exit(main())
