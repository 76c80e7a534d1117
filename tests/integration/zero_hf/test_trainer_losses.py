"""A sharded Trainer logs the losses of the stock one, on one rank and several, wherever its state is kept."""

import pytest
import torch
from transformers import Trainer

from tests.integration.zero_hf.trainers import Sharded, launched, llama, tiers, train, weights

pytestmark = pytest.mark.promise("trainer-losses")

WAYS = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 3},
    "unclipped": {"max_grad_norm": 0},
    "clipped to 0.1": {"max_grad_norm": 0.1},
    "checkpointed": {"activation_checkpointing": True},
    "constant with warmup": {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3},
    "dropout": {},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "SGD": {"optim": "sgd"},
}


def near(ours, theirs, relative=1e-5):
    assert len(ours) == len(theirs)
    assert ours == pytest.approx(theirs, rel=relative)


def model_of(way):
    return llama(attention_dropout=0.3) if way == "dropout" else llama()


@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_the_stock_trainer_and_host_and_nvme_agree_to_the_digit(way, tmp_path):
    """Fails if a micro-batch, a norm that is logged, a schedule or a random number is not the stock Trainer's."""
    given = WAYS[way]
    stock, logs = train(Trainer, tmp_path, model_of(way), **given)
    exact = {}
    for tier, zero in tiers(tmp_path).items():
        if tier == "none" and way not in ("plain", "accumulated"):
            continue
        made, ours = train(Sharded, tmp_path, model_of(way), zero=zero, **given)
        near(ours.losses, logs.losses)
        near(ours.norms, logs.norms, 1e-4)
        for name, value in weights(made.model).items():
            torch.testing.assert_close(value, stock.model.state_dict()[name], rtol=1e-3, atol=1e-4)
        exact[tier] = ours.losses, ours.norms
        made.zero_run.close()
    assert exact["host"] == exact["nvme"]


@pytest.mark.parametrize("way", ["plain", "accumulated", "label smoothing", "dropout"])
@pytest.mark.parametrize("activations", ["recompute", "host", "nvme"])
def test_blocks_that_are_recomputed_log_the_losses_of_the_stock_trainer(activations, way, tmp_path):
    """Four rows at once, and one at a time, which draws other random numbers where there is dropout."""
    zero = tiers(tmp_path)["nvme"] | {"activations": activations}
    given = WAYS[way] | {"per_device_train_batch_size": 4, "data": 52}
    _, logs = train(Trainer, tmp_path, model_of(way), **given)
    for rows in (None, 1):
        if rows and way == "dropout":
            continue
        made, ours = train(Sharded, tmp_path, model_of(way), zero=zero | {"rows": rows}, **given)
        near(ours.losses, logs.losses)
        near(ours.norms, logs.norms, 1e-4)
        parts = 4 if rows else 1
        run = made.zero_run
        assert run.activations.stats()["recomputed"] >= 2 * 6 * parts
        said = f"blocks keep their inputs for backward ({activations})" + (" and compute their batch" if rows else ";")
        assert said in run.describe()
        made.zero_run.close()


@pytest.mark.parametrize("way", ["autocast", "parameters", "model"])
def test_bf16_stays_within_a_hundredth_of_the_stock_trainer(way, tmp_path):
    """Autocast; bf16 parameters over fp32 masters; a model that is bf16 itself, which then has masters too."""
    autocast = {"bf16": True, "max_steps": 12}
    _, logs = train(Trainer, tmp_path, **autocast)
    exact = []
    for zero in list(tiers(tmp_path).values())[1:]:
        given = autocast if way == "autocast" else {"max_steps": 12}
        zero = zero | ({"param_dtype": "bf16"} if way == "parameters" else {})
        model = llama().bfloat16() if way == "model" else llama()
        made, ours = train(Sharded, tmp_path, model, zero=zero, **given)
        near(ours.losses, logs.losses, 1e-2)
        exact.append(ours.losses)
        made.zero_run.close()
    assert exact[0] == exact[1]


def _on_two_ranks(folder, zero, given):
    with launched():
        cls, more = (Trainer, {}) if zero is None else (Sharded, {"zero": zero})
        made, logs = train(cls, folder, llama(torch.distributed.get_rank()), **more, **given)
        if zero is None:
            assert type(made.model_wrapped).__name__ == "DistributedDataParallel"
        else:
            assert made.model_wrapped is made.model
            made.zero_run.close()
        return logs.losses, logs.evaluations, logs.norms


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_on_two_ranks_they_are_those_of_ddp(stage, ranks, tmp_path):
    """27 rows to train on and 7 to evaluate, 2 and 3 a batch: no last batch is full."""
    given = {"data": 27, "max_steps": 9, "eval_strategy": "steps", "eval_steps": 4, "per_device_eval_batch_size": 3}
    given |= {"gradient_accumulation_steps": 2} if stage != 3 else {}
    theirs = ranks(2).run(_on_two_ranks, tmp_path, None, given)
    chosen = tiers(tmp_path) if stage == 3 else {"host": {"offload": "host"}}
    for zero in chosen.values():
        ours = ranks(2).run(_on_two_ranks, tmp_path, zero | {"stage": stage}, given)
        for rank in range(2):
            near(ours[rank][0], theirs[rank][0])
            near(ours[rank][1], theirs[rank][1])
            near(ours[rank][2], theirs[rank][2], 1e-4)
