"""Advice of zero-train about text and rows that is followed: each test makes a mistake and does what is said."""

import gzip
import importlib.util
import io
import json
import re
import zipfile

import pytest

pytest.importorskip("transformers")

from zero_train import cached, conversations, data, row_files, rows
from zero_train.errors import ConfigError
from zero_train.schema import DataConfig

SYSTEM = {"role": "system", "content": "s"}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


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


@pytest.mark.parametrize(
    ("content", "advice", "fixed"),
    [
        (b'{"a": 1}\n\n{"a": 2}\n', "is empty; delete it", b'{"a": 1}\n{"a": 2}\n'),
        (b'{"a": "\xe9"}\n', "save it as UTF-8", b'{"a": "\xc3\xa9"}\n'),
    ],
)
def test_lines_that_are_corrected_are_read(tmp_path, content, advice, fixed):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    assert any(advice in str(row) for _, row in row_files.jsonl(path))
    path.write_bytes(fixed)
    assert all(isinstance(row, dict) for _, row in row_files.jsonl(path))


def test_empty_lines_of_a_csv_file_are_deleted_and_a_pattern_goes_with_a_folder(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text\na\n\nb\n")
    assert any("is empty; delete it" in str(row) for _, row in row_files.csv_rows(path))
    path.write_text("text\na\nb\n")
    assert [row for _, row in row_files.csv_rows(path)] == [{"text": "a"}, {"text": "b"}]
    with pytest.raises(ConfigError, match="chooses nothing; leave one out"):
        row_files.found("data.path", str(path), "csv", "a*")
    assert row_files.found("data.path", str(path), "csv", "*") == [path]
    assert row_files.found("data.path", str(tmp_path), "csv", "a*") == [path]


@pytest.mark.parametrize(
    ("found", "advice", "fixed"),
    [
        ("a", "write one object with", {"text": "a"}),
        ({"prompt": CHAT["messages"][:1], "completion": "b"}, "write both alike", {"prompt": "a", "completion": "b"}),
        ({"text": "a\ud800"}, "which is no character; remove it", {"text": "a"}),
        (
            {"messages": [*CHAT["messages"], CHAT["messages"][0], {**CHAT["messages"][1], "weight": 0}]},
            "every answer is learned from; end the conversation before it",
            {"messages": [*CHAT["messages"], CHAT["messages"][0]]},
        ),
        (
            {"messages": [CHAT["messages"][0], {**CHAT["messages"][1], "train": False}]},
            "or remove `train` to learn from it",
            CHAT,
        ),
        (
            {"prompt": [CHAT["messages"][0], SYSTEM], "completion": CHAT["messages"][1:]},
            "end it with the user's",
            {"prompt": [SYSTEM, CHAT["messages"][0]], "completion": CHAT["messages"][1:]},
        ),
    ],
)
def test_rows_that_are_corrected_are_read(found, advice, fixed):
    with pytest.raises(rows.Mistake, match=advice):
        rows.read(found, "sft")
    rows.read(fixed, "sft")


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
        ({"kind": "datasets"}, "choose another data", [{"kind": "jsonl"}]),
        ({"kind": "datasets", "path": "splits"}, "name one, such as", [{"kind": "datasets", "path": "splits/train"}]),
        (
            {"kind": "datasets", "path": "someone/rows"},
            "name a folder that Dataset.save_to_disk wrote",
            [{"kind": "datasets", "path": "splits/train"}],
        ),
        ({"path": "table"}, "choose data=parquet", [{"kind": "parquet", "path": "table"}]),
        ({"path": "folder", "pattern": "*.jsonl"}, "change data.pattern", [{"path": "folder", "pattern": "*.json"}]),
        ({"path": "nowhere/rows"}, "change data.path", [{}]),
        ({"path": "zzzzzzzzzzzz"}, "change data.path", [{}]),
        ({"path": "/proc/self/mem"}, "cannot be read: .*; change data.path", [{}]),
    ],
)
def test_rows_that_an_error_asks_for_are_converted(monkeypatch, tmp_path, given, advice, ways):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    monkeypatch.chdir(tmp_path)
    chats = [{**CHAT, "id": number} for number in range(2)]
    found = {"two": chats, "other": [*chats, CHAT], "texts": [{"text": "a"}] * 2, "one": [CHAT], "none": []}
    for name, written in {**found, "mixed": [CHAT, {"text": "a"}]}.items():
        lines(tmp_path / name, *written)
    part = datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}])
    datasets.DatasetDict(train=part, test=part).save_to_disk("splits")
    part.to_parquet("table")
    (tmp_path / "folder").mkdir()
    lines(tmp_path / "folder" / "rows.json", *chats)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: 1 / 0)  # no hub
    base = {"kind": "jsonl", "path": "two", "validation_fraction": 0.5}
    with pytest.raises(ConfigError, match=advice):
        conversations.load(DataConfig(**base | given), "sft", tmp_path / "cache")
    for way in ways:
        conversations.load(DataConfig(**base | way), "sft", tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_another_folder(monkeypatch, tmp_path):
    pytest.importorskip("datasets")
    given = DataConfig(kind="jsonl", path=lines(tmp_path / "a", CHAT, CHAT), validation_fraction=0)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="make room, or name a folder with more by XDG_CACHE_HOME"):
        conversations.load(given, "sft", cached.folder())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    conversations.load(given, "sft", cached.folder())


def test_rows_are_read_when_datasets_is_installed(monkeypatch, tmp_path):
    pytest.importorskip("datasets")
    given = DataConfig(kind="jsonl", path=lines(tmp_path / "a", CHAT, CHAT), validation_fraction=0)
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=re.escape("pip install 'zero-train[finetune]'")):
            conversations.load(given, "sft", tmp_path / "cache")
    conversations.load(given, "sft", tmp_path / "cache")


def zipped(content):
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        archive.writestr("a.jsonl", content)
    return held.getvalue()


@pytest.mark.parametrize(
    ("packed", "advice"),
    [
        (gzip.compress, "is compressed by gzip; unpack it first"),
        (lambda content: b"\x28\xb5\x2f\xfd" + content, "is compressed by zstd; unpack it first"),
        (zipped, "is a zip; unpack it first"),
    ],
)
def test_a_compressed_file_is_unpacked(tmp_path, packed, advice):
    path, content = tmp_path / "a.jsonl", b'{"text": "a"}\n'
    path.write_bytes(packed(content))
    assert [str(row) for _, row in row_files.jsonl(path)] == [advice]
    path.write_bytes(content)
    assert [row for _, row in row_files.jsonl(path)] == [{"text": "a"}]


def test_a_row_that_is_too_long_is_split(monkeypatch, tmp_path):
    monkeypatch.setattr(row_files, "LINE_LIMIT", 30)
    path = lines(tmp_path / "a.jsonl", {"text": "a" * 40})
    assert any("split the row" in str(row) for _, row in row_files.jsonl(tmp_path / "a.jsonl"))
    path = lines(tmp_path / "a.jsonl", {"text": "a" * 15}, {"text": "a" * 15})
    assert all(isinstance(row, dict) for _, row in row_files.jsonl(tmp_path / "a.jsonl")), path
