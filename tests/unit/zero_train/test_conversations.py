"""Rows are checked, split and converted once, or refused with every mistake. Conversions need `datasets`."""

import importlib.util
import json
import os
import signal
import subprocess
import sys

import pytest

from zero_train import conversations, row_files
from zero_train.errors import ConfigError
from zero_train.schema import DataConfig


def chat(number, **more):
    asked, answered = {"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": "answer"}
    return {"messages": [asked, answered], **more}


def written(path, text):
    path.write_text(text)
    return path


def lines(path, rows):
    return written(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def checked(path, task="sft"):
    places = ((f"{path.name}, {place}", row) for place, row in row_files.jsonl(path))
    return list(conversations.check("data.path", path.name, places, task))


def test_every_mistake_is_counted_and_ten_are_listed(tmp_path):
    """Fails if a mistake hides those behind it, or a file with a mistake is taken in part."""
    rows = [chat(0), {"messages": [{"role": "bot", "content": "a"}]}, *([{"id": 1}] * 10), {"text": "a"}, chat(1)]
    with pytest.raises(ConfigError) as caught:
        checked(lines(tmp_path / "a.jsonl", rows))
    first, *listed, last = str(caught.value).splitlines()
    assert first == "data.path=a.jsonl has 12 mistakes, so nothing is trained:"
    assert len(listed) == 10 and listed[0].startswith("  a.jsonl, line 2 has a text ('bot') as `role` of message 1 of")
    assert listed[9].startswith("  a.jsonl, line 11 has only `id`") and last == "  and 2 more"
    with pytest.raises(
        ConfigError, match="a.jsonl has 1 mistake, so nothing is trained:\n  a.jsonl, line 1 is not JSON"
    ):
        checked(written(tmp_path / "a.jsonl", "{"))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            [chat(0), {"text": "a"}],
            "line 2 has `text` as texts, and a.jsonl, line 1 has `messages` as lists of messages",
        ),
        (
            [{"prompt": "a", "completion": "b"}, {"instruction": "a", "output": "b"}],
            "line 2 has `prompt` and `completion` as lists of messages, and a.jsonl, line 1 has `prompt` and "
            "`completion` as texts; write all rows alike",
        ),
    ],
)
def test_a_file_has_rows_of_one_kind(tmp_path, rows, words):
    with pytest.raises(ConfigError) as caught:
        checked(lines(tmp_path / "a.jsonl", rows))
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_a_file_without_a_row_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match="a.jsonl has no row; write at least one"):
        checked(written(tmp_path / "a.jsonl", text))


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"data=jsonl needs datasets, .* pip install 'zero-train\[finetune\]'"):
        conversations.load(DataConfig(kind="jsonl", path="a.jsonl"), "sft", tmp_path)


@pytest.fixture
def load(tmp_path):
    """Returns a function that loads what it is given, by default with a tenth held out."""
    pytest.importorskip("datasets")

    def loaded(path, task="sft", kind="jsonl", **values):
        pattern = row_files.PATTERNS.get(kind, "*")
        config = DataConfig(kind=kind, path=str(path), pattern=pattern, **{"validation_fraction": 0.1, **values})
        return conversations.load(config, task, tmp_path / "cache", said.append)

    said: list[str] = []
    loaded.said = said

    return loaded


def held_out(rows):
    return {row["messages"][0]["content"] for row in rows.validation or ()}


def learned(rows):
    return [row["messages"][0]["content"] for row in rows.training]


def test_rows_are_split_and_said(tmp_path, load):
    rows = load(lines(tmp_path / "a.jsonl", [chat(n, id=n) for n in range(200)]))
    assert rows.kind == "messages" and rows.training.column_names == ["messages", "tools"]
    assert 5 < len(rows.validation) < 40 and len(rows.training) + len(rows.validation) == 200
    assert not held_out(rows) & set(learned(rows))
    assert learned(rows) == sorted(learned(rows), key=lambda text: int(text.split()[1]))  # the file's order
    assert rows.training[0]["messages"][1] == {"role": "assistant", "content": "answer"}
    assert rows.remarks == ("data.path: columns that are not read: `id`",)
    assert f"{len(rows.training)} rows of messages to train on, {len(rows.validation)} held out" in rows.name


