"""The plan: machine's facts filled in, tiers too small refused, and the text that is printed."""

import dataclasses
import re

import pytest

import zero_core
from zero_offload.memory.arena import Arena
from zero_train.cli import unused_keys
from zero_train.errors import ConfigError
from zero_train.model import causal_lm
from zero_train.run import planning
from zero_train.run.ranks import Ranks
from zero_train.settings import compose

SIZES = ["model.hidden_size=1024", "model.intermediate_size=2816", "model.layers=8", "model.heads=16"]  # 103 M

RATES = [
    *("hardware.host_gib=20", "hardware.nvme_gib=100", "hardware.tflops=1", "hardware.update_gbps=50"),
    *("hardware.nvme_read_gbps=4", "hardware.nvme_write_gbps=4", "hardware.nvme_endurance_tb=1000"),
]


def planned(*overrides, ranks=Ranks()):  # noqa: B008  (frozen)
    composed = compose.compose(["recipe=tiny", "precision=bf16", "run.dir=runs/x", *SIZES, *overrides])
    with zero_core.deferred_init():
        model = causal_lm.build(composed.model, composed.data.sequence_length)
    return composed, planning.make(composed, model, ranks, None)


@pytest.mark.promise("memory-of-libraries")
@pytest.mark.parametrize("ranks", [1, 2])
def test_memory_that_libraries_take_whole_is_refused_with_the_memory_that_would_do(ranks):
    """Fails if the advice is of no use when it is followed, as moving states is where nothing is left."""
    given = ("offload=host", "run.dry=true", "hardware.nodes=1", f"hardware.ranks_per_node={ranks}")
    with pytest.raises(ConfigError, match=r"reserved_gib=0\.6 .*host_gib=0\.1 leaves nothing; set") as caught:
        planned("hardware.host_gib=0.1", *given)
    enough = float(str(caught.value).rsplit("=", 1)[1].split()[0])
    assert planned(f"hardware.host_gib={enough}", *given)
    with pytest.raises(ConfigError, match="missing"):
        planned(f"hardware.host_gib={enough - 0.02}", *given)


@pytest.mark.promise("plan-advice")
@pytest.mark.parametrize(
    ("given", "way", "followed"),
    [
        ("offload=host hardware.host_gib=1.2", "=nvme and hardware.nvme_gib above 0", "offload.optimizer=nvme"),
        ("offload=none hardware.host_gib=1.2", "save memory with offload=nvme", "offload=nvme"),
        ("offload=host hardware.host_gib=2 data.sequence_length=4096", "run.micro_batch", "data.sequence_length=16"),
        ("offload=nvme hardware.host_gib=0.62 offload.slots=20", "(offload.slots=...)", "offload.slots=3"),
        ("offload=host hardware.host_gib=1.2", "with zero.stage=3", "hardware.nodes=4 run.dry=true"),
    ],
)
def test_what_a_plan_that_does_not_fit_names_are_keys_that_help(given, way, followed):
    small = [*given.split(), "hardware.host_reserved_gib=0"]
    with pytest.raises(ConfigError, match=re.escape(way)) as caught:
        planned(*small)
    unused_keys.check(compose.keys_of(followed.split()), [compose.compose(["recipe=tiny", *small, *followed.split()])])
    try:
        planned(*small, *followed.split(), "hardware.nvme_gib=100")
    except ConfigError as error:
        assert error.__cause__.missing_bytes < caught.value.__cause__.missing_bytes


@pytest.mark.parametrize(
    "way", ["offload.parameters=nvme", "offload=nvme offload.slots=3", "zero.stage=3", "model.layers=2"]
)
def test_an_arena_that_cannot_be_mapped_is_smaller_where_an_error_says(way):
    ranks = Ranks(0, 2, 0, 2)
    given = ("offload=host", "zero.stage=0", "hardware.host_gib=20", "hardware.nvme_gib=100")
    composed, plan = planned(*given, ranks=ranks)
    with pytest.raises(MemoryError, match="cannot be mapped") as raised:
        Arena(1 << 50)
    assert 'or parameters on "nvme". Or use fewer slots: set offload.slots=3' in planning.refusal(
        raised.value, composed
    )
    text = planning.refusal(MemoryError(), composed)
    assert text.endswith("with offload=nvme offload.slots=3, raise zero.stage, or train a smaller model")
    assert planned(*given, *way.split(), ranks=ranks)[1].total("host") < plan.total("host")


