"""What a DeepSpeed JSON becomes: ten files as people write them, and what contradicts, resolves or is missing."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, TrainingArguments

from tests import kit
from zero_deepspeed import from_deepspeed
from zero_deepspeed.schedules import make
from zero_deepspeed.sharding import Settings, shard
from zero_deepspeed.translation import translate

CONFIGS = Path(__file__).with_name("configs")
ZERO = "zero_optimization."
BATCH = {"train_micro_batch_size_per_gpu": 1}


def arguments(tmp_path, **given):
    return TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **given)


def read(name, **given):
    return translate(CONFIGS / f"{name}.json", **given)


def refused(translation):
    return {row.key: row.remark for row in translation.refused}


HOST = {"optimizer": "host", "gradients": "host"}
PART = dict.fromkeys(HOST, {"device": 0.25, "host": 0.75})
NVME = dict.fromkeys(("optimizer", "gradients", "parameters"), "nvme")
SIZES = {"prefetch_bytes": 2_000_000, "resident_bytes": 100_000_000}
QUANTIZED = (f"{ZERO}zero_quantized_weights", f"{ZERO}zero_quantized_gradients")


@pytest.mark.promise("ds-translation")
@pytest.mark.parametrize(
    ("name", "zero", "batch", "others"),
    [
        ("stage1", {"stage": 1}, (4, 1, 16), ()),
        ("stage2_cpu", {"stage": 2, **HOST}, (2, 8, 64), ()),
        ("stage3_cpu", {"parameters": "host", **PART, **SIZES}, (1, 4, 16), ()),
        ("stage3_nvme", {**NVME, "nvme_paths": ("/local_nvme",)}, (1, 2, 8), ()),
        ("fp16", {"stage": 2, "param_dtype": "fp16"}, (1, 1, 4), ()),
        ("zeropp", {}, (1, 1, 4), QUANTIZED),
        ("mics", {}, (1, 1, 4), ()),
        ("zenflow", {"stage": 2, **HOST}, (1, 1, 4), (f"{ZERO}zenflow",)),
        ("tensor_parallel", {"stage": 1}, (1, 1, 4), ("tensor_parallel",)),
    ],
)
def test_what_people_write_becomes_this_on_four_ranks(name, zero, batch, others):
    found = read(name, world_size=4)
    assert found.zero == Settings(**{"param_dtype": "bf16", **zero})
    assert (found.micro_batch_size, found.accumulate, found.train_batch_size) == batch
    assert found.max_grad_norm == (0.5 if name == "stage2_cpu" else 1.0) and tuple(refused(found)) == others
    written = json.loads((CONFIGS / f"{name}.json").read_text())
    assert {row.key.split(".")[0] for row in found.rows} >= set(written)
    assert all(row.remark for row in found.rows if row.kind != "mapped")  # never dropped without a reason
    assert all(row.ours for row in found.rows if row.kind == "mapped")


@pytest.mark.promise("ds-auto")
def test_auto_everywhere_resolves_as_in_transformers(tmp_path):
    args = arguments(
        tmp_path, per_device_train_batch_size=3, gradient_accumulation_steps=2, learning_rate=2e-5, weight_decay=0.1,
        adam_beta2=0.95, adam_epsilon=1e-6, max_grad_norm=0.3, warmup_steps=0.1, bf16=True,
    )  # fmt: skip
    model = LlamaConfig(hidden_size=96, num_attention_heads=4)
    found = from_deepspeed(CONFIGS / "auto.json", arguments=args, model=model, num_training_steps=50)
    assert (found.micro_batch_size, found.accumulate, found.train_batch_size) == (3, 2, 6)
    assert found.max_grad_norm == 0.3 and found.loss_scale is None
    assert found.zero == Settings(
        stage=3, parameters="device", **HOST, param_dtype="bf16",
        prefetch_bytes=int(0.9 * 96 * 96) * 2, resident_bytes=2_000_000_000,
    )  # fmt: skip
    optimizer = found.optimizer([torch.nn.Parameter(torch.zeros(1))])
    assert type(optimizer) is torch.optim.AdamW
    group = optimizer.param_groups[0]
    assert [group[key] for key in ("lr", "betas", "eps", "weight_decay")] == [2e-5, (0.9, 0.95), 1e-6, 0.1]
    rates = []
    schedule = found.scheduler(optimizer)
    for _ in range(52):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[6] == 2e-5 and rates[51] == 0.0 and rates[0] == 0.0


def test_auto_without_arguments_is_deepspeeds_default_or_refused():
    found = read("auto", world_size=1)
    assert set(refused(found)) == {
        "scheduler.params.total_num_steps",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    }
    assert found.max_grad_norm == 1.0 and found.zero.prefetch_bytes == 4 * 50_000_000


@pytest.mark.parametrize(
    ("keys", "batch"),  # None: refused
    [
        ((8, None, None), (2, 1, 8)),
        ((None, 3, None), (3, 1, 12)),
        ((None, 3, 2), (3, 2, 24)),
        ((24, 3, None), (3, 2, 24)),
        ((24, None, 2), (3, 2, 24)),
        ((None, None, None), (None, None, None)),
        *((keys, None) for keys in ((24, 5, None), (24, 3, 1), (2, None, None), (24, None, 5))),
    ],
)
def test_batch_sizes_follow_from_each_other(keys, batch):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    found = translate({name: value for name, value in zip(names, keys, strict=True) if value is not None}, world_size=4)
    if batch is None:
        assert (
            ", and world_size=4: micro-batch x accumulation steps x ranks must be" in refused(found)["train_batch_size"]
        )
    else:
        assert not found.refused and (found.micro_batch_size, found.accumulate, found.train_batch_size) == batch


def test_the_loss_scale_is_deepspeeds_and_new_at_each_access():
    found = from_deepspeed(CONFIGS / "fp16.json", world_size=1)
    scale = found.loss_scale
    assert (scale.value, scale.window, scale.hysteresis, scale.minimum) == (4096.0, 500, 3, 16.0)
    assert scale.consecutive_hysteresis and scale.fails_at_minimum and scale is not found.loss_scale
    assert found.shard_options == {"reduce_dtype": torch.float32}
    at_0 = {**BATCH, "fp16": {"enabled": True}, "zero_optimization": {"stage": 0}}
    assert from_deepspeed(at_0).loss_scale.hysteresis == 1  # DeepSpeed's stage 0 has no hysteresis
    constant = from_deepspeed({**BATCH, "fp16": {"enabled": True, "loss_scale": 128}}).loss_scale
    assert (constant.value, constant.dynamic) == (128.0, False)


@pytest.mark.parametrize(
    ("kind", "params", "made", "some"),
    [
        ("Adam", {}, torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.0}),  # DeepSpeed's Adam is AdamW
        ("Adam", {"adam_w_mode": False, "weight_decay": 0.1}, torch.optim.Adam, {"weight_decay": 0.1}),
        ("AdamW", {"adam_w_mode": False}, torch.optim.AdamW, {"weight_decay": 0.0}),
        ("adamw", {"torch_adam": True}, torch.optim.AdamW, {"weight_decay": 0.01}),  # torch's own default
        ("Adagrad", {}, torch.optim.Adagrad, {"lr": 1e-2, "eps": 1e-10}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        ("RMSprop", {"alpha": 0.5}, torch.optim.RMSprop, {"alpha": 0.5}),
    ],
)
def test_a_type_is_made_with_deepspeeds_defaults(kind, params, made, some):
    found = translate({"optimizer": {"type": kind, "params": params}})
    assert not found.refused
    optimizer = found.optimizer([torch.nn.Parameter(torch.zeros(2))])
    assert type(optimizer) is made
    assert {key: optimizer.param_groups[0][key] for key in some} == some


def test_a_share_of_the_parameters_stays_in_memory_where_their_number_is_known():
    config = json.loads((CONFIGS / "stage3_nvme.json").read_text())
    config["zero_optimization"]["offload_param"]["max_in_cpu"] = 100
    found = translate(config, world_size=2, model=torch.nn.Linear(800, 1, bias=False))
    assert found.zero.placements["parameters"] == {"host": 0.25, "nvme": 0.75}


def _trained(size, offload):
    """Weights after two steps of this rank's rows, and the plan's bytes of parameters."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    zero = {"stage": 3, **({"mics_shard_size": size} if size else {})}
    zero |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}} if offload else {}
    optimizer = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    found = from_deepspeed({**BATCH, "zero_optimization": zero, "optimizer": optimizer}, world_size=ranks)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
    options = {"max_grad_norm": found.max_grad_norm, **found.shard_options}
    run = shard(model, found.optimizer(model.parameters()), found.zero, **options)
    for step in range(2):
        torch.manual_seed(ranks * step + rank)
        kit.step(run.optimizer, model(torch.randn(3, 64)).square().mean())
    weights = [value.clone() for value in model.state_dict().values()]
    kept = run.plan.bytes_of("host" if offload else "device", "parameters")
    run.close()
    return weights, kept