def test_rows_that_are_appended_move_no_other(tmp_path, load):
    few = load(lines(tmp_path / "a.jsonl", [chat(n) for n in range(100)]))
    more = load(lines(tmp_path / "a.jsonl", [chat(n) for n in range(200)]))
    assert held_out(few) < held_out(more) and set(learned(few)) < set(learned(more))
    assert few.digest() != more.digest()


@pytest.mark.parametrize(("fraction", "expected"), [(1e-9, [4, 1]), (1 - 1e-9, [1, 4]), (0, [5, 0])])
def test_each_side_has_a_row(tmp_path, load, fraction, expected):
    rows = load(lines(tmp_path / "a.jsonl", [chat(n) for n in range(5)]), validation_fraction=fraction)
    assert [len(rows.training), len(rows.validation or ())] == expected
    assert sorted([*learned(rows), *held_out(rows)]) == [f"question {n}" for n in range(5)]
    assert (rows.validation is None) == (fraction == 0)


@pytest.mark.parametrize("count", range(2, 8))
def test_the_row_that_changes_sides_may_be_any(tmp_path, load, count):
    """Fails if a file is refused because its last row is the one that is held out."""
    rows = load(lines(tmp_path / "a.jsonl", [chat(n) for n in range(count)]), validation_fraction=1e-9)
    assert sorted([*learned(rows), *held_out(rows)]) == [f"question {n}" for n in range(count)]


def test_one_row_leaves_none_to_hold_out(tmp_path, load):
    path = lines(tmp_path / "a.jsonl", [chat(0)])
    with pytest.raises(ConfigError, match="has 1 row, which leaves none for validation; .*data.validation_fraction=0"):
        load(path)
    assert len(load(path, validation_fraction=0).training) == 1


def test_one_row_of_a_set_is_refused_with_the_key_of_its_entry(tmp_path):
    pytest.importorskip("datasets")
    path = lines(tmp_path / "a.jsonl", [chat(0)])
    with pytest.raises(ConfigError, match=r"has 1 row, .* set validation_fraction: 0 in data\.sources\[1\]$"):
        conversations.load(
            DataConfig("jsonl", path=str(path), validation_fraction=0.5),
            "sft",
            tmp_path / "cache",
            key="data.sources[1].path",
        )


def test_a_second_file_is_held_out(tmp_path, load):
    path, other = (lines(tmp_path / name, [chat(n) for n in numbers]) for name, numbers in (("a", (0, 1)), ("b", (2,))))
    rows = load(path, validation_path=str(other))
    assert learned(rows) == ["question 0", "question 1"] and held_out(rows) == {"question 2"}
    assert "1 rows" in rows.digest() and rows.digest() != load(path, validation_fraction=0).digest()
    with pytest.raises(ConfigError, match="data.validation_path=.* is data.path too"):
        load(path, validation_path=str(path))
    with pytest.raises(ConfigError, match="data.validation_path=.* has rows of text, and data.path=.* of messages"):
        load(path, validation_path=str(lines(tmp_path / "c", [{"text": "a"}])))


def test_a_folder_has_its_files_in_order(tmp_path, load):
    (tmp_path / "data" / "deeper").mkdir(parents=True)
    lines(tmp_path / "data" / "b.jsonl", [chat(0)])
    lines(tmp_path / "data" / "deeper" / "a.jsonl", [chat(1)])
    (tmp_path / "data" / "notes.txt").write_text("no row")
    assert learned(load(tmp_path / "data", validation_fraction=0)) == ["question 0", "question 1"]
    lines(tmp_path / "data" / "deeper" / "a.jsonl", [{"messages": []}])
    with pytest.raises(ConfigError, match=r"deeper/a.jsonl, line 1 has an empty list"):
        load(tmp_path / "data")


