"""Methods of a Trainer class that a sharded class would hide are refused, and the stock subclasses that have some."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import pkgutil
import textwrap
import warnings

import pytest
import torch

pytest.importorskip("accelerate")
from transformers import Seq2SeqTrainer, Trainer

import zero_hf
from tests.integration.zero_hf.trainers import llama, train, trainer
from zero_hf import ConfigError, overrides
from zero_hf.durable import DurableTrainer
from zero_hf.trainer import _Sharded
from zero_hf.trl import ShardedTRL

OURS = (DurableTrainer, _Sharded, ShardedTRL)
SAVING = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
BEST = SAVING | {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}

# Overrides of hidden methods in the packages themselves, each with the reason for which it is not simply refused.
# A new one of a new release is read, and is entered here and in zero_hf.overrides, or stays refused.
KNOWN = {
    "trl.trainer.grpo_trainer.GRPOTrainer._load_optimizer_and_scheduler": "does nothing without use_adaptive_entropy",
}


def methods_of(base):
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


def subclasses(cls):
    for each in cls.__subclasses__():
        yield each
        yield from subclasses(each)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("_save_optimizer_and_scheduler", lambda self, output_dir: None),
        ("_load_from_checkpoint", lambda self, resume_from_checkpoint, model=None: None),
        ("_load_optimizer_and_scheduler", lambda self, checkpoint: None),
        ("_load_best_model", lambda self: None),
        ("_move_model_to_device", lambda self, model, device: None),
    ],
)
def test_an_override_that_never_runs_is_refused_with_the_class(name, body):
    """Also one of a class between, or of a mixin. Fails if a method that a stock Trainer calls is left out silently."""
    own = type("Own", (Trainer,), {name: body})
    mixed = type("Mixed", (type("Mixin", (), {name: body}), Seq2SeqTrainer), {})
    for cls, said in (
        (own, rf"Own.{name}, which would not be called: .* class Own\(zero_hf.sharded\(Trainer\)\)"),
        (type("Later", (own,), {}), rf"Own.{name}, .* class Later\(zero_hf.sharded\(Trainer\)\)"),
        (mixed, rf"Mixin.{name}, .* class Mixed\(Mixin, zero_hf.sharded\(Seq2SeqTrainer\)\)"),
    ):
        with pytest.raises(ConfigError, match=said):
            zero_hf.sharded(cls)


def test_all_that_is_hidden_is_named():
    with pytest.raises(ConfigError, match=r"before .*Own._load_best_model, .*Own._save_optimizer_and_scheduler, which"):
        zero_hf.sharded(methods_of(Trainer))


def test_what_overrides_a_sharded_class_runs_as_in_the_stock_trainer(tmp_path):
    """The advice followed. Fails if a method of the subclass is not called, or sees other weights."""
    stock, logs = train(methods_of(Trainer), tmp_path / "stock", **BEST)
    made, later = train(methods_of(zero_hf.sharded(Trainer)), tmp_path / "ours", zero={"offload": "host"}, **BEST)
    assert later.losses == pytest.approx(logs.losses, rel=1e-5)
    for step in (2, 4):
        one, other = (
            torch.load(tmp_path / where / f"checkpoint-{step}" / "embedding.bin") for where in ("stock", "ours")
        )
        assert torch.allclose(one, other, atol=1e-5)
        assert json.loads((tmp_path / "ours" / f"checkpoint-{step}" / "mine.json").read_text()) == {"step": step}
    wanted = torch.load(tmp_path / "stock" / "checkpoint-4" / "embedding.bin") + 1
    assert torch.allclose(made.model.get_input_embeddings().weight.detach().clone(), wanted, atol=1e-5)
    made.end()


def test_the_trainers_own_method_may_be_taken_back(tmp_path):
    """The other advice followed: then ours stands for transformers' method, as in any sharded Trainer."""

    class Own(Trainer):
        def _load_best_model(self):
            raise AssertionError("never called")

    with pytest.raises(ConfigError, match="as in _save = Trainer._save"):
        zero_hf.sharded(Own)

    class Plain(Own):
        _load_best_model = Trainer._load_best_model

    _, logs = train(Trainer, tmp_path / "stock", **BEST)
    made, later = train(zero_hf.sharded(Plain), tmp_path / "ours", **BEST)
    assert later.losses == pytest.approx(logs.losses, rel=1e-5)
    made.end()


