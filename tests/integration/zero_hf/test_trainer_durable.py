"""A Trainer whose steps stay on disk (durable): killed with -9, it goes on after its last step, with the same bits."""

import random
import signal

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import EarlyStoppingCallback, TrainerCallback

from tests import kit

from .durable_runs import GIVEN, At, Stop, durable, frozen, gone_on, interrupted, model, plain, refused, slabs
from .test_trainer_checkpoints import same
from .trainers import Sharded, launched, llama, rows, train, trainer, weights

pytestmark = pytest.mark.promise("durable-trainer")


def untimed(history):
    but = ("runtime", "second", "train_loss")
    return [{key: value for key, value in line.items() if not any(word in key for word in but)} for line in history]


@pytest.mark.parametrize(
    ("place", "moments", "last"),  # a step's commit begins with the forward after it
    [
        ({}, [(2, "on_step_end"), (4, "on_evaluate"), (6, "on_pre_optimizer_step")], 6),
        ({"optimizer": "nvme", "offload": "host"}, [(3, "on_step_begin"), (4, "on_save")], 3),
    ],
    ids=["nvme", "states on nvme"],
)
def test_a_trainer_that_is_killed_goes_on_after_its_last_step(tmp_path, interpreter, place, moments, last):
    """Dropout shows the random state, the cosine the schedule, the epochs the place in the data."""
    given = GIVEN | {"save_strategy": "steps", "save_steps": 4}
    whole, logs = train(Sharded, tmp_path / "whole", model(), zero=plain(tmp_path, **place), **given)
    for step, moment in moments:
        done = interpreter(
            f"""
            import os, signal
            from tests.integration.zero_hf.durable_runs import *
            from tests.integration.zero_hf.trainers import *

            class Kill(TrainerCallback):
                def {moment}(self, args, state, control, **given):
                    if state.global_step == {step}:
                        os.kill(os.getpid(), signal.SIGKILL)

            given = dict({given!r}, callbacks=[Kill()])
            train(Sharded, {str(tmp_path / "run")!r}, model(), zero={durable(tmp_path, **place)!r}, **given)
            """
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert len(slabs(tmp_path)) == 1
    again, later = train(Sharded, tmp_path / "run", model(7), zero=durable(tmp_path, **place), **given)
    assert len(logs.losses) - len(later.losses) in (last - 1, last)  # the last commit may have been under way
    assert later.losses == logs.losses[-len(later.losses) :]
    same(weights(again.model), weights(whole.model))
    assert untimed(again.state.log_history) == untimed(whole.state.log_history)
    assert again.state.total_flos == whole.state.total_flos
    assert slabs(tmp_path) == []  # the last checkpoint has all of it


@kit.on_ranks(2)
def test_two_ranks_go_on(tmp_path):
    with launched():
        whole, logs = train(Sharded, tmp_path / "whole", model(), zero=plain(tmp_path), **GIVEN)
        expected = weights(whole.model)
        whole.zero_run.close()
        interrupted(tmp_path, 5)
        assert len(slabs(tmp_path)) == 2
        again, later = gone_on(tmp_path)
        same(weights(again.model), expected)
        assert later.losses == logs.losses[4:]
        again.save_model()
        again.accelerator.wait_for_everyone()
        again.zero_run.close()
        assert slabs(tmp_path) == []


def test_in_other_tiles_it_goes_on_from_a_checkpoint_that_is_made_of_its_steps(tmp_path):
    """Without dropout, since the random state is in no such checkpoint. Its embedding is not trained."""
    whole, logs = train(Sharded, tmp_path / "whole", frozen(), zero=plain(tmp_path), **GIVEN)
    interrupted(tmp_path, 5, build=frozen)
    made, later = trainer(Sharded, tmp_path / "run", frozen(), zero=durable(tmp_path, tile_numel=2 << 20), **GIVEN)
    assert made.evaluate()["eval_loss"] == pytest.approx(logs.evaluations[1])
    made.train()
    assert later.losses == logs.losses[4:] and made.state.log_history[0]["loss"] == logs.losses[0]
    same(weights(made.model), weights(whole.model))
    assert (tmp_path / "run" / "checkpoint-4" / "trainer_state.json").is_file() and len(slabs(tmp_path)) == 1


def _on_two_ranks_after_one(tmp_path):
    with launched():
        made, logs = gone_on(tmp_path, build=lambda seed: llama())
        made.zero_run.close()
        return logs.losses, slabs(tmp_path)


def test_two_ranks_go_on_after_one(ranks, tmp_path):
    interrupted(tmp_path, 5, build=llama)
    for losses, names in ranks(2).run(_on_two_ranks_after_one, tmp_path):
        assert len(losses) == 4 and len(names) == 2


def test_callbacks_and_the_best_checkpoint_are_as_at_a_checkpoint(tmp_path):
    given = {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1.0}
    given |= {"metric_for_best_model": "eval_loss", "restore_callback_states_from_checkpoint": True, "max_steps": 30}
    patient = {"early_stopping_patience": 3, "early_stopping_threshold": 1e3}  # no loss is better by so much
    more = GIVEN | given | {"callbacks": [EarlyStoppingCallback(**patient)]}
    whole, _ = train(Sharded, tmp_path / "whole", model(), zero=plain(tmp_path), **more)
    assert whole.state.global_step == 8, "of four evaluations the last three were no better than the first"
    interrupted(tmp_path, 5, callbacks=[EarlyStoppingCallback(**patient)], **given)
    again, _ = gone_on(tmp_path, callbacks=[EarlyStoppingCallback(**patient)], **given)
    mine, theirs = again.state, whole.state
    assert (mine.global_step, mine.best_metric) == (theirs.global_step, theirs.best_metric)
    same(weights(again.model), weights(whole.model))


@pytest.mark.promise("durable-trainer-refused")
def test_a_run_that_has_ended_takes_no_step_and_is_there_until_it_is_saved(tmp_path, monkeypatch):
    """Eight steps end in the middle of an epoch. A checkpoint of weights alone does not count."""
    given = SAVING | {"save_only_model": True, "resume": True}  # nothing is there yet
    whole, logs = gone_on(tmp_path, build=lambda seed: model(), **given)
    expected = weights(whole.model)
    whole.end()
    assert len(slabs(tmp_path)) == 1
    again, later = gone_on(tmp_path)
    assert later.losses == [] and again.state.global_step == 8
    same(weights(again.model), expected)
    synced = []
    monkeypatch.setattr("os.sync", lambda: synced.append(len(slabs(tmp_path))))
    again.save_model(str(tmp_path / "final"))
    assert slabs(tmp_path) == [] and synced == [1]  # the model is on the disk before they go
    assert again.evaluate()["eval_loss"] == pytest.approx(logs.evaluations[-1])
    again.end()
    new, later = gone_on(tmp_path, build=lambda seed: model())
    assert later.losses == logs.losses
    new.end()


@pytest.mark.promise("durable-trainer-refused")
def test_a_run_whose_last_step_was_saved_takes_no_step_either(tmp_path):
    """Its files on the drive are gone then, and its last checkpoint says whose it is."""
    given = {"save_strategy": "steps", "save_steps": 4}
    whole, _ = gone_on(tmp_path, build=lambda seed: model(), **given)
    expected = weights(whole.model)
    whole.end()
    assert slabs(tmp_path) == []
    again, later = gone_on(tmp_path, **given)
    assert later.losses == [] and again.state.global_step == 8
    same(weights(again.model), expected)
    again.end()
    said = r"steps of a run with other settings \(weight_decay was 0.0, is 1\).*checkpoint-8 and all checkpoints"
    refused(tmp_path, said, **given, weight_decay=1)


class Stream(IterableDataset):
    def __len__(self):
        return 64

    def __iter__(self):
        return iter(rows(64))


SAVING = {"save_strategy": "steps", "save_steps": 4}
PLATEAU = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "threshold": 0.5}}
PLATEAU |= {"metric_for_best_model": "eval_loss"}


