"""Advice about DeepSpeed's JSON and loop that is followed: each test does what the message says, and that trains."""

import argparse
import contextlib
import copy
import json
import re
import sys

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import zero_deepspeed as deepspeed
from tests import kit
from tests.unit.zero_deepspeed.test_engine import net
from tests.unit.zero_deepspeed.test_keys import nested
from zero_core.errors import ConfigError
from zero_deepspeed import from_deepspeed
from zero_deepspeed.keys import REFUSED
from zero_deepspeed.optimizers import TYPES
from zero_deepspeed.translation import translate

pytestmark = [pytest.mark.usefixtures("process_group_ends"), pytest.mark.promise("ds-advice")]

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}
BASE = {"train_micro_batch_size_per_gpu": 1, "optimizer": ADAMW, "zero_optimization": {"stage": 3}}
SECTION = "zero_optimization"
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 4}}
STEP = {"type": "StepLR", "params": {"step_size": 1}}


def merged(base, more):
    """`base` with the keys of `more`, section by section."""
    both = {name: merged(base[name], more[name]) for name in more if isinstance(base.get(name), dict)}
    return {**base, **more, **both}


def made(config, model=None, **given):
    return deepspeed.initialize(model=model or net(), config=merged(BASE, config), **given)[0]


def stepped(engine, losses=1):
    """Trains one step, and says whether the weights changed."""
    weight = next(engine.module.parameters())
    before = weight.detach().clone()
    for _ in range(losses):
        engine.backward(engine(torch.ones(2, 8, dtype=weight.dtype)).float().square().mean())
    engine.step()
    return not torch.equal(weight.detach(), before)


def trains(config, **given):
    engine = made(config, **given)
    assert any([stepped(engine) for _ in range(3)])  # a warm-up begins at 0
    engine.destroy()


def advised(part, config, **given):
    """The file is refused for one thing, by a message with this part."""
    [row] = translate(merged(BASE, config), **given).refused
    assert part in row.remark, row.remark


def test_the_keys_that_a_refusal_names_are_left_out():
    """All at once, as a user does who reads the list: what is left is as if they had not been there, and trains."""
    config = BASE
    for key in REFUSED:
        config = merged(config, nested(key, {"enabled": True}))
    with pytest.raises(ConfigError, match="has keys that are refused") as raised:
        from_deepspeed(config)
    named = re.findall(r"^- ([\w.]+)=.*: not supported: leave it out", str(raised.value), re.MULTILINE)
    assert sorted(named) == sorted(REFUSED)
    config = copy.deepcopy(config)
    for key in named:
        *sections, last = key.split(".")
        inner = config
        for section in sections:
            inner = inner[section]
        del inner[last]
    assert from_deepspeed(config).zero == from_deepspeed(BASE).zero
    trains(config)


DECAY = {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}
AUTOCAST = {"torch_autocast": {"enabled": True}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
REFUSALS = [  # what is in the file, what the refusal says, and what it says to write in its place
    ({"amp": {"enabled": True}}, "leave it out, and write bf16 or fp16", BF16, FP16),
    ({**BF16, **AUTOCAST}, "bf16 is enabled, too: keep one of them", BF16, AUTOCAST),
    ({**BF16, **FP16}, "bf16 is enabled, too: keep one of them", BF16, FP16),
    (
        {SECTION: {"cpu_offload": True, **OFFLOAD}},
        "says the same: keep one",
        *({SECTION: each} for each in ({"cpu_offload": True}, OFFLOAD)),
    ),
    ({"fp16": True}, "give an object of keys", FP16),
    ({"gradient_cliping": 1.0}, "did you mean gradient_clipping?", {"gradient_clipping": 1.0}),
    ({"qwertz": 1}, "DeepSpeed has no such key: leave it out", {}),
    (
        {"optimizer": {"params": {"max_grad_norm": 0.5}}},
        "write gradient_clipping at the top of the file",
        {"gradient_clipping": 0.5},
    ),
    (
        {"optimizer": {"type": "OneBitAdam"}},
        f"take one of {', '.join(TYPES)}",
        *({"optimizer": {"type": name}} for name in TYPES),
    ),
    (
        {"scheduler": {"type": "OneCycle"}},
        "take one of WarmupLR, WarmupDecayLR, WarmupCosineLR, or a class of torch",
        *({"scheduler": each} for each in ({"type": "WarmupLR"}, DECAY, DECAY | {"type": "WarmupCosineLR"}, STEP)),
    ),
    ({"scheduler": {"params": {"step_size": 1}}}, "name the type", {"scheduler": STEP}),
    (
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}},
        'no argument resolves "auto": write a value',
        {"scheduler": DECAY},
    ),
]


