"""Advice about Trainers and accelerators that is followed: a mistake, then what the message says, and that works."""

import shutil

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import zero_hf
from tests import kit
from tests.following import advised

from .accelerated import accelerator, launched, moved, sgd
from .trainers import Sharded, llama, rows, train, trainer

pytestmark = pytest.mark.promise("trainer-advice")

Arguments = zero_hf.sharded(TrainingArguments)
ADAMW = {"train_batch_size": "auto", "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}

# -- Trainers ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """The losses of two steps of the stock Trainer."""
    return train(Trainer, tmp_path_factory.mktemp("stock"), max_steps=2)[1].losses


def trains(folder, stock, cls=Sharded, rel=1e-5, **given):
    made, logs = train(cls, folder, max_steps=2, **given)
    assert logs.losses == pytest.approx(stock, rel=rel)
    made.end()
    return made


def test_a_trainer_class_and_a_class_of_arguments_are_given(tmp_path, stock):
    with advised("give zero= with the Trainer class"):
        zero_hf.sharded(TrainingArguments, zero={"stage": 2})
    made = trains(tmp_path, stock, zero_hf.sharded(Trainer, zero={"stage": 2}), arguments_class=Arguments)
    assert made.zero_config.stage == 2
    for wrong in (made, nn.Module, "Trainer"):
        with advised("give it transformers.Trainer or a subclass of it, the class itself"):
            zero_hf.sharded(wrong)

    class Own(Trainer):
        pass

    trains(tmp_path, stock, zero_hf.sharded(Own))


def _later(**given):
    """TrainingArguments with what is set after they are built: some would look for devices or packages then."""

    def arguments(*args, **options):
        made = TrainingArguments(*args, **options)
        for name, value in given.items():
            setattr(made, name, value)
        return made

    return {"arguments_class": arguments}


FP8, DISTRIBUTED = _later(mixed_precision="fp8"), ("is_distributed_loading_by_transformers", True)
STAGE_2 = {"train_batch_size": "auto", "zero_optimization": {"stage": 2}}
BOTH = {"activation_checkpointing": True, "zero": {"activations": "recompute"}}
OTHERS = [{"zero": {"stage": 2, "offload": "host"}, "save_strategy": "steps"}]


@pytest.mark.advice("write TrainingArguments = zero_hf.sharded(", "use bf16=True", "load it without distributed_config")
@pytest.mark.advice("FSDP shards the model itself. Leave it out")
@pytest.mark.promise("trainer-arguments-refused")
@pytest.mark.parametrize(
    ("mistake", "advice", "ways"),
    [
        (_later(fsdp=True), "Leave it out; zero= sets stage and tiers", OTHERS),
        (_later(parallelism_config=object()), "all ranks are data parallel. Leave it out", OTHERS),
        (_later(save_on_each_node=True), "Leave it out, and make output_dir a folder that all see", OTHERS),
        (BOTH, "write activation_checkpointing=False", [BOTH | {"activation_checkpointing": False}]),
        (
            _later(deepspeed=STAGE_2),
            "write TrainingArguments = zero_hf.sharded(TrainingArguments), and the JSON is followed here; or zero=",
            [{"arguments_class": Arguments, "deepspeed": STAGE_2}, {"zero": {"stage": 2}}],
        ),
        (FP8, "mixed_precision=fp8 cannot be used with zero_hf.sharded: use bf16=True", [{"bf16": True}]),
        (("hf_device_map", {"model": 0, "lm_head": 1}), "load it without device_map", [{}]),
        (DISTRIBUTED, "load it without distributed_config, zero= sets stage", [{"zero": {"stage": 2}}]),
    ],
)
def test_arguments_and_models_are_made_as_an_error_says(mistake, advice, ways, tmp_path, stock):
    if isinstance(mistake, tuple):  # an attribute as transformers leaves it
        model = llama()
        model.__class__ = type("Placed", (type(model),), dict([mistake]))
        mistake = {"model": model}
    with advised(advice):
        trainer(Sharded, tmp_path, **mistake)
    for way in ways:
        trains(tmp_path, stock, rel=1e-2 if "bf16" in way else 1e-5, **way)


def test_blocks_are_compiled_in_place_of_the_model(tmp_path, stock):
    with advised("compile the blocks, as in `for layer in model.model.layers: layer.compile()`"):
        trainer(Sharded, tmp_path, torch_compile=True)
    model, compiled = llama(), []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    for layer in model.model.layers:
        layer.compile(backend=backend)
    trains(tmp_path, stock, model=model)
    assert compiled


def test_evaluation_is_in_bf16_by_the_arguments_or_the_model(tmp_path):
    def loss(cls, model=None, **given):
        made, _ = trainer(cls, tmp_path, model, **given)
        return made.evaluate()["eval_loss"]

    with advised("Evaluate with bf16=True, or load the model in bfloat16"):
        loss(Sharded, bf16_full_eval=True)
    wanted = pytest.approx(loss(Trainer, bf16_full_eval=True), rel=1e-2)
    assert loss(Sharded, bf16=True) == wanted == loss(Sharded, llama().bfloat16())


def test_one_of_two_optimizers_is_left_out(tmp_path):
    def given(*left):
        model = llama()
        optimizers = (torch.optim.AdamW(model.parameters(), lr=1e-3), None)
        config = {key: value for key, value in ADAMW.items() if key not in left}
        options = {"arguments_class": Arguments, "deepspeed": config, "optimizers": optimizers, "max_steps": 2}
        return model, {key: value for key, value in options.items() if key not in left}

    model, options = given()
    with advised("names an optimizer: leave one of them out"):
        train(Sharded, tmp_path, model, **options)
    for left in ("optimizers", "optimizer"):
        model, options = given(left)
        made, logs = train(Sharded, tmp_path, model, **options)
        assert len(logs.losses) == 2
        made.end()


def test_a_trainer_that_evaluates_first_trains_then(tmp_path, stock):
    class Own(Sharded):
        """Makes its batches itself, so it needs no train_dataset."""

        def get_train_dataloader(self):
            self.train_dataset = rows(26)
            try:
                return super().get_train_dataloader()
            finally:
                self.train_dataset = None

    made, logs = trainer(Own, tmp_path, max_steps=2, train_dataset=None)
    made.evaluate()
    made.train()
    assert logs.losses == pytest.approx(stock, rel=1e-5)


@pytest.mark.advice("resume from {}, which is complete")
def test_a_checkpoint_that_is_not_complete_is_deleted(tmp_path):
    given = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    _, whole = train(Sharded, tmp_path, **given)
    for number in (3, 1):
        if number == 1:
            shutil.rmtree(tmp_path / "checkpoint-2")
        broken = tmp_path / f"checkpoint-{number}"
        (broken / "trainer_state.json").unlink()
        way = f"resume from {tmp_path / 'checkpoint-2'}, which is complete"
        if number == 1:
            way = "train without resume_from_checkpoint"
        for resume in (str(broken), *([True] if number == 1 else [])):
            with advised(f"Delete this folder, and {way}"):
                train(Sharded, tmp_path, resume=resume, **given)
        shutil.rmtree(broken)
        _, later = train(Sharded, tmp_path, resume=str(tmp_path / "checkpoint-2") if number == 3 else None, **given)
        assert later.losses == whole.losses[2 if number == 3 else 0 :]
        shutil.rmtree(tmp_path / "checkpoint-3")


# -- Accelerator -------------------------------------------------------------------------------------------------------


@pytest.mark.promise("accelerate-refused")
def test_another_way_to_distribute_is_left_out(monkeypatch):
    import accelerate

    told = accelerate.utils.DistributedType.FSDP
    with launched():
        with monkeypatch.context() as patch:
            patch.setattr(accelerate.Accelerator, "distributed_type", property(lambda self: told))
            with advised("leave it out of the script and of `accelerate launch`, or use accelerate.Accelerator"):
                accelerator({})
            accelerator(None)
        acc = accelerator({})
        one = nn.Linear(2, 2)
        one, optimizer = acc.prepare(one, sgd(one))
        moved(acc, [optimizer], one)


@pytest.mark.promise("accelerate-refused")
@kit.on_ranks(2)
def test_uneven_batches_are_made_even():
    """Three batches for two ranks: trained and evaluated on evenly."""
    with launched():
        acc = accelerator({})
        model = llama()
        data = torch.utils.data.DataLoader(torch.arange(6).view(3, 2), batch_size=1)
        model, optimizer, even = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
        with advised("train and evaluate with even batches, which is accelerate's default"):
            with acc.join_uneven_inputs([model]):
                pass
        steps = 0
        for batch in even:
            acc.backward(model(input_ids=batch, labels=batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        with torch.no_grad():
            assert len([model(input_ids=batch, labels=batch).loss for batch in even]) == steps == 2
        acc.free_memory()
