"""What people do with a Trainer besides one train(): each use gives what the stock Trainer gives."""

import contextlib
import io

import numpy
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback

import zero_core
import zero_hf
import zero_optim_cpu
from tests import models
from zero_core.errors import AlreadyShardedError
from zero_hf import ConfigError

from .trainers import VOCABULARY, Sharded, launched, llama, rows, tiers, train, trainer, weights

pytestmark = pytest.mark.promise("trainer-use")


def as_stock(folder, use, tolerance=1e-5, **given):
    """`use(trainer, logs)` of a sharded Trainer with its state on NVMe: the numbers of a stock one."""
    found = []
    model = given.pop("model", llama)
    for cls, more in ((Trainer, {}), (Sharded, {"zero": tiers(folder)["nvme"]})):
        made, logs = trainer(cls, folder, None if "model_init" in given else model(), **given, **more)
        with contextlib.redirect_stdout(io.StringIO()):
            found.append(use(made, logs))
        if more:
            made.zero_run.close()
    assert found[1] == pytest.approx(found[0], rel=tolerance, abs=1e-7)
    return found[1]


def losses(made, logs):
    made.train()
    return logs.losses + logs.evaluations


PLATEAU = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0}}
PLATEAU |= {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "eval_loss"}
USES = {
    "a schedule that follows the evaluation": PLATEAU,
    "noisy embeddings": dict(neftune_noise_alpha=5),
    "reentrant recomputation": dict(
        activation_checkpointing=True, activation_checkpointing_kwargs={"use_reentrant": True}
    ),
}


@pytest.mark.parametrize("use", USES)
def test_losses_with(use, tmp_path):
    as_stock(tmp_path, losses, **USES[use])


def twice(made, logs):
    made.train()
    made.train()
    return logs.losses


def test_train_called_twice_goes_on_with_the_optimizers_states(tmp_path):
    assert len(as_stock(tmp_path, twice)) == 12


def test_a_model_init_makes_a_new_model_for_each_train(tmp_path):
    ours = as_stock(tmp_path, twice, model_init=lambda: llama())
    assert ours[:6] == ours[6:]


@pytest.mark.parametrize("bf16", [False, True])
def test_evaluate_and_predict_before_and_after_train(bf16, tmp_path):
    """Before train() the model is sharded already, so that one that does not fit can be evaluated."""

    def use(made, logs):
        found = [made.evaluate()]
        made.train()
        predicted = made.predict(rows(5))
        found += [predicted.metrics, made.evaluate()]
        assert predicted.predictions.shape == (5, 12, VOCABULARY)
        kept = ("eval_loss", "test_loss", "eval_mean", "test_mean")
        return [values[name] for values in found for name in kept if name in values]

    given = {"compute_metrics": lambda given: {"mean": float(numpy.abs(given.predictions).mean())}}
    assert len(as_stock(tmp_path, use, 1e-2 if bf16 else 1e-5, bf16=bf16, **given)) == 6


def test_without_a_train_dataset_it_evaluates_without_optimizer_states_and_trains_with_one(tmp_path):
    """Fails if states are kept for an evaluation, or if the model stays in the shards of one."""

    def use(made, logs):
        found = [made.evaluate()["eval_loss"]]
        if made.__class__ is Sharded:
            assert made.zero_run.optimizer is None and not made.zero_run.plan.bytes_of("nvme", "optimizer")
        made.train_dataset = rows(26)
        made.train()
        return [*found, *logs.losses, made.evaluate()["eval_loss"]]

    as_stock(tmp_path, use, train_dataset=None)


def test_callbacks_see_the_model_the_optimizer_and_gradients(tmp_path):
    class Sees(TrainerCallback):
        def __init__(self):
            self.seen = []

        def on_pre_optimizer_step(self, args, state, control, model=None, **given):
            self.seen += [float(parameter.grad.norm()) for parameter in model.parameters()]

        def on_step_end(self, args, state, control, model=None, optimizer=None, **given):
            self.seen += [float(parameter.detach().abs().sum()) for parameter in model.parameters()]
            self.seen += [group["lr"] for group in optimizer.param_groups]

    def use(made, logs):
        sees = Sees()
        made.add_callback(sees)
        made.train()
        return sees.seen

    as_stock(tmp_path, use, 1e-4)