@pytest.mark.advice(", and write bf16 or fp16", "is enabled, too: keep one of them", "did you mean {}? / leave it out")
@pytest.mark.parametrize("row", REFUSALS)
def test_what_a_refusal_says_to_write_trains(row):
    bad, advice, *ways = row
    advised(advice, bad)
    for way in ways:
        trains(way)


def test_lion_is_installed_or_another_taken(monkeypatch):
    lion = {"optimizer": {"type": "Lion", "params": {"lr": 1e-2}}}
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "zero_optim_cpu", None)
        with pytest.raises(ConfigError, match='the package zero-optim-cpu: install it, or write "type": "AdamW"'):
            from_deepspeed(lion)
        trains({})
    with deepspeed.zero.Init():  # Lion takes CPU tensors only, and these have no memory yet
        model = net()
    groups = [{"params": [*model[0].parameters()], "weight_decay": 0.1}, {"params": [*model[2].parameters()]}]
    trains(lion, model=model, model_parameters=groups)


def test_the_ranks_and_batches_that_a_refusal_asks_for_are_given():
    bad = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}
    with pytest.raises(ConfigError, match="Leave one of the keys out, or pass the number of ranks as world_size="):
        from_deepspeed(bad)
    for key in bad:
        from_deepspeed({name: value for name, value in bad.items() if name != key})
    assert from_deepspeed(bad, world_size=4).train_batch_size == 24
    with pytest.raises(ConfigError, match="give the number of ranks, at least 1"):
        from_deepspeed(bad, world_size=0)
    mics = merged(BASE, {"zero_optimization": {"mics_shard_size": 3}})
    for wrong, ranks in ((mics, 4), (merged(mics, {"zero_optimization": {"stage": 2}}), 6)):
        with pytest.raises(ConfigError, match="take stage 3 and a divisor of the ranks, or pass the number of ranks"):
            from_deepspeed(wrong, world_size=ranks)
    assert from_deepspeed(mics, world_size=6).shard_size == 3
    with pytest.raises(ConfigError, match="for 6 ranks, .* is 1. Call .* first, and then read the configuration"):
        from_deepspeed(mics, world_size=6).shard_options


@pytest.mark.advice("is there twice: keep one of them")
def test_a_file_is_given_by_its_path_without_comments(tmp_path):
    path = tmp_path / "ds.json"
    for text in (None, f"// ours\n{json.dumps(BASE)}", '{"bf16": {}, "bf16": {}}'):
        if text is not None:
            path.write_text(text)
        with pytest.raises(ConfigError, match=r"cannot read \S+ds.json: .*\. Give a file with JSON, without comments"):
            from_deepspeed(path)
    with pytest.raises(ConfigError, match="bf16 is there twice: keep one of them"):
        from_deepspeed(path)
    path.write_text(json.dumps(BASE))
    assert from_deepspeed(path).zero.stage == 3


@pytest.mark.advice('make them agree, or write "auto"')
@pytest.mark.promise("ds-auto")
def test_auto_and_the_arguments_are_made_to_agree(tmp_path):
    def arguments(**given):
        return transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **given)

    batch = {"train_micro_batch_size_per_gpu": 4}
    theirs = arguments(per_device_train_batch_size=2)
    with pytest.raises(ConfigError, match='=2: make them agree, or write "auto"'):
        from_deepspeed(batch, arguments=theirs)
    same = arguments(per_device_train_batch_size=4, save_on_each_node=True)  # which transformers writes into the file
    agreed = from_deepspeed(batch, arguments=same, model=torch.nn.Linear(1, 1))
    auto = from_deepspeed({"train_micro_batch_size_per_gpu": "auto"}, arguments=theirs)
    assert (agreed.micro_batch_size, auto.micro_batch_size) == (4, 2)
    decay = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}
    with pytest.raises(ConfigError, match="Or pass from_deepspeed arguments= or num_training_steps="):
        from_deepspeed(decay, arguments=arguments())
    for found in (
        from_deepspeed(decay, arguments=arguments(), num_training_steps=7),
        from_deepspeed(decay, arguments=arguments(max_steps=7)),
    ):
        assert found.schedule[1]["total_num_steps"] == 7