@pytest.mark.promise("ds-mics")
@pytest.mark.parametrize(("size", "offload"), [(2, False), (2, True), (1, False)])
def test_mics_trains_as_all_ranks_together(ranks, size, offload):
    """Four ranks: parameters are cut in two, or not at all, and gradients are averaged over all four."""
    together, grouped = (ranks(4).run(_trained, each, offload) for each in (None, size))
    for (one, kept), (other, twice) in zip(together, grouped, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
        assert twice > 3 / size * kept


# The numbers of RECORDED were printed by DeepSpeed 0.19.8's classes (deepspeed.runtime.lr_schedules), over AdamW with
# lr=2e-3: the rates of the first steps. `nox -s deepspeed` compares all of them with the real ones.
RECORDED = [
    ("WarmupLR", {"warmup_num_steps": 4}, [0.0, 0.0, 0.001, 0.0015849625007211563, 0.002, 0.002]),
    (
        "WarmupLR",
        {"warmup_max_lr": 0.001, "warmup_min_lr": 1e-05, "warmup_num_steps": 4, "warmup_type": "linear"},
        [1e-05, 1e-05, 0.0002575, 0.000505, 0.0007525, 0.001, 0.001],
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 7, "warmup_num_steps": 3},
        [0.0, 0.0, 0.0006309297535714573, 0.001, 0.001, 0.00075, 0.0005, 0.00025, 0.0, 0.0],
    ),
    (
        "WarmupCosineLR",
        {"cos_min_ratio": 0.1, "total_num_steps": 7, "warmup_num_steps": 3},
        [0.0, 0.0, 0.0012618595071429146, 0.002, 0.0017363961030678928, 0.0011, 0.0004636038969321073, 0.0002, 0.0002],
    ),
]


@pytest.mark.promise("ds-schedules")
@pytest.mark.parametrize("saved", [None, 2])
@pytest.mark.parametrize(("name", "params", "rates"), RECORDED)
def test_rates_are_deepspeeds(name, params, rates, saved):
    """From the beginning, and from a state of DeepSpeed's."""
    over = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=2e-3)
    schedule = make(name, over, params)
    if saved is not None:
        schedule.load_state_dict({"last_batch_iteration": saved})
    start, found = 0 if saved is None else saved + 1, []
    for _ in rates[start:]:
        found.append(over.param_groups[0]["lr"])
        over.step()
        schedule.step()
    assert found == rates[start:]
    assert schedule.state_dict() == {"last_batch_iteration": start - 1 + len(found)}
