"""Runs of a Trainer whose steps stay on disk, whole, ended by an exception, and gone on with."""

import pytest
from transformers import TrainerCallback

from tests.integration.zero_hf.trainers import Sharded, llama, train, trainer
from zero_hf import ConfigError

# Two micro-batches a step and eleven rows in batches of two: epochs of three steps, of which the last one is short.
GIVEN = {"gradient_accumulation_steps": 2, "max_steps": 8, "data": 11, "eval_strategy": "steps", "eval_steps": 2}


def durable(tmp_path, kind="process", **more):
    return {"offload": "nvme", "nvme_paths": [str(tmp_path / "drive")], "durable": kind} | more


def plain(tmp_path, **more):
    return durable(tmp_path, kind=None, **more)


def slabs(tmp_path):
    return sorted(path.name for path in (tmp_path / "drive").glob("*.slab"))


def model(seed=0):
    return llama(seed, attention_dropout=0.3)


def llama_0():
    return llama(0)


def frozen():
    made = llama()
    made.model.embed_tokens.requires_grad_(False)
    return made


class Stop(Exception):
    pass


class At(TrainerCallback):
    """Ends the run at a step. `when`: the Trainer's event."""

    def __init__(self, step, when="on_step_end"):
        def stop(args, state, control, **given):
            if state.global_step == step:
                raise Stop

        setattr(self, when, stop)


def interrupted(tmp_path, step, when="on_step_end", build=model, zero=None, callbacks=(), **given):
    """A run in output_dir=tmp_path/run that an exception ends, and its files with it."""
    given = GIVEN | given | {"callbacks": [*callbacks, At(step, when)]}
    made, _ = trainer(Sharded, tmp_path / "run", build(), zero=zero or durable(tmp_path), **given)
    with pytest.raises(Stop):
        made.train()
    made.zero_run.close()  # end() would also end the process group


def refused(tmp_path, said, build=model, zero=None, resume=None, error=ConfigError, **given):
    """A Trainer of the run that does not train."""
    made, _ = trainer(Sharded, tmp_path / "run", build(), zero=zero or durable(tmp_path), **GIVEN | given)
    with pytest.raises(error, match=said):
        made.train(resume_from_checkpoint=resume)
    return made


def gone_on(tmp_path, build=model, zero=None, resume=None, **given):
    return train(Sharded, tmp_path / "run", build(7), zero=zero or durable(tmp_path), resume=resume, **GIVEN | given)
