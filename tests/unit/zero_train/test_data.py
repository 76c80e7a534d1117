"""The text: split by file, sampled by number, refused with the key to change."""

import torch

from zero_train.data import text
from zero_train.schema import DataConfig


def config(kind, **values):
    return DataConfig(kind=kind, sequence_length=values.pop("sequence_length", 16), **values)


def test_stdlib_is_split_by_file_and_the_same_each_time():
    first = text.load(config("stdlib", sequence_length=256), 0)
    again = text.load(config("stdlib", sequence_length=256), 1)
    assert torch.equal(first.training, again.training) and torch.equal(first.validation, again.validation)
    total = first.training.numel() + first.validation.numel()
    assert total > 1_000_000
    assert 0.01 < first.validation.numel() / total < 0.15


def test_a_single_file_is_cut(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 80 + "y" * 20)
    corpus = text.load(config("text", path=str(tmp_path / "a.txt"), validation_fraction=0.2), 0)
    assert bytes(corpus.training.tolist()) == b"x" * 80
    assert bytes(corpus.validation.tolist()) == b"y" * 20


def test_files_of_a_folder_that_are_not_text_are_counted(tmp_path):
    (tmp_path / "a.txt").write_text("größer " * 20)
    (tmp_path / "b.txt").write_bytes("latin größer\x1b[0m\n".encode("latin-1") * 20)
    (tmp_path / "c.bin").write_bytes(bytes(range(256)))
    corpus = text.load(config("text", path=str(tmp_path)), 0)
    assert "empty or not text: 1)" in corpus.name and "2 files" in corpus.name


def test_a_sample_depends_on_its_number_and_seed_alone():
    corpus = text.load(config("synthetic"), 0)
    whole = corpus.batch(8, 4, 16, seed=1)[0]
    halves = torch.cat([corpus.batch(8, 2, 16, seed=1)[0], corpus.batch(10, 2, 16, seed=1)[0]])
    assert torch.equal(whole, halves)
    assert not torch.equal(whole, corpus.batch(8, 4, 16, seed=2)[0])
