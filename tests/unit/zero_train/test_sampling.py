"""Generated text: as long as asked, the same for the same seed, greedy at temperature 0, stopped when asked."""

import torch

from zero_train import sampling
from zero_train.schema import RunConfig


class Successor(torch.nn.Module):
    """Scores the byte after the last one highest."""

    def forward(self, input_ids, use_cache):
        assert not self.training and input_ids.shape[1] <= 4
        scores = torch.nn.functional.one_hot((input_ids + 1) % 256, 256).float() * 4
        return type("Output", (), {"logits": scores})()


def generate(length, model=None, stop=lambda: False, **keys):
    run = RunConfig(sample_bytes=length, **{"sample_prompt": "ab", "sample_temperature": 0.0, **keys})
    return sampling.generate(model or Successor(), run, 4, torch.device("cpu"), stop)


def test_the_likeliest_bytes_follow_the_prompt():
    assert generate(5) == "abcdefg"


def test_a_seed_draws_the_same_text():
    assert generate(20, sample_temperature=1.0) == generate(20, sample_temperature=1.0)
    assert generate(20, sample_temperature=1.0) != generate(20, sample_temperature=1.0, seed=1)


def test_it_stops_when_asked_and_leaves_the_mode_as_it_was():
    asked = iter([False, False, True])
    model = Successor().train()
    assert generate(9, model, lambda: next(asked)) == "abcd" and model.training


def test_an_empty_prompt_still_begins():
    assert generate(2, sample_prompt="") == "\n\x0b\x0c"
