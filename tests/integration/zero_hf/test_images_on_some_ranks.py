"""Ranks of which some have no image in a batch: the way out that the error names trains as DDP does without it."""

from __future__ import annotations

import pytest
import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, Trainer

import zero_hf
from tests.integration.zero_hf.trainers import VOCABULARY, launched, train, weights

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


def _trained(folder, stage, blank):
    given = dict(max_steps=3, per_device_train_batch_size=1, remove_unused_columns=False, optim="sgd")
    cls = InOrder if stage is None else zero_hf.sharded(InOrder, zero={"stage": stage})
    more = {"ddp_find_unused_parameters": True} if stage is None else {}
    with launched():
        made, logs = train(cls, folder, llava(), train_dataset=[*rows(blank)], **given, **more)
        return logs.losses, weights(made.model)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_blank_image_behind_a_row_trains_as_ddp_does_without(ranks, tmp_path, stage):
    """Fails if the way out is another training, or none."""
    (losses, wanted), _ = ranks(2).run(_trained, tmp_path, None, False)
    (ours, found), _ = ranks(2).run(_trained, tmp_path, stage, True)
    assert ours == pytest.approx(losses, rel=1e-5)
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, atol=1e-5), name
