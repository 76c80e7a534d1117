"""The text is split by file. A row that cannot be used is told with the key and what was there, and is read mended."""

import re

import pytest
import torch

from zero_train.data import rows, text
from zero_train.schema import DataConfig

SYSTEM = {"role": "system", "content": "s"}
ASKED, SAID = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CHAT = {"messages": [ASKED, SAID]}
CALL = '{"name": "f", "arguments": {}}'
TEXTS, PAIR = {"prompt": "a", "completion": "b"}, {"prompt": "a", "chosen": "b", "rejected": "c"}
TALKS = {"chosen": [ASKED, SAID], "rejected": [ASKED, {**SAID, "content": "c"}]}


@pytest.mark.advice(
    "so there is nothing to learn from; add one",
    "write one object with",
    "but this task trains on all of",
    "but only answers are trained on; delete",
)
@pytest.mark.promise("bad-row", "data-shapes")
@pytest.mark.parametrize(
    ("task", "found", "advice", "fixed"),
    [
        ("sft", [1], "is [1]; write one object with `messages`", {"text": "a"}),
        ("sft", {"prompt": [ASKED], "completion": "b"}, "write two lists or two strings", TEXTS),
        ("sft", {"messages": [{**ASKED, "train": True}, SAID]}, "only answers are trained on; delete `train`", CHAT),
        ("sft", {"messages": [{**ASKED, "content": [{"type": "text"}]}, SAID]}, "must be one string", CHAT),
        ("sft", {**CHAT, "images": []}, "delete the column or the row", CHAT),
        ("sft", {"messages": [ASKED]}, "add one, or set task.loss_on=everything", CHAT),
        ("sft", {"messages": [ASKED, {**SAID, "train": False}]}, "delete the row", CHAT),
        ("sft", {"system": "s", "messages": [SYSTEM, ASKED, SAID]}, "delete one of them", {"system": "s", **CHAT}),
        ("sft", {**TEXTS, "label": True}, "choose task=kto, or delete `label`", TEXTS),
        (
            "sft",
            {"messages": [ASKED, SAID, ASKED, {**SAID, "weight": 0}]},
            "then a row trains its last message only; write a row that ends at each answer",
            {"messages": [ASKED, {**SAID, "weight": 0}, ASKED, SAID]},
        ),
        (
            "sft",
            {"prompt": [ASKED], "completion": [{**SAID, "weight": 0}]},
            "delete `weight` or the row",
            TEXTS,
        ),
        (
            "sft",
            {"conversations": [ASKED, SAID, {"from": "function_call", "value": "f()"}]},
            "write JSON with `name` and `arguments`",
            {"conversations": [ASKED, SAID, {"from": "function_call", "value": CALL}]},
        ),
        (
            "sft",
            {"instruction": "a", "output": "b", "history": ["c"]},
            "write [[question, answer], …]",
            {"instruction": "a", "output": "b", "history": [["c", "d"]]},
        ),
        ("sft", {"messages": [ASKED, {**SAID, "weight": 0.5}]}, "must be the number 0 or 1", CHAT),
        ("sft", {"messages": [ASKED, {**SAID, "weight": "0"}]}, "must be the number 0 or 1", CHAT),
        ("sft", {"messages": "hello"}, 'has "hello" in `messages`, which must be a list', CHAT),
        ("sft", {"messages": []}, "has [] in `messages`, which must be a list of one or more messages", CHAT),
        ("sft", {"messages": ["hello"]}, 'has "hello" as message 1 of `messages`, which must be an object', CHAT),
        ("sft", {"messages": [{"content": "a"}]}, "has null as `role` of message 1", CHAT),
        ("sft", {"messages": [{**ASKED, "role": ["user"]}]}, 'has ["user"] as `role`', CHAT),
        ("sft", {"conversations": [{"from": "bing", "value": "a"}]}, 'has "bing" as `role`', CHAT),
        ("sft", {"conversations": [{"from": "human"}]}, "has null in `content` of message 1", CHAT),
        ("sft", {"messages": [ASKED, {**SAID, "tool_calls": 1}]}, "has 1 as `tool_calls`", CHAT),
        ("sft", {**CHAT, "tools": "{"}, 'has "{" in `tools`, which must be a list of objects', {**CHAT, "tools": "[]"}),
        ("sft", {"prompt": " ", "completion": "a"}, 'has " " in `prompt`, which must be one string that', TEXTS),
        ("sft", {}, "has no columns, and task=sft needs", CHAT),
        ("sft", {"question": "a", "id": 3}, "has `question`, `id`, and task=sft needs", CHAT),
        ("pretrain", CHAT, "; add the missing columns, or choose task=", {"text": "a"}),
        ("pretrain", {"text": True}, "has true in `text`", {"text": "a"}),
        ("dpo", {"prompt": "a", "chosen": "b"}, "task=dpo needs `prompt` and `chosen` and `rejected`, or", PAIR),
        (
            "dpo",
            {"prompt": "a", "chosen": [SAID], "rejected": [SAID]},
            "write it as the first message of both",
            {"prompt": "a", **TALKS},
        ),
        ("dpo", {**TALKS, "rejected": [SAID]}, "begin with different messages; write a `prompt`", TALKS),
        ("reward", {"chosen": [SAID], "rejected": [ASKED]}, "has no assistant message in `rejected`", TALKS),
        ("reward", {**PAIR, "margin": "x"}, 'has "x" in `margin`, which must be a number', {**PAIR, "margin": "1.5"}),
        ("kto", {**TEXTS, "label": 1}, "has 1 in `label`, which must be true or false", {**TEXTS, "label": "False"}),
    ],
)
def test_rows_that_are_corrected_are_read(task, found, advice, fixed):
    """Fails if a mistake does not name the key and what was there, or what is advised is refused too."""
    with pytest.raises(rows.Mistake, match=re.escape(advice)):
        rows.read(found, task)
    rows.read(fixed, task)
    if "or set task.loss_on=everything" in advice:
        rows.read(found, task, everything=True)


@pytest.mark.promise("marks")
def test_with_the_loss_on_everything_no_mark_leaves_anything_out():
    with pytest.raises(rows.Mistake, match=r"`train` false in message 1 .* trains on all of `messages`"):
        rows.read({"messages": [{**ASKED, "train": False}, SAID]}, "sft", everything=True)


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
