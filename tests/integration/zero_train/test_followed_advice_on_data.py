"""Advice of zero-train about text and rows that is followed: each test makes a mistake and does what is said."""

import importlib.util
import json
import re

import pytest

pytest.importorskip("transformers")

from zero_train import config, data, row_files, row_sets, rows
from zero_train.errors import ConfigError
from zero_train.schema import DataConfig

SYSTEM = {"role": "system", "content": "s"}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


CALL = '{"name": "f", "arguments": {}}'


def lines(path, *found):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in found))
    return str(path)


@pytest.mark.parametrize(
    ("given", "advice", "ways"),
    [
        ({"kind": "jsonl"}, "data=text, stdlib or synthetic", [{"kind": "text"}, {"kind": "synthetic"}]),
        ({"sequence_length": 500}, "or lower data.sequence_length", [{"sequence_length": 4}, {"path": "long.txt"}]),
        ({"pattern": "*.txt"}, "chooses nothing; leave one out", [{}, {"path": ".", "pattern": "*.txt"}]),
        ({"path": "zeros"}, "name a text file", [{}]),
        ({"path": "nowhere"}, "name text that exists with data.path", [{}]),
        ({"path": "odd"}, "change data.path or data.pattern", [{"path": "odd", "pattern": "*.txt"}, {}]),
        ({"path": ".", "pattern": "*.c"}, "change data.path or data.pattern", [{"path": "."}, {}]),
    ],
)
def test_text_that_an_error_asks_for_is_read(monkeypatch, tmp_path, given, advice, ways):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text " * 40)
    (tmp_path / "long.txt").write_text("some text " * 4000)
    (tmp_path / "zeros").write_bytes(bytes(1000))
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "a.txt").write_text("some text " * 40)
    if given.get("path") == "odd":
        (tmp_path / "odd" / "unreadable").symlink_to("/proc/self/mem")
    base = {"kind": "text", "path": "a.txt", "sequence_length": 4, "validation_fraction": 0.2}
    with pytest.raises(ConfigError, match=re.escape(advice)):
        data.load(DataConfig(**base | given), 0)
    for way in ways:
        length = {"sequence_length": given["sequence_length"]} if "path" in way and "sequence_length" in given else {}
        data.load(DataConfig(**base | length | way), 0)


def read(path):
    return [row for _, row in row_files.places("data.path", str(path), "jsonl", [path])]


@pytest.mark.parametrize(
    ("name", "content", "advice", "fixed"),
    [
        ("a.jsonl", b'{"a": "\xe9"}\n', "save it as UTF-8", b'{"a": "\xc3\xa9"}\n'),
        ("a.csv", b"a\n\xe9\n", "save it as UTF-8", b"a\n\xc3\xa9\n"),
        ("a.jsonl", b'{"a": "\\ud800"}\n', "which is no character; remove it", b'{"a": ""}\n'),
        ("a.jsonl", b'{\n"a": 1\n}\n', "write one whole object a line, or one array", b'[{\n"a": 1\n}]\n'),
        ("a.jsonl", b'{\n"a": 1\n}\n', "write one whole object a line, or one array", b'{"a": 1}\n'),
        ("a.jsonl.gz", b"\x1f\x8b\x08", "name a whole file", b'{"a": 1}\n'),
    ],
)
def test_lines_that_are_corrected_are_read(tmp_path, name, content, advice, fixed):
    path = tmp_path / name
    path.write_bytes(content)
    assert any(advice in str(row) for row in read(path))
    path.write_bytes(fixed)
    assert [type(row) for row in read(path)] == [dict]