@pytest.mark.parametrize(
    ("given", "stopped", "resume"),
    [(PLATEAU, 5, None), ({"train_dataset": Stream()}, 5, None), (SAVING, 6, True), (SAVING, 6, "checkpoint-4")],
    ids=["a schedule that follows the evaluation", "a stream", "True", "the last checkpoint"],
)
def test_it_goes_on_after_the_last_step_with(tmp_path, given, stopped, resume):
    """Also where the last checkpoint is asked for, which is older."""
    whole, logs = train(Sharded, tmp_path / "whole", model(), zero=plain(tmp_path), **GIVEN | given)
    interrupted(tmp_path, stopped, **given)
    resume = str(tmp_path / "run" / resume) if isinstance(resume, str) else resume
    again, later = gone_on(tmp_path, resume=resume, **given)
    assert later.losses == logs.losses[stopped - 1 :]
    same(weights(again.model), weights(whole.model))
    rates = [each.optimizer.param_groups[0]["lr"] for each in (whole, again)]
    assert rates[0] == rates[1] and (given is not PLATEAU or rates[0] < 1e-3)


def test_a_checkpoint_is_gone_on_from_where_there_is_no_step(tmp_path):
    whole, logs = train(Sharded, tmp_path / "run", model(), zero=plain(tmp_path), **GIVEN | SAVING)
    given = GIVEN | SAVING | {"callbacks": [At(7)]}
    made, _ = trainer(Sharded, tmp_path / "run", model(7), zero=durable(tmp_path), **given)
    with pytest.raises(Stop):
        made.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    made.end()
    again, later = gone_on(tmp_path, **SAVING)
    assert later.losses == logs.losses[6:]
    same(weights(again.model), weights(whole.model))