@pytest.mark.promise("plan-advice")
def test_arguments_of_siblings_are_told_as_keys():
    def told(text, *overrides):
        return planning.keyed(text, compose.compose(["recipe=tiny", "precision=bf16", "run.dir=runs/x", *overrides]))

    assert told('optimizer="nvme", or no_sync=False', "offload=host") == "offload.optimizer=nvme, or zero.no_sync=false"
    assert told('or with optimizer="host" and gradients="host"', "offload=none") == "or with offload=host"
    assert told('activations="nvme"', "offload=none") == "offload.activations=nvme with offload=host"
    assert told("or smaller units (TiledLinear)") == "or a model of smaller layers"
    assert told("slots=3 and resident_bytes=0", "offload=host") == "offload.slots=3 and zero.resident_bytes=0"
    assert told("no_sync=False", "task=sft", "model.path=x") == "zero.stage=2"
    assert told("a.rows=3 /rows=3 width=3", "offload=host") == "a.rows=3 /rows=3 width=3"


@pytest.mark.advice("; or set host_bytes={}, which the host has")
@pytest.mark.promise("memory-of-libraries")
def test_memory_that_offload_host_bytes_withholds_is_offered():
    given = ("offload=host", "hardware.host_gib=20")
    with pytest.raises(ConfigError, match=r"offload\.host_bytes=\d+") as caught:
        planned("offload.host_bytes=1000", *given)
    enough = int(str(caught.value).split("offload.host_bytes=")[1].split(",")[0])
    assert planned(f"offload.host_bytes={enough}", *given)
    with pytest.raises(ConfigError, match="missing"):
        planned(f"offload.host_bytes={enough - (1 << 20)}", *given)


def test_a_described_machine_is_planned_for_and_not_run_on():
    def asked(*overrides, ranks=Ranks()):  # noqa: B008  (frozen)
        planning.here(compose.compose(["recipe=tiny", "run.dir=runs/x", *overrides]), ranks)

    here, other = Ranks().device.type, {"cpu": "cuda", "cuda": "cpu"}[Ranks().device.type]
    asked()
    asked(f"hardware.device={here}", "hardware.ranks_per_node=2", ranks=Ranks(0, 4, 0, 2))
    asked(ranks=Ranks(0, 3, 0, 2))  # an uneven launch, nothing described
    with pytest.raises(ConfigError, match=rf"={other}, but .* on {here}; .*or run on this one with hardware=detect"):
        asked(f"hardware.device={other}")
    with pytest.raises(
        ConfigError, match=r"are 8 ranks, this run has 1; plan.* or run on this machine with hardware=detect"
    ):
        asked("hardware.ranks_per_node=8")
    asked("hardware=detect")
    with pytest.raises(ConfigError, match=r"are 4 ranks, this run has 2"):
        asked("hardware.nodes=4", "hardware.ranks_per_node=1", ranks=Ranks(0, 2, 0, 2))


@pytest.mark.promise("resumed-plan")
def test_a_resumed_run_plans_the_steps_that_are_left():
    composed, plan = planned("offload=nvme", "run.steps=10", "run.checkpoint_every=4", *RATES)
    text = planning.described(plan, composed, Ranks(), done=8)
    every, rest, none = (planning.checkpoint_bytes(plan, composed, Ranks(), done) for done in (0, 8, 10))
    assert rest * 3 == every and none == 0
    left = plan.setup_write_bytes + 2 * plan.write_bytes_per_step + rest
    assert planning.written_bytes(plan, composed, Ranks(), 8) == left
    assert f"2 steps of 64 tokens will write {left / 1e9:.1f} GB" in text or f"{left / 1e9:.2f} GB" in text
    assert f"predicted for 2 steps: {2 * plan.step_seconds:.3g} seconds" in text
    assert f"the run writes {left / 1e15:.2%} of the 1,000 TB" in text