def test_a_pattern_goes_with_a_folder(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text\na\n")
    with pytest.raises(ConfigError, match="chooses nothing; leave one out"):
        row_files.found("data.path", str(path), "a*")
    assert row_files.found("data.path", str(path), "*") == [path]
    assert row_files.found("data.path", str(tmp_path), "a*") == [path]


@pytest.mark.parametrize(
    ("found", "advice", "fixed"),
    [
        ("a", "write one object with", {"text": "a"}),
        ({"prompt": CHAT["messages"][:1], "completion": "b"}, "write both alike", {"prompt": "a", "completion": "b"}),
        ({"messages": [{**CHAT["messages"][0], "train": True}, CHAT["messages"][1]]}, "delete `train` there", CHAT),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, CHAT["messages"][1]]},
            "write it as one text",
            CHAT,
        ),
        ({**CHAT, "images": []}, "delete the column or the row", CHAT),
        ({"messages": CHAT["messages"][:1]}, "add one, or set task.loss_on=everything", CHAT),
        ({"messages": [CHAT["messages"][0], {**CHAT["messages"][1], "train": False}]}, "delete the row", CHAT),
        ({"system": "s", "messages": [SYSTEM, *CHAT["messages"]]}, "delete one of them", {"system": "s", **CHAT}),
        ({"prompt": "a", "completion": "b", "label": True}, "or delete `label`", {"prompt": "a", "completion": "b"}),
        (
            {"messages": [*CHAT["messages"], CHAT["messages"][0], {**CHAT["messages"][1], "weight": 0}]},
            "write a row for each answer",
            CHAT,
        ),
        (
            {"prompt": CHAT["messages"][:1], "completion": [{**CHAT["messages"][1], "weight": 0}]},
            "delete `weight` there, or the row",
            {"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]},
        ),
        (
            {"conversations": [*CHAT["messages"], {"from": "function_call", "value": "f()"}]},
            "write JSON with `name` and `arguments`",
            {
                "conversations": [
                    *CHAT["messages"],
                    {"from": "function_call", "value": CALL},
                ]
            },
        ),
        (
            {"instruction": "a", "output": "b", "history": ["c"]},
            "write [[question, answer], …]",
            {"instruction": "a", "output": "b", "history": [["c", "d"]]},
        ),
    ],
)
def test_rows_that_are_corrected_are_read(found, advice, fixed):
    with pytest.raises(rows.Mistake, match=re.escape(advice)):
        rows.read(found, "sft")
    rows.read(fixed, "sft")
    if "or set task.loss_on=everything" in advice:
        rows.read(found, "sft", everything=True)


def loaded(task="sft", **values):
    composed = config.compose([f"task={task}", "model=hf", "model.path=x", f"data={values['kind']}", "run.dir=run"])
    composed.data = DataConfig(**values)
    return row_sets.load(composed)


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.mark.parametrize(
    ("given", "advice", "ways"),
    [
        ({"path": None}, "name what to train on with data.path=…", [{}]),
        ({"validation_path": "two"}, "name other rows, or leave it out", [{"validation_path": "other"}, {}]),
        ({"validation_path": "texts"}, "write both alike", [{"validation_path": "other"}]),
        ({"path": "mixed"}, "write all rows alike", [{}]),
        ({"path": "none"}, "write at least one, or change data.path", [{}]),
        (
            {"path": "one"},
            "write more, or set data.validation_fraction=0",
            [{}, {"path": "one", "validation_fraction": 0}],
        ),
        ({"path": "splits"}, "name one: data.path=splits/test or data.path=splits/train", [{"path": "splits/train"}]),
        ({"path": "someone/rows"}, "name files of rows", [{}]),
        ({"path": "folder", "pattern": "*.jsonl"}, "change data.pattern", [{"path": "folder", "pattern": "*.json"}]),
        ({"path": "./nowhere/rows"}, "change data.path", [{}]),
        ({"path": "zzzzzzzzzzzz.json"}, "change data.path", [{}]),
    ],
)
def test_rows_that_an_error_asks_for_are_converted(monkeypatch, tmp_path, given, advice, ways):
    import datasets

    monkeypatch.chdir(tmp_path)
    chats = [{**CHAT, "id": number} for number in range(2)]
    found = {"two": chats, "other": [*chats, CHAT], "texts": [{"text": "a"}] * 2, "one": [CHAT], "none": []}
    for name, written in {**found, "mixed": [CHAT, {"text": "a"}]}.items():
        lines(tmp_path / name, *written)
    part = datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}])
    datasets.DatasetDict(train=part, test=part).save_to_disk("splits")
    (tmp_path / "folder").mkdir()
    lines(tmp_path / "folder" / "rows.json", *chats)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: 1 / 0)  # no hub
    base = {"kind": "jsonl", "path": "two", "validation_fraction": 0.5}
    with pytest.raises(ConfigError, match=advice):
        loaded(**base | given)
    for way in ways:
        loaded(**base | way)


def test_rows_that_find_no_room_go_to_the_folder_that_is_named(monkeypatch, tmp_path):
    given = {"kind": "jsonl", "path": lines(tmp_path / "a", CHAT, CHAT), "validation_fraction": 0}
    (tmp_path / "file").touch()
    with monkeypatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "file")
        with pytest.raises(ConfigError, match="make room, or name a folder with more by HF_HOME"):
            loaded(**given)
    loaded(**given)


def test_rows_are_read_when_datasets_is_installed(monkeypatch, tmp_path):
    given = {"kind": "jsonl", "path": lines(tmp_path / "a", CHAT, CHAT), "validation_fraction": 0}
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=re.escape("pip install 'zero-train[finetune]'")):
            loaded(**given)
    loaded(**given)