def test_a_smaller_batch_is_found_where_memory_runs_out(tmp_path):
    """The first batch is too large in the forward of the second layer, in the midst of gathers."""

    def small():
        model = llama()

        def limit(module, given):
            if given[0].shape[0] > 2:
                raise RuntimeError("CUDA out of memory.")

        model.model.layers[1].mlp.register_forward_pre_hook(limit)
        return model

    given = {"auto_find_batch_size": True, "per_device_train_batch_size": 3}
    as_stock(tmp_path, losses, model=small, **given)


def test_a_mixture_of_experts_is_saved_as_transformers_loads_it(tmp_path):
    made, _ = train(Sharded, tmp_path, models.build("moe"), max_steps=2)
    made.save_model(str(tmp_path / "saved"))
    saved = weights(made.model)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert loaded.keys() == saved.keys() and all(torch.equal(loaded[name], saved[name]) for name in saved)


@pytest.mark.parametrize("resumed", [False, True])
def test_weights_that_are_read_when_the_model_is_sharded(resumed, tmp_path):
    """zero_hf.from_pretrained gives a model without values: nothing before sharding may need one."""
    given = {"save_strategy": "steps", "save_steps": 3}
    _, logs = train(Trainer, tmp_path / "stock", **given)
    llama().save_pretrained(tmp_path / "first")
    model = zero_hf.from_pretrained(AutoModelForCausalLM, tmp_path / "first")
    checkpoint = str(tmp_path / "stock" / "checkpoint-3") if resumed else None
    made, ours = train(Sharded, tmp_path, model.train(), zero=tiers(tmp_path)["nvme"], resume=checkpoint, **given)
    assert ours.losses == pytest.approx(logs.losses[3 if resumed else 0 :], rel=1e-5)
    made.zero_run.close()


