"""A run that goes on on another number of ranks keeps its global batch, and its place in the data.

What would have to break: a step of more or fewer sequences, a sequence that is left out or comes twice, or a run that
goes on with another batch without a word.
"""

import contextlib
import io
from unittest.mock import patch

import pytest

from tests.integration.zero_train.helpers import COMMON, trained
from zero_core.testing import RankError
from zero_train.data.text import Corpus
from zero_train.errors import ConfigError
from zero_train.run import resume
from zero_train.settings import compose

pytestmark = pytest.mark.promise("other-ranks")

RUN = ("precision=fp32", "run.micro_batch=2", "run.evaluate_every=0", "run.sample_bytes=0")
SCHEDULE = ("optim.warmup_steps=0", "optim.final_fraction=1")  # the same rate, however long a run is


def told(folder, *overrides):
    """(losses, the number of each sample that this rank read, what was said) of a run on this rank."""
    numbers, read = [], Corpus.batch

    def batch(self, first, rows, *given):
        numbers.extend(range(first, first + rows))
        return read(self, first, rows, *given)

    said = io.StringIO()
    with patch.object(Corpus, "batch", batch), contextlib.redirect_stdout(said):
        losses = trained(folder, *RUN, *SCHEDULE, *overrides).losses
    return losses, numbers, " ".join(said.getvalue().split())


def on(ranks, size, folder, *overrides):
    """The same of all ranks: the first one's losses, every sample's number in order, what the first one said."""
    found = ranks(size).run(told, folder, *overrides)
    return found[0][0], sorted(number for each in found for number in each[1]), found[0][2]


@pytest.mark.parametrize(
    ("now", "then", "kept"),
    [(1, 8, ("offload=none", "run.checkpoint_every=3")), (4, 2, ("offload=nvme", "run.durable=process"))],
)
def test_a_step_has_the_same_sequences_on_another_number_of_ranks(ranks, tmp_path, now, then, kept):
    """16 of them: on two ranks, on fewer or more, there once more by the same command, and on two again."""
    whole = on(ranks, 2, tmp_path / "whole", "offload=none", "run.steps=7", "run.accumulate=4")
    losses, numbers = [], []
    for size, steps in ((2, 3), (now, 5), (now, 6), (2, 7)):
        command = (f"run.steps={steps}", "run.accumulate=4", "run.resume=auto", *kept)
        more, read, said = on(ranks, size, tmp_path / "run", *command)
        line = f"run.accumulate={then} in place of 4: a step has run.global_batch=16 on {now} ranks"
        assert (line in said) == (size == now)
        assert f"continuing after step {len(losses)}" in said or not losses
        assert "run.accumulate=8 (was" not in said
        losses += more
        numbers += read
    assert numbers == whole[1] == list(range(7 * 16))
    assert losses == pytest.approx(whole[0], rel=1e-5)


def test_durable_steps_of_which_a_machine_has_a_part_are_refused_and_the_way_out_works(ranks, tmp_path):
    command = (tmp_path / "run", "offload=nvme", "run.durable=process", "run.resume=auto")
    on(ranks, 2, *command, "run.steps=2")
    first, second = sorted((tmp_path / "run").glob("*.slab"))
    second.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"the run had 2 ranks.* 2 ranks and their machines, or remove \S+\.slab"):
        told(*command, "run.steps=3")
    second.write_bytes((tmp_path / "elsewhere").read_bytes())
    assert "continuing after step 2" in on(ranks, 2, *command, "run.steps=3")[2]
    second.unlink()
    first.unlink()
    assert "beginning at step 1" in told(*command, "run.steps=3")[2]


