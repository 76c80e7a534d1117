"""Overrides of a Trainer class are called in a sharded class as in a stock Trainer, and what they do is the same."""

import functools
import importlib
import inspect
import json
import os
import pkgutil
import types
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, Seq2SeqTrainer, Trainer

import zero_hf
from tests import kit
from tests.integration.zero_hf.trainers import launched, llama, train, trainer, weights
from zero_hf import ConfigError
from zero_hf.trainer.checkpoints import TrainerCheckpoints
from zero_hf.trainer.durable import DurableTrainer
from zero_hf.trainer.sharded import _Sharded
from zero_hf.trainer.trl import ShardedTRL

pytestmark = pytest.mark.promise("trainer-overrides")

FIRST = (DurableTrainer, _Sharded, ShardedTRL)  # before the given class; TrainerCheckpoints comes after it
SAVING = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
BEST = SAVING | {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
# What Trainer's own methods call, where those of TrainerCheckpoints stand for them, and questions, which ours ask too.
INSIDE = {"_issue_warnings_after_load", "is_world_process_zero", "is_local_process_zero"}


def subclasses(cls):
    for each in cls.__subclasses__():
        yield each
        yield from subclasses(each)


def functions(cls):
    """Names of the methods that a class has itself, without those that are no plain functions, and __init__."""
    return {name for name, value in vars(cls).items() if inspect.isfunction(value) and not name.startswith("__")}


def hidden(trainer, made):
    """Methods of `trainer` and its bases before Trainer that an instance of `made` would not call as a stock one."""
    theirs = trainer.__mro__[: trainer.__mro__.index(Trainer)]
    for name in {name for each in theirs for name in functions(each)}:
        first = next(each for each in made.__mro__ if name in vars(each) and each not in FIRST)
        if first not in theirs:
            yield f"{trainer.__name__}.{name}"
    yield from (f"{trainer.__name__}: {each}" for each in functions(trainer) if each.startswith(("zero_", "_zero_")))


@pytest.mark.parametrize("package", ["transformers", "trl", "sentence_transformers"])
def test_no_override_of_a_trainer_of_other_packages_is_hidden(package):
    """Fails if a method of ours stands before an override, or a release uses one of our names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = pytest.importorskip(package)
        if package != "transformers":
            for module in pkgutil.walk_packages(found.__path__, f"{package}.", onerror=lambda name: None):
                if module.name.rpartition(".")[2].endswith("trainer"):
                    importlib.import_module(module.name)
    ours = (*FIRST, TrainerCheckpoints)
    every = [Seq2SeqTrainer, *(each for each in subclasses(Trainer) if each.__module__.startswith(f"{package}."))]
    every = [each for each in every if not issubclass(each, ours)]
    assert len(every) > (package != "transformers")
    assert [name for each in every for name in hidden(each, zero_hf.sharded(each))] == []


def test_every_method_of_a_trainer_is_called_as_in_the_stock_one(tmp_path):
    """A subclass that overrides all of them, trained, resumed, and with its best model loaded.

    Fails if one of ours stands before one of its own without calling it, or calls it another time.
    """

    def use(cls, folder):
        calls = []

        def noted(name):
            @functools.wraps(getattr(Trainer, name))
            def method(self, *given, **options):
                calls.append(name)
                return getattr(super(Own, self), name)(*given, **options)

            return method

        Own = types.new_class("Own", (Trainer,), exec_body=lambda body: body.update({n: noted(n) for n in names}))
        train(cls(Own), folder, **BEST)
        made, _ = train(cls(Own), folder, resume=str(folder / "checkpoint-2"), **BEST)
        made.save_model(str(folder / "final"))
        return calls

    names = functions(Trainer) - INSIDE
    stock, ours = use(lambda cls: cls, tmp_path / "stock"), use(zero_hf.sharded, tmp_path / "ours")
    replaced = functions(TrainerCheckpoints)
    assert replaced <= set(stock) and ours == stock


def test_what_a_class_does_for_a_subclass_and_at_the_end_is_done(tmp_path):
    done = []

    class Own(Trainer):
        def __init_subclass__(cls):
            done.append(cls.__name__)

        def end(self):
            done.append("end")

    made, _ = trainer(zero_hf.sharded(Own), tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"states cannot be saved or loaded before train\(\).* To save states, call train\(\) first",
    ):
        made._save_optimizer_and_scheduler(str(tmp_path))
    made.end()
    assert done == ["ShardedOwn", "end"]


def saves_a_part(base):
    """A subclass that saves the embedding alone, loads it as the best model, and adds a file to each checkpoint."""

    class Own(base):
        def _save(self, output_dir=None, state_dict=None):
            os.makedirs(output_dir, exist_ok=True)
            embedding = self.model.get_input_embeddings().weight.detach().clone()
            torch.save(embedding, os.path.join(output_dir, "embedding.bin"))

        def _save_optimizer_and_scheduler(self, output_dir):
            super()._save_optimizer_and_scheduler(output_dir)
            with open(os.path.join(output_dir, "mine.json"), "w") as file:
                json.dump({"step": self.state.global_step}, file)

        def _load_best_model(self):
            found = torch.load(os.path.join(self.state.best_model_checkpoint, "embedding.bin"))
            with torch.no_grad():
                self.model.get_input_embeddings().weight.copy_(found + 1)

    return Own


@pytest.mark.parametrize("order", ["sharded(Own)", "Own(sharded)"])
def test_a_subclass_saves_and_loads_what_it_does_in_a_stock_trainer(order, tmp_path):
    """Fails if a method of the subclass is not called, or sees other weights."""
    cls = zero_hf.sharded(saves_a_part(Trainer)) if order == "sharded(Own)" else saves_a_part(zero_hf.sharded(Trainer))
    stock, logs = train(saves_a_part(Trainer), tmp_path / "stock", **BEST)
    made, later = train(cls, tmp_path / "ours", zero={"offload": "host"}, **BEST)
    assert later.losses == pytest.approx(logs.losses, rel=1e-5)
    for step in (2, 4):
        saved = [torch.load(tmp_path / where / f"checkpoint-{step}/embedding.bin") for where in ("stock", "ours")]
        assert torch.allclose(*saved, atol=1e-5)
        assert json.loads((tmp_path / "ours" / f"checkpoint-{step}" / "mine.json").read_text()) == {"step": step}
        assert not (tmp_path / "ours" / f"checkpoint-{step}" / "model.safetensors").exists()
    wanted = torch.load(tmp_path / "stock" / "checkpoint-4" / "embedding.bin") + 1
    assert torch.allclose(made.model.get_input_embeddings().weight.detach().clone(), wanted, atol=1e-5)
    made.end()


def _writes_halves(self, output_dir=None, state_dict=None):
    state = {name: value * 0.5 for name, value in self.model.state_dict().items()}
    Trainer._save(self, output_dir, state)


def _then_halved(name):
    def method(self, *given, **options):
        getattr(super(self.own, self), name)(*given, **options)
        with torch.no_grad():
            self.model.lm_head.weight.mul_(0.5)

    return method


CHANGES = {
    "_save": _writes_halves,
    "_load_from_checkpoint": _then_halved("_load_from_checkpoint"),
    "_load_optimizer_and_scheduler": lambda self, checkpoint: None,
    "_load_best_model": _then_halved("_load_best_model"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_weights_that_an_override_changes_are_those_of_a_stock_trainer(name, tmp_path):
    """Resumed, and with the best model loaded. Fails if the masters of a checkpoint are taken for what it says."""

    def use(cls, folder):
        Own = type("Own", (Trainer,), {name: CHANGES[name]})
        Own.own = Own
        train(cls(Own), folder, **SAVING)
        made, logs = train(cls(Own), folder, resume=str(folder / "checkpoint-2"), **BEST)
        return logs.losses, logs.evaluations, weights(made.model)

    stock, ours = use(lambda cls: cls, tmp_path / "stock"), use(zero_hf.sharded, tmp_path / "ours")
    assert ours[0] == pytest.approx(stock[0], rel=1e-4) and ours[1] == pytest.approx(stock[1], rel=1e-4)
    for key, value in stock[2].items():
        assert torch.allclose(ours[2][key], value, atol=1e-4), key


def test_masters_that_round_to_the_weights_of_an_override_are_resumed(tmp_path):
    """In bf16, of weights that an override has loaded. Fails if a resumed run loses what bf16 has not."""

    class Own(Trainer):
        def _load_from_checkpoint(self, checkpoint, model=None):
            super()._load_from_checkpoint(checkpoint, model)

    cls, given = zero_hf.sharded(Own), SAVING | {"learning_rate": 1e-3}
    whole, logs = train(cls, tmp_path, llama().bfloat16(), **given)
    wanted, later = weights(whole.model), f"{tmp_path}/checkpoint-2"
    made, again = train(cls, tmp_path, llama().bfloat16(), resume=later, **given)
    assert again.losses == logs.losses[2:]
    assert all(torch.equal(value, wanted[name]) for name, value in weights(made.model).items())


@kit.on_ranks(2)
def test_a_save_that_asks_for_all_weights_has_them_on_two_ranks(tmp_path):
    """Fails if a shard is written for a parameter."""

    class Own(Trainer):
        def _save(self, output_dir=None, state_dict=None):
            state = self.model.state_dict()
            if self.args.should_save:
                self.model.save_pretrained(output_dir, state_dict=state)

    with launched():
        made, _ = train(zero_hf.sharded(Own), tmp_path, max_steps=2)
        made.save_model(str(tmp_path / "final"))
        wanted = weights(made.model)
        made.accelerator.wait_for_everyone()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "final").state_dict()
    assert set(found) == set(wanted) and all(torch.equal(found[name], value) for name, value in wanted.items())


def test_the_plan_names_overrides_that_may_hold_the_whole_model(tmp_path, capsys):
    made, _ = trainer(zero_hf.sharded(saves_a_part(Trainer)), tmp_path)
    made.create_optimizer()
    told = "zero_hf: while they run, _save, _load_best_model may hold the whole model, 90.8 KB more"
    assert told in capsys.readouterr().out
    made.end()


def test_an_optimizer_that_each_train_makes_anew_begins_anew(tmp_path):
    """Fails if a second train() goes on with the states of the first one's optimizer."""

    class Own(Trainer):
        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
            return self.optimizer

    def use(cls, folder):
        made, logs = trainer(cls(Own), folder, max_steps=3)
        made.evaluate()
        made.train()
        made.train()
        return logs.losses

    stock, ours = use(lambda cls: cls, tmp_path / "stock"), use(zero_hf.sharded, tmp_path / "ours")
    assert len(ours) == 6 and ours == pytest.approx(stock, rel=1e-5)


@pytest.mark.promise("trainer-override-durable")
def test_what_a_class_reads_beside_the_states_is_refused_with_durable_alone(tmp_path):
    class Own(Trainer):
        def _load_rng_state(self, checkpoint):
            self.read = checkpoint

    durable = {"durable": "process", "offload": "nvme", "nvme_paths": [str(tmp_path / "nvme")]}
    with pytest.raises(ConfigError, match=r"_load_rng_state cannot be used with durable.* Leave durable out"):
        train(zero_hf.sharded(Own), tmp_path, zero=durable)
    del durable["durable"]
    train(zero_hf.sharded(Own), tmp_path, zero=durable, **SAVING)[0].end()
    made, _ = train(zero_hf.sharded(Own), tmp_path, zero=durable, resume=True, **SAVING)
    assert made.read == str(tmp_path / "checkpoint-4")
    made.end()


def test_a_trainer_class_behind_a_sharded_one_is_refused_and_is_sharded_itself(tmp_path):
    """Fails if a method of the class behind would be hidden in silence."""

    class Other(Trainer):
        def _load_best_model(self):
            self.called = True

    with pytest.raises(TypeError, match=r"from a sharded class before Other.* from zero_hf.sharded\(Other\) alone"):
        type("Both", (zero_hf.sharded(Trainer), Other), {})
    made, _ = train(type("Own", (zero_hf.sharded(Other),), {}), tmp_path, **BEST)
    assert made.called
    made.end()


def test_a_sentence_transformer_is_saved_as_its_own_loader_finds_it_and_resumed(tmp_path):
    """Fails if its folder is that of another model, if it is resumed otherwise, or if its best model is another."""
    st = pytest.importorskip("sentence_transformers")
    from datasets import Dataset
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[UNK]": 1, **{f"w{i}": i + 2 for i in range(30)}}
    raw = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    bert = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    BertModel(bert).save_pretrained(tmp_path / "bert")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]")
    tokenizer.save_pretrained(tmp_path / "bert")
    texts = [f"w{i % 30} w{(i + 1) % 30}" for i in range(16)]
    data = Dataset.from_dict({"a": texts, "b": texts[1:] + texts[:1], "score": [n / 16 for n in range(16)]})

    def use(cls, folder, resume=None):
        base = Transformer(str(tmp_path / "bert"))
        model = st.SentenceTransformer(modules=[base, Pooling(base.get_embedding_dimension())], device="cpu")
        given = BEST | {"arguments_class": st.SentenceTransformerTrainingArguments, "per_device_train_batch_size": 4}
        made, logs = train(cls, folder, model, resume=resume, train_dataset=data, eval_dataset=data, **given)
        made.save_model(str(folder / "final"))
        found = st.SentenceTransformer(str(folder / "final"), device="cpu")
        return logs.losses, torch.tensor(found.encode(texts[:4]))

    Sharded = zero_hf.sharded(st.SentenceTransformerTrainer)
    stock = use(st.SentenceTransformerTrainer, tmp_path / "stock")
    ours = use(Sharded, tmp_path / "ours")
    again = use(Sharded, tmp_path / "ours", str(tmp_path / "ours" / "checkpoint-2"))
    assert ours[0] == pytest.approx(stock[0], rel=1e-4) and again[0] == pytest.approx(stock[0][2:], rel=1e-4)
    for found in (ours, again):
        assert torch.allclose(found[1], stock[1], atol=1e-4)