def _generated(folder, stage):
    with launched():
        torch.manual_seed(0)
        sizes = dict(vocab_size=8, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
        quiet = dict(use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", max_steps=2)
        given = Seq2SeqTrainingArguments(
            str(folder), **quiet, predict_with_generate=True, generation_max_length=12, per_device_eval_batch_size=1
        )
        cls, more = (
            (Seq2SeqTrainer, {}) if stage is None else (zero_hf.sharded(Seq2SeqTrainer), {"zero": {"stage": stage}})
        )
        data = [{name: row[name] % 8 for name in row} for row in rows(9)]
        made = cls(model, given, train_dataset=data, **more)
        made.train()
        torch.manual_seed(torch.distributed.get_rank())
        return made.predict(data[:6], do_sample=True).predictions


def test_two_ranks_that_generate_texts_of_different_lengths(ranks, tmp_path):
    """Fails, after a time-out, if a rank that is done does not take part in the other's gathers."""
    theirs, _ = ranks(2).run(_generated, tmp_path, None)
    ours, _ = ranks(2).run(_generated, tmp_path, 3)
    assert numpy.array_equal(ours, theirs)
    ends = {int((row[1:] == 1).argmax()) for row in ours}  # token 1 ends a text
    assert len(ends) > 1, "all texts have one length, so this test shows nothing"


@pytest.mark.promise("trainer-rmsprop")
@pytest.mark.parametrize(
    ("name", "tier", "said"),
    [("rmsprop", "nvme", {}), ("adafactor", "nvme", {"optimizer_contract": "by itself"}), ("adafactor", "none", {})],
)
def test_optimizers_without_a_kernel_train_as_in_the_stock_trainer(name, tier, said, tmp_path):
    _, theirs = train(Trainer, tmp_path, optim=name)
    _, ours = train(Sharded, tmp_path, optim=name, zero={**tiers(tmp_path)[tier], **said})
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)


@pytest.mark.advice("has no update on the host")
@pytest.mark.promise("trainer-optim-refused")
def test_the_optimizers_that_a_refusal_names_train_on_nvme_as_in_the_stock_trainer(tmp_path):
    """Adafactor is not listed. Fails if something that the error names does not exist or is refused, too."""
    zero = tiers(tmp_path)["nvme"]
    with pytest.raises(ConfigError, match='optim="adamw_torch", "sgd" or') as refused:
        train(Sharded, tmp_path, optim="adafactor", zero=zero)
    for name in ("adamw_torch", "sgd", "adagrad"):
        assert f'"{name}"' in str(refused.value)
        _, theirs = train(Trainer, tmp_path, optim=name)
        _, ours = train(Sharded, tmp_path, optim=name, zero=zero)
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert "optimizers=(zero_optim_cpu.Lion(model.parameters(), lr=1e-4), None)" in str(refused.value)
    found = []
    for cls, more in ((Trainer, {}), (Sharded, {"zero": zero})):
        model = llama()
        lion = zero_optim_cpu.Lion(model.parameters(), lr=1e-4)
        found.append(train(cls, tmp_path, model, optimizers=(lion, None), **more)[1].losses)
    assert found[1] == pytest.approx(found[0], rel=1e-5)


class _Squared(Trainer):
    """Another loss: it pulls logits to zero."""

    def compute_loss(self, model, inputs, return_outputs=False, **given):
        return model(input_ids=inputs["input_ids"]).logits.float().square().mean()


def _two_stages(folder, first, second, tier, ends, dtype=torch.float32):
    """Losses of a fine-tuning of everything, then of a second one, of the last layer, with another loss."""
    more = {} if tier is None else {"zero": tiers(folder)[tier]}
    made, begun = train(first, folder / "first", llama().to(dtype), max_steps=3, **more)
    if ends:
        made.end()
        if tier is not None:
            assert type(made.model.lm_head.weight) is torch.nn.Parameter
    made.model.requires_grad_(False)
    made.model.model.layers[1].requires_grad_(True)
    again, then = train(second, folder / "second", made.model, max_steps=3, optim="sgd", **more)
    made.end()  # of a model that is another run's by now, nothing is taken
    return begun.losses + then.losses, weights(again.model)


@pytest.mark.promise("trainer-second")
@pytest.mark.parametrize("tier", ["none", "host", "nvme"])
@pytest.mark.parametrize("ends", [False, True])
def test_a_second_trainer_with_another_loss_takes_the_model_of_the_first(tier, ends, tmp_path):
    """Fails if it begins from other values, or trains what is frozen now, or keeps a state of the first."""
    theirs, expected = _two_stages(tmp_path, Trainer, _Squared, None, ends)
    ours, found = _two_stages(tmp_path, Sharded, zero_hf.sharded(_Squared), tier, ends)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_a_model_that_does_not_fit_is_lost_at_the_end_and_says_so(tmp_path, monkeypatch):
    made, _ = train(Sharded, tmp_path, max_steps=1)
    monkeypatch.setattr("zero_core.api.shard.available_bytes", lambda device: 10)
    with pytest.warns(UserWarning, match=r"LlamaForCausalLM cannot be made plain, .* unshard\(\) needs"):
        made.end()
    with pytest.raises(AlreadyShardedError, match="cannot read the values of a sharded model"):
        train(Sharded, tmp_path, made.model)


@pytest.mark.promise("trainer-second-durable")
def test_a_second_stage_needs_an_output_folder_of_its_own(tmp_path):
    """For its durable steps, which would be those of the first."""
    zero = tiers(tmp_path)["nvme"] | {"durable": "process"}
    made, _ = train(Sharded, tmp_path / "first", zero=zero, max_steps=2)
    with pytest.raises(ConfigError, match="Give this run another output_dir, .* call end.. of its Tr"):
        train(Sharded, tmp_path / "first", made.model, zero=zero, max_steps=2)
    again, logs = train(Sharded, tmp_path / "second", made.model, zero=zero, max_steps=2)
    assert len(logs.losses) == 2
    again.end()
    train(Sharded, tmp_path / "second", llama(), zero=zero, max_steps=2)[0].end()


@pytest.mark.promise("hf-adamw-8bit")
@pytest.mark.parametrize("name", ["adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"])
def test_the_usual_names_are_adamw_with_8_bit_moments(tmp_path, name):
    """Equal to the layout by its own name, at less than a third of the bytes of fp32 ones."""
    made, logs = train(Sharded, tmp_path / "named", zero={"offload": "host"}, optim=name)
    assert made.args.optim == name and made.zero_run.config.states == "split_8bit"
    zero = {"offload": "host", "states": "split_8bit"}
    other, expected = train(Sharded, tmp_path / "plain", zero=zero, optim="adamw_torch")
    assert logs.losses == expected.losses
    exact, _ = train(Sharded, tmp_path / "exact", zero={"offload": "host"}, optim="adamw_torch")
    few, many = (each.zero_run.plan.bytes_of("host", "optimizer") for each in (made, exact))
    assert few < many / 3
    for each in (made, other, exact):
        each.end()


@pytest.mark.advice('write optimizer: host (or offload: host), or optim="adamw_torch"')
@pytest.mark.promise("hf-adamw-8bit")
def test_states_on_the_device_and_other_layouts_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"optim='adamw_8bit' keeps moments in 8 bits on the host .* optimizer: host"):
        train(Sharded, tmp_path, zero={"stage": 3}, optim="adamw_8bit")
    train(Sharded, tmp_path, zero={"stage": 3, "optimizer": "host"}, optim="adamw_8bit")[0].end()
    train(Sharded, tmp_path, zero={"stage": 3}, optim="adamw_torch")[0].end()
    narrow = {"offload": "host", "states": "split_bf16m", "param_dtype": "bf16"}
    with pytest.raises(ConfigError, match=r"both set the layout of states: leave states out, or write .*adamw_torch"):
        train(Sharded, tmp_path, zero=narrow, optim="adamw_8bit")
    train(Sharded, tmp_path, zero=narrow, optim="adamw_torch")[0].end()
    train(Sharded, tmp_path, zero={**narrow, "states": "fp32"}, optim="adamw_8bit")[0].end()