@pytest.mark.advice("save no checkpoints with run.checkpoint_every=0")
@pytest.mark.promise("resumed-plan", "checkpoint-room-advice")
@pytest.mark.parametrize(
    ("overrides", "done", "there", "files"),
    [
        ("run.checkpoint_every=2", 0, 0, 3),  # two that are kept, and the one that is being written
        ("run.checkpoint_every=2 run.keep_checkpoints=1", 0, 0, 2),
        ("run.checkpoint_every=10 run.keep_checkpoints=9", 0, 0, 1),
        ("run.checkpoint_every=2", 4, 2, 1),
        ("run.checkpoint_every=2", 10, 0, 0),
        ("run.checkpoint_every=0", 0, 0, 0),
    ],
)
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_checkpoints_and_slab_need_room_on_the_disk_of_the_run_folder(overrides, done, there, files, tier, monkeypatch):
    monkeypatch.setattr(planning.placement, "free_bytes", lambda _: 200 << 30)
    composed, plan = planned(f"offload={tier}", "run.steps=10", *overrides.split())
    needed = files * planning.each_checkpoint_bytes(plan, composed, Ranks()) + plan.total("nvme")
    monkeypatch.setattr(planning.placement, "free_bytes", lambda _: needed)
    planning.room(plan, composed, Ranks(), done, there)
    monkeypatch.setattr(planning.placement, "free_bytes", lambda _: needed - 1)
    if files:
        with pytest.raises(ConfigError, match=rf"for slabs and .* for {files} checkpoints? at a time") as caught:
            planning.room(plan, composed, Ranks(), done, there)
        assert ("fewer checkpoints with run.keep_checkpoints=1" in str(caught.value)) == (
            files == 3
        )  # else it frees nothing
        ways = [{"checkpoint_every": 0}, *([{"keep_checkpoints": 1}] if files == 3 else [])]
        for way in ways:
            run = dataclasses.replace(composed.run, **way)
            planning.room(plan, dataclasses.replace(composed, run=run), Ranks(), done, there)


@pytest.mark.promise("offload-rows-key", "offload-tokens-key")
@pytest.mark.parametrize(
    ("key", "given", "line", "sizes", "left"),
    [
        ("rows", 2, "rows at a time in a unit: 2 of 8", (8, 4096), "rows"),
        ("tokens", 128, "tokens of a row at a time in an MLP: 128 of 512", (1, 16384), "tokens_at_once"),
    ],
)
def test_rows_and_tokens_are_planned_and_printed(key, given, line, sizes, left):
    """Fails if offload.rows or tokens does not reach the plan, or a run with them looks as one without."""

    def made(cut="null", rows=8, length=512, gib=100):
        words = f"offload=host offload.activations=recompute hardware.host_reserved_gib=0 hardware.host_gib={gib}"
        words = f"{words} run.micro_batch={rows} data.sequence_length={length} offload.{key}={cut}"
        composed, plan = planned(*words.split())
        return plan, planning.described(plan, composed, Ranks())

    whole, text = made()
    assert getattr(whole, left) is None and line not in text
    part, text = made(given)
    assert getattr(part, left) == given and line in text
    between = sum(plan.total("host") + plan.total("device") for plan, _ in (made("null", *sizes), made(given, *sizes)))
    with pytest.raises(ConfigError, match="host tier needs"):
        made("null", *sizes, between / 2**31)
    assert getattr(made("auto", *sizes, between / 2**31)[0], left) is not None


@pytest.mark.parametrize("kind", ["llama", "gpt2", "moe"])
def test_the_default_run_writes_less_than_100_gigabytes(kind):
    composed = compose.compose([f"model={kind}", "run.dir=runs/x", "hardware.nvme_gib=1000", "hardware.host_gib=16"])
    for parameters in ("fp32", "bf16"):
        composed.precision.parameters = parameters
        with zero_core.deferred_init():
            model = causal_lm.build(composed.model, composed.data.sequence_length)
        assert 20e6 < sum(p.numel() for p in model.parameters()) < 30e6
        plan = planning.make(composed, model, Ranks(), None)
        assert planning.written_bytes(plan, composed, Ranks()) < 100e9


TWO = Ranks(0, 2, 0, 2)


def held_back(*overrides, ranks=TWO):
    composed, plan = planned("offload=host", "hardware.host_gib=100", *overrides, ranks=ranks)
    text = planning.described(plan, composed, ranks)
    assert (plan.held_back > 0) == ("whole gradients that wait for the step" in text)
    return plan.held_back / 103e6


@pytest.mark.promise("ranks-hold-plan")
@pytest.mark.parametrize(
    ("overrides", "bytes_an_element"),
    [
        ("zero.stage=3 run.accumulate=4", 0),
        ("zero.stage=2 run.accumulate=4", 0),
        ("zero.stage=3 run.accumulate=4 zero.no_sync=true", 4),
        ("zero.stage=3 run.accumulate=1 zero.no_sync=true", 0),
        ("zero.stage=1", 2),
        ("zero.stage=1 run.accumulate=4", 4),
        ("zero.stage=0 run.accumulate=4", 4),
        ("zero.stage=0 run.accumulate=4 zero.no_sync=false", 0),
    ],
)
def test_gradients_that_wait_for_the_step_are_planned_and_printed(overrides, bytes_an_element):
    assert held_back(*overrides.split()) == pytest.approx(bytes_an_element, rel=0.02)
    assert held_back(*overrides.split(), ranks=Ranks()) == 0  # one rank holds nothing back