def test_states_on_nvme_need_a_folder_on_a_drive_and_zero_nvme(tmp_path, monkeypatch):
    def offloaded(**given):
        return {"zero_optimization": {"stage": 3, "offload_optimizer": given}}

    advised("name a folder on your fastest drive", offloaded(device="nvme"))
    missing = tmp_path / "drive" / "zero"
    with pytest.raises(ConfigError, match="name a folder in an existing folder of a mounted drive"):
        made(offloaded(device="nvme", nvme_path=str(missing)))
    missing.parent.mkdir()
    trains(offloaded(device="nvme", nvme_path=str(missing)))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "zero_nvme", None)
        with pytest.raises(ConfigError, match='install it, or write "cpu"'):
            made(offloaded(device="nvme", nvme_path=str(missing)))
        trains(offloaded(device="cpu"))


# -- advice that is followed in the script -----------------------------------------------------------------------------


@pytest.mark.advice("Earlier versions did not clip: for that, write 0")
@pytest.mark.parametrize("stage", [1, 3])
@kit.on_ranks(2)
def test_the_caller_decides_when_step_updates(stage):
    """Instead of managed_gradient_accumulation=false: one step() after all micro-batches, as plain torch has it."""
    accumulates = {"gradient_accumulation_steps": 2, "gradient_clipping": 0, "zero_optimization": {"stage": stage}}
    advice = "call engine.set_gradient_accumulation_boundary(True)"
    advised(advice, {**accumulates, "managed_gradient_accumulation": False})
    engine, plain = made(accumulates), net()
    engine.set_gradient_accumulation_boundary(False)
    engine.step()
    assert not engine.was_step_applied() and engine.global_steps == 0
    engine.set_gradient_accumulation_boundary(True)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    size = dist.get_world_size()
    for step in range(2):
        rows = torch.randn(2, size, 2, 8, generator=torch.Generator().manual_seed(step))
        for micro in rows:
            engine.backward(engine(micro[dist.get_rank()]).square().mean())
        engine.step()
        kit.step(optimizer, sum(plain(part).square().mean() for micro in rows for part in micro).div(2 * size))
    assert engine.was_step_applied() and engine.global_steps == 2
    found = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.destroy()
    torch.testing.assert_close(found, plain.state_dict())


@pytest.mark.advice("and multiply the loss by the number of ranks")
@pytest.mark.parametrize("stage", [1, 3])
@kit.on_ranks(2)
def test_gradients_are_summed_by_a_loss_times_the_ranks(stage):
    """The weights after one step on the sum of both ranks' gradients, here and in plain torch."""
    config = {"gradient_clipping": 0, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    advised("and multiply the loss by the number of ranks", {**config, "gradient_allreduce_op": "sum"})
    engine, plain = made(merged(config, {"zero_optimization": {"stage": stage}})), net()
    rows = [torch.full((2, 8), 0.5 + rank) for rank in range(2)]
    loss = engine(rows[dist.get_rank()]).square().mean()
    with engine.no_sync() if stage == 1 else contextlib.nullcontext():  # a step inside it reduces what was kept
        engine.backward(loss * dist.get_world_size())
        engine.step()
    sum(plain(row).square().mean() for row in rows).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    found = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.destroy()
    torch.testing.assert_close(found, plain.state_dict())


def test_inputs_and_buffers_are_cast_before():
    advised("and cast inputs that are floats yourself", merged(FP16, {"fp16": {"auto_cast": True}}))
    trains(FP16)  # `stepped` casts
    advised("and cast buffers before the model is sharded", merged(BF16, {"data_types": {"buffer_dtype": "bf16"}}))
    for dtype in (torch.float32, torch.bfloat16):
        model = net()
        model.register_buffer("scale", torch.ones(4).to(dtype))
        engine = made(BF16, model)
        assert stepped(engine) and model.scale.dtype == dtype
        engine.destroy()


def test_initialize_gets_what_it_asks_for(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(BASE))
    words = ["--deepspeed_config", str(tmp_path / "ds.json")]
    args = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args(words)
    with pytest.raises(TypeError, match="give an nn.Module"):
        deepspeed.initialize(model=None, config=BASE)
    for given in ((), (args,)):
        with pytest.raises(ConfigError, match="give either config= or args.deepspeed_config"):
            deepspeed.initialize(*given, model=net(), config=BASE if given else None)
    for given in ({"args": args}, {"config": BASE}, {"config": tmp_path / "ds.json"}):
        engine = deepspeed.initialize(model=net(), **given)[0]
        assert stepped(engine) and engine.train_batch_size() == 1
        engine.destroy()
    engine = deepspeed.initialize(model=net(), config={})[0]
    with pytest.raises(ConfigError, match=r'pass optimizer= to initialize\(\), or write "optimizer" into the JSON'):
        engine.backward(engine(torch.ones(2, 8)).sum())
    with pytest.raises(ConfigError, match="the JSON has no batch size: write train_micro_batch_size_per_gpu"):
        engine.train_batch_size()
    engine.destroy()
    model = net()
    engine = deepspeed.initialize(model=model, config={}, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))[0]
    assert stepped(engine)
    engine.destroy()