@pytest.mark.promise("hf-adamw-8bit")
def test_a_later_stage_of_the_same_trainer_may_ask_for_exact_moments(tmp_path):
    made, _ = train(Sharded, tmp_path, zero={"offload": "host"}, optim="adamw_8bit")
    made.end()
    made.args.optim, made.optimizer, made.lr_scheduler = "adamw_torch", None, None
    made.train()
    assert made.zero_run.config.states == "fp32"
    made.end()


def both(model):
    inside = {id(p) for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name}
    matrices = [p for p in model.parameters() if id(p) in inside]
    others = [p for p in model.parameters() if id(p) not in inside]
    return zero_core.JointOptimizer(torch.optim.Muon(matrices, lr=0.02), zero_optim_cpu.AdamW(others, lr=3e-3))


def run(kind, folder, **options):
    model = llama()
    return train(kind, folder, model=model, optimizers=(both(model), None), learning_rate=1.0, **options)


@pytest.mark.promise("hf-muon")
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")
def test_a_trainer_is_given_muon_and_adamw(tmp_path):
    _, expected = run(Trainer, tmp_path / "plain")
    for number, zero in enumerate(({"stage": 3}, {"offload": "host"}, {"offload": "host", "param_dtype": "bf16"})):
        made, logs = run(Sharded, tmp_path / str(number), zero=zero)
        assert logs.losses == pytest.approx(expected.losses, rel=1e-3 if "param_dtype" not in zero else 0.05)
        if zero.get("offload"):
            plan, store = made.zero_run.plan, made.zero_run.store
            assert plan.store.held == store.describe().held
            tiles = (tile.uncut for unit in store.describe().units for tile in unit.tiles)
            uncut = {each.name for each in tiles if each is not None}
            assert len(uncut) == 14 and all("layers" in name for name in uncut), "seven matrices of each layer"
            assert plan.held["host", "buffers"] >= plan.store.scratch_bytes > 0
        made.end()
