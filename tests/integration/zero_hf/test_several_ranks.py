"""A Trainer on several ranks: in groups that each hold all shards, and where some ranks have no image in a batch.

What would have to break: a gradient that is averaged over a group only, a batch that is split within a group only, a
checkpoint of several copies, or a way out that trains otherwise than DDP does without it.
"""

import os
from unittest import mock

import pytest
import torch
from accelerate import DistributedDataParallelKwargs
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Trainer,
)

import zero_core
import zero_hf
from tests import kit
from tests.integration.zero_core import toys
from tests.integration.zero_hf.trainers import VOCABULARY, Sharded, launched, llama, train, weights
from zero_hf import ConfigError, ZeroConfig

GIVEN = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "data": 33}


def _in_groups(folder, zero, steps, resume=None):
    with launched():
        made, logs = train(Sharded, folder, zero=zero, resume=resume, max_steps=steps, **GIVEN)
        text, group = made.zero_run.describe(), zero_core.handle(made.model).ranks.shard.group
        members = torch.distributed.get_process_group_ranks(group)
        made.save_model(str(folder / "final"))
        made.zero_run.close()
        return logs.losses, logs.norms, logs.evaluations, members, text


@pytest.mark.promise("replicas")
@pytest.mark.parametrize("zero", [{"stage": 1}, {"offload": "host", "stage": 3}])
def test_a_trainer_in_groups_logs_what_it_does_in_one(ranks, tmp_path, zero):
    """Also when each goes on from a checkpoint of the other. In fp32, up to the order of sums."""
    found = {}
    for replicas, name in ((1, "one"), (2, "two")):
        found[name] = ranks(4).run(_in_groups, tmp_path / name, zero | {"replicas": replicas}, 4)
    for rank in range(4):
        one, two = found["one"][rank], found["two"][rank]
        assert two[3] == [rank // 2 * 2, rank // 2 * 2 + 1] and one[3] == [0, 1, 2, 3]
        assert "on 4 ranks in 2 groups, of each:" in two[4] and "on 4 ranks, of each:" in one[4]
        for ours, theirs in zip(two[:3], one[:3], strict=True):
            assert ours and ours == pytest.approx(theirs, rel=1e-4)
    whole = found["one"][0]
    for name, replicas in (("one", 2), ("two", 1)):
        checkpoint, folder = str(tmp_path / name / "checkpoint-2"), tmp_path / f"on_{name}"
        rest = ranks(4).run(_in_groups, folder, zero | {"replicas": replicas}, 4, checkpoint)[0]
        assert rest[0][-2:] == pytest.approx(whole[0][2:], rel=1e-4)
        finals = [AutoModelForCausalLM.from_pretrained(each / "final") for each in (folder, tmp_path / "one")]
        ours, theirs = (dict(each.state_dict()) for each in finals)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.promise("replicas")
@pytest.mark.advice("leave durable out and save checkpoints")
@kit.on_ranks(2)
def test_groups_that_cannot_be_are_refused_and_the_way_out_works():
    def sharded(config, **options):
        model = llama()
        zero_hf.shard(model, torch.optim.AdamW(model.parameters()), config, **options).close()

    with pytest.raises(ConfigError, match=r"replicas=3 does not divide 2 ranks .*: start a multiple of"):
        sharded(ZeroConfig(replicas=3))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 1))
    with pytest.raises(ConfigError, match=r"mesh= and replicas=2 both set .* leave one out"):
        sharded(ZeroConfig(replicas=2), mesh=mesh)
    sharded(ZeroConfig(replicas=2))
    sharded(ZeroConfig(), mesh=mesh)
    with pytest.raises(ConfigError, match=r"stage=0 shards nothing: write replicas: 1, or stage: 1, 2 or 3"):
        ZeroConfig(stage=0, replicas=2)
    ZeroConfig(stage=0, replicas=1)
    ZeroConfig(stage=1, replicas=2)
    durable = {"durable": "process", "offload": "host", "nvme_paths": "/x"}
    with pytest.raises(ConfigError, match=r"keeps one group's steps: write replicas: 1, or leave durable out"):
        ZeroConfig(replicas=2, **durable)
    ZeroConfig(replicas=1, **durable)
    ZeroConfig(replicas=2, offload="host")


