"""The fuzzer in a minute: programs of fixed seeds match, and it finds the bugs that mutants put back."""

import os
import time
from random import Random

import pytest
import torch

from tests.fuzz import unusual
from tests.fuzz.drawing import generate
from tests.fuzz.fuzzer import Fuzzer, failing
from tests.fuzz.mutants import MUTANTS, runner
from tests.fuzz.program import Block, Config, Model, Op, Optimizer, Program, Share, smaller, sound
from tests.fuzz.run import Outcome, World

PROGRAMS = 100
MISTAKES = {f"error {each.__name__}" for each in (AttributeError, NameError, TypeError)}  # of a mutant's own
# For each mutant a program that was found, and made small, by `python -m tests.fuzz --mutants`.
SMALLEST = {
    "a gradient is lost": Program(loop=(Op(how="joint"), Op("step")), config=Config(ranks=2), seed=275),
    "writes in forward are lost": Program(Model((Block(write="row"),)), loop=(Op(),), config=Config(ranks=2), seed=7),
    "writes through detach are lost": Program(loop=(Op("write", how="detach"),)),
    "changes before a backward are not seen": Program(loop=(Op("forward", how="l2"), Op("write"), Op("late"))),
    "shard evaluates weights": Program(Model((Block("spectral_norm"),), container="attributes")),
    "shared memory is not seen": Program(
        Model((Block(), Block()), shares=(Share("attribute"),)), loop=(Op(), Op("step"), Op("evaluate"))
    ),
    "hooks put on after shard are lost": Program(loop=(Op("hook", how="accumulated"), Op(), Op("step"))),
    "changed options are not seen": Program(
        loop=(Op("options", how="momentum"), *(Op(), Op("step")) * 2), config=Config(placement="host host host")
    ),
    "padding is not zeroed": Program(
        Model((Block("transformer"),), container="attributes"), loop=(Op("evaluate", how="eval"),)
    ),
    "an interrupt is not mended": Program(  # at so many moments that some are left, however the library's lines move
        config=Config(stage=0), loop=(*(Op("interrupt", moment) for moment in range(0, 600, 3)), Op(), Op("step"))
    ),
    "the graph does not ask for its parameters": Program(
        Model((Block("encoder", keep="buffer"),)), loop=(Op(how="kept_after"),)
    ),
    "views are above autograd": Program(loop=(Op("transform", how="hvp"),)),
    "views are not dispatched": Program(loop=(Op("write", how="data"),)),
    "a backward in a backward finds no memory": Program(Model((Block(),) * 3), loop=(Op(how="hook_runs"),)),
}


@pytest.fixture(scope="module")
def fuzzer():
    with Fuzzer() as made:
        yield made


@pytest.mark.promise("fuzz-match")
def test_programs_of_fixed_seeds_match_plain_torch_or_are_refused(fuzzer):
    tally = fuzzer.run(range(PROGRAMS), shrink_seconds=30)
    print(tally)
    told = "\n\n".join(f"{failed.smallest!r}\n{failed.outcome.text}" for failed in tally.failed)
    assert not tally.failed and not tally.unsteady, f"{tally}\n\n{told}"
    assert tally.matched >= 0.9 * tally.programs, str(tally)


@pytest.mark.promise("fuzz-finds-bugs")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_bug_that_is_put_back_is_found(fuzzer, name):
    with Fuzzer(runner(name)) as mutated:
        found = mutated.judge(SMALLEST[name])
    assert failing(found) and found.kind not in MISTAKES, found
    assert not failing(fuzzer.judge(SMALLEST[name]))


def _every_word() -> list[Program]:
    """A program for each kind of hook, shared memory, option and idea that unusual.py draws."""
    step = (Op(), Op("step"))
    programs = [Program(before=(Op("hook", how=how),), loop=step) for how in unusual.HOOKS]
    programs += [Program(Model((Block(), Block("mlp")), shares=(Share(how),)), loop=step) for how in unusual.SHARES]
    for name, options in unusual.OPTIONS.items():
        changes = [Op("options", how=how) for how in options]
        programs += [Program(optimizer=Optimizer(name), loop=(change, *step)) for change in changes]
    simple = Program(Model((Block(), Block("mlp"))), loop=step)
    programs += [Program(loop=(Op("leaf", how=how),)) for how in unusual.LEAVES]
    programs += [Program(loop=(Op("transform", how=how),)) for how in unusual.TRANSFORMS]
    for how in unusual.KEPT_LOSSES:
        programs += [Program(Model((Block("mlp", keep=keep),)), loop=(Op(how=how),)) for keep in unusual.KEEPS]
    ideas = [*unusual.IDEAS.values(), *unusual.WAYS.values()]
    return programs + [idea(Random(k), simple) for idea in ideas for k in range(5)]


def test_plain_torch_runs_every_word_of_the_grammar():
    """Else the fuzzer would take a mistake of its own for a program that plain torch cannot run."""
    torch.manual_seed(0)
    for program in _every_word():
        assert sound(program)
        World(program).run()


def _hang(program: Program, folder: str) -> Outcome:
    time.sleep(60)
    return Outcome("match")


def _die(program: Program, folder: str) -> Outcome:
    os._exit(3)


def _raise(program: Program, folder: str) -> Outcome:
    raise KeyError("not one of our errors")


@pytest.mark.promise("fuzz-bad-ranks")
@pytest.mark.parametrize(
    ("run", "kind"), [(_hang, "hang"), (_die, "crash"), (_raise, "error KeyError")], ids=["hang", "crash", "error"]
)
def test_a_rank_that_hangs_dies_or_raises_is_a_failure_and_is_replaced(monkeypatch, run, kind):
    monkeypatch.setattr("tests.fuzz.fuzzer.PROGRAM_SECONDS", 2.0)
    with Fuzzer(run) as fuzzer:
        assert [fuzzer.judge(Program()).kind for _ in range(2)] == [kind, kind]


def test_a_program_is_its_repr_and_every_smaller_one_is_smaller():
    for seed in range(100):
        program = generate(seed)
        assert eval(repr(program)) == program and sound(program)
        assert all(len(repr(less)) < len(repr(program)) for less in smaller(program))