def test_every_format_gives_the_same_rows(tmp_path, load):
    """Fails if a null of parquet or of `datasets` becomes a key of a message."""
    import pyarrow
    import pyarrow.parquet
    from datasets import Dataset

    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    rows = [chat(0, id=1), {"messages": [*chat(1)["messages"], call], "id": 2}]
    expected = load(lines(tmp_path / "a.jsonl", rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    cells = [json.dumps(row["messages"]).replace('"', '""') for row in rows]
    (tmp_path / "a.csv").write_text("messages,id\n" + "".join(f'"{cell}",1\n' for cell in cells))
    for path, kind in (("a.parquet", "parquet"), ("a.csv", "csv"), ("saved", "datasets")):
        found = load(tmp_path / path, kind=kind)
        assert (found.digest(), found.remarks) == (expected.digest(), expected.remarks), kind


def test_datasets_are_folders_of_save_to_disk(tmp_path, load):
    from datasets import Dataset, DatasetDict

    DatasetDict(train=Dataset.from_list([chat(0)]), test=Dataset.from_list([chat(1)])).save_to_disk(str(tmp_path / "a"))
    (tmp_path / "b").mkdir()
    with pytest.raises(
        ConfigError, match=f"has the splits train, test; name one, such as data.path={tmp_path}/a/train"
    ):
        load(tmp_path / "a", kind="datasets")
    assert (
        len(load(tmp_path / "a" / "train", kind="datasets", validation_path=str(tmp_path / "a" / "test")).training) == 1
    )
    with pytest.raises(ConfigError, match="is no folder that Dataset.save_to_disk wrote"):
        load(tmp_path / "b", kind="datasets")
    with pytest.raises(ConfigError, match="does not exist; did you mean a or b|does not exist; did you mean b or a"):
        load(tmp_path / "ab", kind="datasets")


def test_the_same_bytes_are_converted_once(tmp_path, load, monkeypatch):
    path = lines(tmp_path / "a.jsonl", [chat(n) for n in range(5)])
    first = load(path)
    assert len(load.said) == 1 and f"{path}: checking 0.0 MB" in load.said.pop()
    with monkeypatch.context() as patched:
        patched.setattr(conversations, "check", None)  # which a conversion calls
        path.rename(tmp_path / "b.jsonl")
        again = load(tmp_path / "b.jsonl")
    assert not load.said and again.digest() == first.digest() and learned(again) == learned(first)
    stamp = (tmp_path / "b.jsonl").stat()
    text = (tmp_path / "b.jsonl").read_text()
    (tmp_path / "b.jsonl").write_text(text.replace("question 4", "question 5"))
    os.utime(tmp_path / "b.jsonl", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # the same size and time
    assert load(tmp_path / "b.jsonl").digest() != first.digest()


def test_a_refused_file_leaves_nothing(tmp_path, load):
    path = lines(tmp_path / "a.jsonl", [*(chat(n) for n in range(5)), {}])
    with pytest.raises(ConfigError, match="line 6 has no columns"):
        load(path)
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_file_that_changes_meanwhile_is_refused(tmp_path, load, monkeypatch):
    path = lines(tmp_path / "a.jsonl", [chat(n) for n in range(5)])
    read = row_files.jsonl

    def meanwhile(path):
        yield from read(path)
        path.write_text(path.read_text() + "\n")

    monkeypatch.setitem(row_files.READERS, "jsonl", meanwhile)
    with pytest.raises(ConfigError, match="was written to while it was read; start again"):
        load(path)


def test_a_killed_conversion_is_not_taken_for_complete(tmp_path, load):
    """Fails if what `kill -9` leaves behind is read, or stays on the disk."""
    path = lines(tmp_path / "a.jsonl", [chat(n) for n in range(3000)])
    script = f"""
import os, signal
from pathlib import Path
from zero_train import conversations, row_files
from zero_train.schema import DataConfig
read = row_files.jsonl
def killed(path):
    for number, row in enumerate(read(path)):
        if number == 2500:
            os.kill(os.getpid(), signal.SIGKILL)
        yield row
row_files.READERS["jsonl"] = killed
config = DataConfig(kind="jsonl", path={str(path)!r}, validation_fraction=0.1)
conversations.load(config, "sft", Path({str(tmp_path / "cache")!r}))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    assert [entry.suffix for entry in (tmp_path / "cache").glob("rows-*")] == [".partial"]
    assert len(load(path).training) + len(load(path).validation) == 3000
    assert [entry.suffix for entry in (tmp_path / "cache").glob("rows-*")] == [""]


def test_a_full_disk_is_a_sentence(tmp_path, load):
    (tmp_path / "cache").mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path / "cache"], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("cannot mount a small filesystem here")
    try:
        path = lines(tmp_path / "a.jsonl", [chat(n) for n in range(3000)])
        with pytest.raises(
            ConfigError, match="cannot write the converted rows to .*cache: No space left on device; they"
        ):
            load(path)
        assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [".lock"]
    finally:
        subprocess.run(["umount", tmp_path / "cache"], check=True)