def test_a_rank_that_has_lost_its_steps_is_told_and_the_way_out_works(ranks, tmp_path):
    """A machine came back with an empty drive, and restarts by the same command."""
    whole = on(ranks, 2, tmp_path / "whole", "offload=none", "run.steps=5")
    command = (tmp_path / "run", "offload=nvme", "run.durable=process", "run.resume=auto")
    on(ranks, 2, *command, "run.steps=2", "run.checkpoint_every=2")
    assert "continuing after step 2" in on(ranks, 2, *command, "run.steps=4")[2]
    _, second = sorted((tmp_path / "run").glob("*.slab"))
    for file in (second, second.with_name(f"{second.name}.json")):
        file.unlink()
    with pytest.raises(RankError, match="rank 1 has lost its slab.*after removing the slabs of all ranks"):
        on(ranks, 2, *command, "run.steps=5")
    for file in (tmp_path / "run").glob("*.slab*"):
        file.unlink()
    losses, numbers, said = on(ranks, 2, *command, "run.steps=5")
    assert "continuing after step 2" in said
    assert losses == pytest.approx(whole[0][2:], rel=1e-5) and numbers == whole[1][-len(numbers) :]


def composed(folder, *overrides):
    return compose.compose([*COMMON, *RUN, f"run.dir={folder}", *overrides])


@pytest.mark.advice("start a number of ranks that divides", "is no multiple of {}, which is", "set run.micro_batch={}")
@pytest.mark.parametrize(
    ("ranks", "words", "advice", "way"),
    [
        (3, "", "start a number of ranks that divides 8", (8, "")),
        (3, "", "or set run.global_batch=18", (3, "run.global_batch=18")),
        (16, "", "set run.micro_batch=1", (16, "run.micro_batch=1")),
        (2, "run.micro_batch=3", "set run.micro_batch=2", (2, "run.micro_batch=2")),
        (1, "run.micro_batch=5 run.global_batch=16", "set run.micro_batch=4", (1, "run.micro_batch=4")),
    ],
)
def test_ranks_that_cannot_have_the_batch_are_refused_and_the_way_out_works(tmp_path, ranks, words, advice, way):
    first = composed(tmp_path, "run.accumulate=4")
    resume.keep_batch(None, first, 2)
    (tmp_path / resume.CONFIG).write_text(compose.as_yaml(first))
    with pytest.raises(ConfigError, match=r"run.global_batch=16.* is no multiple of") as raised:
        resume.keep_batch(None, composed(tmp_path, "run.resume=auto", *words.split()), ranks)
    assert advice in str(raised.value)
    assert ("from the run that run.resume=auto continues" in str(raised.value)) == ("global_batch" not in words)
    size, words = way
    again = composed(tmp_path, "run.resume=auto", *words.split())
    resume.keep_batch(None, again, size)
    assert again.run.micro_batch * again.run.accumulate * size == again.run.global_batch


def test_a_run_that_is_named_goes_on_with_the_batch_of_its_command(tmp_path, capsys):
    done = trained(tmp_path / "run", *RUN, "offload=none", "run.steps=1", "run.checkpoint_every=1", "run.accumulate=2")
    more = trained(tmp_path / "more", *RUN, "offload=none", "run.steps=2", f"run.resume={done.folder}")
    assert len(more.losses) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "run.accumulate=1 (was 2), run.global_batch=2 (was 4)" in said


def test_a_run_that_is_named_goes_on_with_the_optimizer_of_its_command(tmp_path):
    """At a rate of 0 two runs save the same values and moments: fails if one goes on with the decay that it saved."""
    ends = []
    for decay in ("0.1", "5"):
        options = ("offload=none", "run.steps=1", "run.checkpoint_every=1", "optim.lr=0", f"optim.weight_decay={decay}")
        done = trained(tmp_path / decay, *RUN, *options)
        more = ("offload=none", "run.steps=3", "optim.lr=0.01", "optim.weight_decay=5", f"run.resume={done.folder}")
        ends.append(trained(tmp_path / f"{decay}_more", *RUN, *more).digest)
    assert ends[0] == ends[1]


def validated(folder, *overrides):
    return trained(folder, *RUN, "run.evaluate_every=1", "run.steps=1", "offload=none", *overrides).validation


def test_a_validation_loss_is_of_the_same_batches_on_any_number_of_ranks(ranks, tmp_path):
    """Four of them. Fails if three ranks take three or six."""
    one, three = (ranks(size).run(validated, tmp_path / str(size), "run.evaluate_batches=4")[0] for size in (1, 3))
    assert one[0][1] == pytest.approx(three[0][1], rel=1e-6)
