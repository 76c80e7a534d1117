"""Refuses a Trainer class with methods that `sharded` would hide. Owns which methods of ours hide those of a subclass.

`sharded` puts its classes before the given one, so a method of theirs runs in place of the subclass's, which runs only
if theirs calls it. Any name that this module does not list as calling it is one that hides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from transformers import Trainer

from .adapters import adapters_of
from .config import ConfigError

__all__ = ["hidden", "refuse_hidden"]

CALLING = frozenset(  # methods of ours that call the one they override wherever a stock Trainer would
    {
        "_finalize_training",
        "_generate",
        "_generate_single_turn",
        "_inner_training_loop",
        "_maybe_log_save_evaluate",
        "_prepare_input",
        "_run_epoch",  # not after the last step, when there is no epoch to run
        "call_model_init",
        "create_accelerator_and_postprocess",
        "create_optimizer",  # not where DeepSpeed's JSON names one: transformers does not call it then either
        "create_optimizer_and_scheduler",
        "create_scheduler",  # likewise
        "end",
        "evaluation_loop",
        "prediction_step",
        "save_model",
        "train",
    }
)

# The overrides that are hidden for some trainers alone: the condition, and the way out where it is not the usual one.
# A key is a method, or a method of one class.
_ONLY_IF: dict[str, tuple[Callable[[Any, nn.Module | None], bool], str]] = {
    # Ours gathers the adapters and hands them to the override as state_dict=.
    "_save": (lambda trainer, model: model is not None and not adapters_of(model), ""),
    "_load_rng_state": (lambda trainer, model: trainer.zero_config.durable is not None, "; or leave durable out"),
    # Calls super(), and then reads the coefficient that adaptive entropy had. Without it, it adds nothing.
    "trl.trainer.grpo_trainer.GRPOTrainer._load_optimizer_and_scheduler": (
        lambda trainer, model: getattr(trainer.args, "use_adaptive_entropy", False),
        "leave use_adaptive_entropy out: entropy_coef stays as it is given",
    ),
}


def hidden(theirs: Sequence[type], ours: Sequence[type]) -> dict[str, type]:
    """Maps each name of `ours` that hides an attribute of `theirs` to the class that has it.

    theirs: the method resolution order of the class that `ours` stand before. A method of transformers.Trainer itself
    is not hidden: ours is written to replace it.
    """
    found = {}
    for name in sorted({name for each in ours for name in vars(each) if not name.startswith("__")} - CALLING):
        owner = next((each for each in theirs if name in vars(each)), Trainer)
        if not issubclass(Trainer, owner) and vars(owner)[name] is not getattr(Trainer, name, None):
            found[name] = owner
    return found


def refuse_hidden(
    theirs: Sequence[type], ours: Sequence[type], trainer: Any = None, model: nn.Module | None = None
) -> None:
    """Raises ConfigError for a method that would be hidden.

    trainer, model: the Trainer, once it is being made, and its model, once it has one. Without a trainer, only
    methods that are hidden for all trainers of the class are refused.
    """
    said: dict[str, list[str]] = {}  # hidden methods, by the way out
    for name, owner in hidden(theirs, ours).items():
        where = f"{owner.__module__}.{owner.__qualname__}.{name}"
        applies, way_out = _ONLY_IF.get(where) or _ONLY_IF.get(name) or (None, "")
        if applies is not None and (trainer is None or not applies(trainer, model)):
            continue
        if where in _ONLY_IF:
            pass
        elif not hasattr(Trainer, name):
            way_out = "sharded Trainers use this name themselves: give yours another one"
        else:
            base = next(each for each in theirs[theirs.index(owner) + 1 :] if issubclass(each, Trainer))
            bases = f"{'' if issubclass(owner, Trainer) else f'{owner.__name__}, '}zero_hf.sharded({base.__name__})"
            way_out = (
                f"override them in a subclass of a sharded class, class {theirs[0].__name__}({bases}){way_out}; or, "
                "where the Trainer's own would do, take it in a subclass of yours, as in _save = Trainer._save"
            )
        said.setdefault(way_out, []).append(where)
    for way_out, which in said.items():
        raise ConfigError(
            f"zero_hf.sharded puts methods of its own before {', '.join(which)}, which would not be called: {way_out}"
        )
