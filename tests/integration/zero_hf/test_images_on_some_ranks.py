"""Ranks of which some have no image in a batch: the way out that the error names trains as DDP does without it."""

import pytest
import torch
from accelerate import DistributedDataParallelKwargs
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, Trainer

import zero_hf
from tests import kit
from tests.integration.zero_core import toys
from tests.integration.zero_hf.trainers import VOCABULARY, launched, train, weights

pytestmark = pytest.mark.promise("images-on-some-ranks")

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


@pytest.mark.advice("append a blank input to the end of")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_blank_image_behind_a_row_trains_as_ddp_does_without(ranks, tmp_path, stage):
    """Fails if the way out is another training, or none."""
    _same(ranks, tmp_path, (stage, True), (None, False))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_find_unused_parameters_trains_as_ddp_does_with_it(ranks, tmp_path, stage):
    """Fails if a gradient that one rank lacks is left out of the mean, or one that all lack is stepped."""
    _same(ranks, tmp_path, (stage, False, True), (None, False, True))


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
