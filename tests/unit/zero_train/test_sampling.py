"""Generated text: as long as asked, the same for the same seed, greedy at temperature 0, stopped when asked."""

import torch

from zero_train import sampling


class Successor(torch.nn.Module):
    """Scores the byte after the last one highest."""

    def forward(self, input_ids, use_cache):
        assert not self.training and input_ids.shape[1] <= 4
        scores = torch.nn.functional.one_hot((input_ids + 1) % 256, 256).float() * 4
        return type("Output", (), {"logits": scores})()


def generate(length, **options):
    values = {"temperature": 0.0, "seed": 0, "context": 4, "device": torch.device("cpu"), **options}
    return sampling.generate(Successor(), "ab", length, **values)


def test_the_likeliest_bytes_follow_the_prompt():
    assert generate(5) == "abcdefg"


def test_a_seed_draws_the_same_text():
    assert generate(20, temperature=1.0) == generate(20, temperature=1.0)
    assert generate(20, temperature=1.0) != generate(20, temperature=1.0, seed=1)


def test_it_stops_when_asked_and_leaves_the_mode_as_it_was():
    asked = iter([False, False, True])
    model = Successor().train()
    text = sampling.generate(
        model, "ab", 9, temperature=0.0, seed=0, context=4, device=torch.device("cpu"), stop=lambda: next(asked)
    )
    assert text == "abcd" and model.training


def test_an_empty_prompt_still_begins():
    assert (
        sampling.generate(Successor(), "", 2, temperature=0.0, seed=0, context=4, device=torch.device("cpu"))
        == "\n\x0b\x0c"
    )