class Draws(TrainerCallback):
    """What numpy, torch and Python draw as each step begins."""

    def __init__(self):
        self.drawn = []

    def on_step_begin(self, args, state, control, **given):
        self.drawn.append((np.random.rand(), float(torch.rand(1)), random.random()))


def test_every_generator_goes_on(tmp_path):
    """The evaluation after a step draws too. A line of the log that is due later counts the work of all its steps."""
    whole, again = Draws(), Draws()
    made, _ = train(
        Sharded, tmp_path / "whole", model(), zero=plain(tmp_path), callbacks=[whole], **GIVEN | {"logging_steps": 8}
    )
    interrupted(tmp_path, 5, callbacks=[Draws(), At(5)], logging_steps=8)
    later, _ = gone_on(tmp_path, callbacks=[again], logging_steps=8)
    assert again.drawn == whole.drawn[4:] and len(again.drawn) == 4
    assert later.state.total_flos == made.state.total_flos


def test_rows_that_are_drawn_anew_each_time_are_the_same_data(tmp_path):
    class Drawn(torch.utils.data.Dataset):
        def __len__(self):
            return 11

        def __getitem__(self, place):
            return {k: torch.where(torch.rand(12) < 0.1, 0, v) for k, v in rows(11)[place].items()}

    given = GIVEN | {"train_dataset": Drawn(), "save_strategy": "steps", "save_steps": 4}
    _, logs = train(Sharded, tmp_path / "whole", model(), zero=plain(tmp_path), **given)
    _, durables = train(Sharded, tmp_path / "other", model(), zero=durable(tmp_path), **given)
    assert durables.losses == logs.losses  # that rows are compared draws nothing that the run would have drawn
    checkpoint = str(tmp_path / "whole" / "checkpoint-4")
    _, expected = train(Sharded, tmp_path / "whole", model(), zero=plain(tmp_path), resume=checkpoint, **given)
    interrupted(tmp_path, 5, train_dataset=Drawn())
    _, later = gone_on(tmp_path, train_dataset=Drawn())
    assert later.losses == expected.losses