def test_a_save_of_ones_own_is_refused_for_a_whole_model_and_called_for_adapters(tmp_path):
    """Also where model_init makes the model. Fails if the override is hidden, or if adapters are refused with it."""

    class Own(Trainer):
        def _save(self, output_dir=None, state_dict=None):
            super()._save(output_dir, state_dict)
            torch.save({name: value.clone() for name, value in state_dict.items()}, f"{output_dir}/mine.bin")

    for given in ({}, {"model_init": lambda: llama()}):
        with pytest.raises(ConfigError, match=r"Own._save, which would not be called"):
            trainer(zero_hf.sharded(Own), tmp_path, **given)
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])

    def adapted():
        return peft.get_peft_model(llama(), config)

    for given in ({"model": adapted()}, {"model_init": adapted}):
        made, _ = train(zero_hf.sharded(Own), tmp_path, **given)
        made.save_model(str(tmp_path / "final"))
        saved = torch.load(tmp_path / "final" / "mine.bin")
        assert {name.rsplit(".", 3)[1] for name in saved} == {"lora_A", "lora_B"}
        made.end()


def test_random_states_of_ones_own_are_refused_with_durable_alone(tmp_path):
    class Own(Trainer):
        def _load_rng_state(self, checkpoint):
            self.read = checkpoint

    durable = {"durable": "process", "offload": "nvme", "nvme_paths": [str(tmp_path / "nvme")]}
    with pytest.raises(ConfigError, match=r"Own._load_rng_state, which would not be called: .* leave durable out"):
        trainer(zero_hf.sharded(Own), tmp_path, zero=durable)
    del durable["durable"]
    train(zero_hf.sharded(Own), tmp_path, zero=durable, **SAVING)[0].end()
    made, _ = train(zero_hf.sharded(Own), tmp_path, zero=durable, resume=True, **SAVING)
    assert made.read == str(tmp_path / "checkpoint-4")
    made.end()


def test_a_name_that_sharded_trainers_use_is_refused_and_another_one_is_not(tmp_path):
    """Fails if a method of a user's own is replaced by one of ours that has the same name by chance."""
    cls = type("Own", (Trainer,), {"_load_weights": lambda self: "mine"})
    with pytest.raises(ConfigError, match=r"Own._load_weights.* use this name themselves: give yours another one"):
        zero_hf.sharded(cls)
    made, _ = trainer(zero_hf.sharded(type("Own", (Trainer,), {"_read_weights": lambda self: "mine"})), tmp_path)
    assert made._read_weights() == "mine"


def test_an_override_behind_a_sharded_class_is_refused_too(tmp_path):
    """Fails if a class that derives from a sharded one and from another Trainer is not looked at."""

    class Other(Trainer):
        def _load_best_model(self):
            """Does nothing."""

    class Both(zero_hf.sharded(Trainer), Other):
        pass

    with pytest.raises(ConfigError, match=r"Other._load_best_model, which would not be called"):
        trainer(Both, tmp_path)


def test_each_method_that_is_listed_as_calling_the_one_it_overrides_does():
    """Fails if a method of ours that no longer calls it, or that is gone, is still listed."""
    for name in overrides.CALLING:
        owners = [each for each in OURS if name in vars(each)]
        assert owners, name
        for each in owners:
            tree = ast.parse(textwrap.dedent(inspect.getsource(vars(each)[name])))
            called = {
                ast.unparse(node.func.value)
                for node in ast.walk(tree)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name
            }
            assert called & {"super()", "inherited"}, (each, name)


def test_overrides_in_transformers_and_trl_are_known():
    """Fails if a release has a Trainer with another override that would be hidden. See KNOWN."""
    found = [Seq2SeqTrainer]
    try:
        import trl
    except ImportError:
        pass
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for module in pkgutil.walk_packages(trl.__path__, "trl.", onerror=lambda name: None):
                if module.name.rpartition(".")[2].endswith("_trainer"):
                    importlib.import_module(module.name)
    found += [each for each in subclasses(Trainer) if each.__module__.split(".")[0] in ("transformers", "trl")]
    seen = set()
    for cls in found:
        for name, owner in overrides.hidden(cls.__mro__, OURS).items():
            seen.add(f"{owner.__module__}.{owner.__qualname__}.{name}")
        zero_hf.sharded(cls)  # all of them are accepted, as a class
    assert seen <= set(KNOWN)
    assert {name for name in overrides._ONLY_IF if "." in name} == set(KNOWN)
