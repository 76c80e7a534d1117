"""zero-train's tiny recipe with nothing offloaded, everything on the host, and as the planner chooses."""

from pathlib import Path
from typing import Any

from tests.benchmarks.gpu.stage import Missing, Piece

PLACES = ("none", "host", "auto")


def run(piece: Piece) -> None:
    for place in PLACES:
        piece.attempt(place, lambda place=place: losses(piece, place))


def losses(piece: Piece, place: str) -> dict[str, Any]:
    try:
        from zero_train.run import train
        from zero_train.settings import compose
    except ImportError as error:
        raise Missing(f"zero-train cannot be imported: {error}") from error
    folder, device = Path(piece.options["folder"], place), piece.options["device"]
    given = [
        "recipe=tiny",
        "data=synthetic",
        "run.steps=5",
        f"offload={place}",
        f"hardware.device={device}",
        f"run.dir={folder}",
    ]
    outcome = train.run(compose.compose([*given, "run.threads=1"] if piece.dry else given))
    steps = outcome.history.steps
    if outcome.exit_code:
        raise RuntimeError(f"exit {outcome.exit_code}")
    return {"losses": [step.loss for step in steps], "last_step": vars(steps[-1])}