def test_backward_and_no_sync_are_called_where_they_belong():
    engine = made({"gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}})
    with pytest.raises(ConfigError, match=r"nor scales it for fp16: call engine.backward\(loss\)"):
        engine(torch.ones(2, 8)).sum().backward()
    engine.zero_grad()
    with engine.no_sync():
        engine.backward(engine(torch.ones(2, 8)).sum())
    engine.step()
    assert stepped(engine)
    engine.destroy()
    engine = made({})
    with pytest.raises(ConfigError, match=r"stages 2 and 3 shard them: leave no_sync\(\) out"), engine.no_sync():
        pass
    assert stepped(engine, losses=2)
    engine.destroy()


@pytest.mark.advice("all ranks are data parallel: leave {}= out")
def test_a_model_that_is_built_without_memory_is_loaded(tmp_path):
    """zero.Init and GatheredParameters, by each way that their errors name."""
    with pytest.raises(ConfigError, match=r"Leave zero.Init out; initialize\(\) shards it"):
        deepspeed.zero.Init(module=net())
    with pytest.raises(ConfigError, match="all ranks are data parallel: leave mpu= out"):
        deepspeed.zero.Init(mpu=object())
    with deepspeed.zero.Init():
        model = net()
    gathered = deepspeed.zero.GatheredParameters
    advice = r"Load values after initialize\(\), or build the model with zero_hf"
    with pytest.raises(ConfigError, match=advice), gathered(model.parameters(), modifier_rank=0):
        pass
    engine, values = made({}, model), {name: torch.ones_like(value) for name, value in net().state_dict().items()}
    with pytest.raises(ConfigError, match="only rank 0's writes are kept. Write with modifier_rank=0"):
        with gathered(model, modifier_rank=1):
            pass
    with gathered(model, modifier_rank=0):
        for name, parameter in model.named_parameters():
            parameter.data.copy_(values[name])
    torch.testing.assert_close(model.state_dict(), values)
    with gathered(model[0].weight):  # without modifier_rank, what is written is lost
        nn.init.zeros_(model[0].weight)
    torch.testing.assert_close(model.state_dict(), values)
    with gathered([model[0].weight, nn.Parameter(torch.ones(1))], modifier_rank=0):
        nn.init.zeros_(model[0].weight)
    assert not model[0].weight.detach().any()
    with gathered(nn.Linear(2, 2).parameters()):  # nothing of it is sharded
        assert stepped(engine)
    engine.destroy()
    zero_hf = pytest.importorskip("zero_hf")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))
    llama.save_pretrained(tmp_path)
    engine = made({}, zero_hf.from_pretrained(type(llama), tmp_path))
    torch.testing.assert_close(engine.module.state_dict(), llama.state_dict())
    engine.destroy()