def _on_machines(folder, second):
    """Two machines of two ranks each, as torchrun tells it."""
    machine = {"GROUP_RANK": str(torch.distributed.get_rank() // 2), "LOCAL_WORLD_SIZE": "2"}
    with launched(), mock.patch.dict(os.environ, machine):
        made, logs = train(Sharded, folder, zero={"secondary_shards": second}, max_steps=3, data=33)
        planned = made.zero_run.plan.bytes_of("device", "buffers")
        made.zero_run.close()
    return logs.losses, planned


@pytest.mark.promise("secondary-shards")
def test_secondary_shards_of_a_trainer_are_planned_and_train_the_same(ranks, tmp_path):
    (losses, planned), (others, more) = (ranks(4).run(_on_machines, tmp_path / str(on), on)[0] for on in (False, True))
    assert losses == others and more > planned
    with pytest.raises(ValueError, match=r"needs stage=3, .* has stage=2, .*: leave secondary_shards out"):
        zero_hf.shard(torch.nn.Linear(2, 2), None, ZeroConfig(stage=2, secondary_shards=True))


IMAGE, PATCHES = VOCABULARY - 1, 4


def llava():
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    text = LlamaConfig(**sizes, vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=64)
    small = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    tower = CLIPVisionConfig(**small, image_size=8, patch_size=4, projection_dim=16)
    options = {"image_token_id": IMAGE, "image_seq_length": PATCHES, "vision_feature_layer": -2}
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=tower, text_config=text, **options))


def rows(blank):
    """The second of each two has no image: on two ranks, those of the second. blank: it gets one behind its end."""
    generator = torch.Generator().manual_seed(5)
    for number in range(24):
        ids = torch.randint(1, IMAGE, (12,), generator=generator)
        labels, mask, pixels = ids.clone(), torch.ones(12, dtype=torch.int64), torch.zeros(3, 8, 8)
        if number % 2 == 0:
            ids[:PATCHES], labels[:PATCHES] = IMAGE, -100
            pixels = torch.randn(3, 8, 8, generator=generator)
        elif blank:
            ids = torch.cat([ids, torch.full((PATCHES,), IMAGE)])
            labels = torch.cat([labels, torch.full((PATCHES,), -100)])
            mask = torch.cat([mask, torch.zeros(PATCHES, dtype=torch.int64)])
        has = {"pixel_values": pixels} if number % 2 == 0 or blank else {}
        yield {"input_ids": ids, "labels": labels, "attention_mask": mask, **has}


class InOrder(Trainer):
    def _get_train_sampler(self, *given):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def _trained(folder, stage, blank, mixed=False):
    """mixed: the rank that has images changes from step to step, and the last step has none."""
    given = dict(max_steps=3, per_device_train_batch_size=1, remove_unused_columns=False, optim="sgd")
    given["weight_decay"] = 0.1 * mixed
    cls = InOrder if stage is None else zero_hf.sharded(InOrder, zero={"stage": stage})
    train_dataset = [*rows(blank)]
    if mixed:
        image, text, *_ = train_dataset
        train_dataset = [image, text, text, image, text, text]
    more = {} if blank else {"ddp_find_unused_parameters": True}
    with launched():
        made, logs = train(cls, folder, llava(), train_dataset=train_dataset, **given, **more)
        return logs.losses, weights(made.model)


def _same(ranks, folder, ours, wanted):
    (losses, values), _ = ranks(2).run(_trained, folder, *wanted)
    (found, weighed), _ = ranks(2).run(_trained, folder, *ours)
    assert found == pytest.approx(losses, rel=1e-5)
    for name, value in values.items():
        assert torch.allclose(weighed[name], value, atol=1e-5), name


@pytest.mark.promise("images-on-some-ranks")
@pytest.mark.advice("append a blank input to the end of")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_blank_image_behind_a_row_trains_as_ddp_does_without(ranks, tmp_path, stage):
    """Fails if the way out is another training, or none."""
    _same(ranks, tmp_path, (stage, True), (None, False))


@pytest.mark.promise("images-on-some-ranks")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_find_unused_parameters_trains_as_ddp_does_with_it(ranks, tmp_path, stage):
    """Fails if a gradient that one rank lacks is left out of the mean, or one that all lack is stepped."""
    _same(ranks, tmp_path, (stage, False, True), (None, False, True))


@pytest.mark.promise("images-on-some-ranks")
@pytest.mark.parametrize("stage", [0, 2])
@kit.on_ranks(2)
def test_accelerates_setting_lets_ranks_run_different_units(stage):
    with launched():
        handler = DistributedDataParallelKwargs(find_unused_parameters=True)
        accelerator = zero_hf.Accelerator(cpu=True, zero={"stage": stage}, kwargs_handlers=[handler])
        dense, model = kit.twins(toys.Sometimes)
        model, optimizer = accelerator.prepare(model, toys.sgd(model.parameters()))
        accelerator.backward(toys.loss_of(model, toys.data(8, kit.world()[0])))
        optimizer.step()
        kit.step(toys.sgd(dense.parameters()), sum(toys.loss_of(dense, toys.data(8, rank)) for rank in range(2)) / 2)
        kit.assert_same(model, dense, rtol=1e-5, atol=1e-7)
