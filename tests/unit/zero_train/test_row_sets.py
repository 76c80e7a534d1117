"""Rows become datasets, split, mixed and kept by `datasets`, or are refused with every mistake."""

import json

import pytest

pytest.importorskip("datasets")

import torch

from zero_train.data import row_sets
from zero_train.errors import ConfigError
from zero_train.settings import compose


def chat(number, **more):
    asked, answered = {"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": "answer"}
    return {"messages": [asked, answered], **more}


def lines(path, found):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in found))
    return path


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


def load(*words, task="sft"):
    return row_sets.load(compose.compose([f"task={task}", "model=hf", "model.path=x", "run.dir=run", *words]))


def asked(dataset):
    return [row["messages"][0]["content"] for row in dataset]


@pytest.mark.promise("file-of-mistakes")
def test_every_mistake_is_counted_and_ten_are_listed(tmp_path):
    """Fails if a mistake hides those behind it, or a file with a mistake is taken in part."""
    found = [chat(0), {"messages": [{"role": "bot", "content": "a"}]}, *([{"id": 1}] * 10), {"text": "a"}, chat(1)]
    path = lines(tmp_path / "a.jsonl", found)
    with pytest.raises(ConfigError) as caught:
        load(f"data.path={path}")
    first, *listed, last = str(caught.value).splitlines()
    assert first == f"data.path={path} has 12 mistakes; nothing is trained:"
    assert len(listed) == 10 and listed[0].startswith(f'  {path}, line 2 has "bot" as `role` of message 1 of')
    assert listed[9].startswith(f"  {path}, line 11 has `id`, and task=sft needs") and last == "  and 2 more"


@pytest.mark.promise("row-formats")
def test_every_format_gives_the_same_rows(tmp_path):
    """Fails if a message gains a key, or a value changes on its way through a format."""
    from datasets import Dataset

    found = [chat(n) for n in range(4)]
    found[1]["messages"][1] |= {"content": "2024-05-01", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    lines(tmp_path / "a.jsonl", found)
    (tmp_path / "b.json").write_text(json.dumps(found))
    cells = (json.dumps(row["messages"]).replace('"', '""') for row in found)
    (tmp_path / "c.csv").write_text("messages\n" + "".join(f'"{cell}"\n' for cell in cells))
    kept = Dataset.from_generator(lambda: iter(found))
    kept.save_to_disk(tmp_path / "saved")
    for name in ("a.jsonl", "b.json", "c.csv", "saved"):
        read = load(f"data.path={tmp_path / name}", "data.validation_fraction=0")
        wanted = found if name != "saved" else [{"messages": [dict(m) for m in row["messages"]]} for row in kept]
        told = [[{k: v for k, v in m.items() if v is not None} for m in row["messages"]] for row in wanted]
        assert [row["messages"] for row in read.training] == told
        assert read.kind == ("messages",) and read.of_messages
        assert "4 rows of `messages` (lists of messages) to train on, 0 held out" in read.name


@pytest.mark.promise("split")
def test_each_side_has_a_row_and_is_the_same_in_every_run(tmp_path):
    path = lines(tmp_path / "a.jsonl", [chat(n, id=n) for n in range(50)])
    one, again = (load(f"data.path={path}", "data.validation_fraction=0.1") for _ in range(2))
    assert len(one.validation) == 5 and not set(asked(one.validation)) & set(asked(one.training))
    assert asked(one.training) == asked(again.training) and one.digest == again.digest
    assert one.remarks == ("data.path: columns that are not read: `id`",)
    lines(path, [chat(n) for n in range(2)])
    for fraction in ("0.01", "0.99"):
        read = load(f"data.path={path}", f"data.validation_fraction={fraction}")
        assert len(read.training) == len(read.validation) == 1 and read.digest != one.digest


@pytest.mark.promise("split")
def test_the_same_bytes_are_converted_once(tmp_path, monkeypatch):
    """Fails if each start reads all rows again, or a file with other bytes of the same length is not read."""
    path = lines(tmp_path / "a.jsonl", [chat(n) for n in range(5)])
    given, seen, read = ("data.validation_fraction=0", f"data.path={path}"), [], row_sets.rows.read
    monkeypatch.setattr(row_sets.rows, "read", lambda found, *how: seen.append(found) or read(found, *how))
    first, count = load(*given), len(seen)
    again = load(*given)
    assert len(seen) == count + 1 and asked(again.training) == asked(first.training)  # its kind
    lines(path, [chat(n) for n in (0, 1, 2, 3, 9)])
    assert asked(load(*given).training)[-1] == "question 9"


@pytest.mark.promise("epochs-mixture")
def test_sets_have_their_shares_and_none_is_left_out(tmp_path):
    """Fails if a set is cut short, weights are not followed, or the order depends on more than the seed."""
    one = lines(tmp_path / "a.jsonl", [chat(f"a{n}") for n in range(90)])
    other = lines(tmp_path / "b.jsonl", [chat(f"b{n}") for n in range(30)])
    sources = "data.sources=[{{path: {}, weight: {}}}, {{path: {}, weight: 1}}]".format
    given = ("data=mixture", "data.validation_fraction=0", sources(one, 3, other))
    found = asked(load(*given).training)
    other_seed = asked(load(*given, "run.seed=1").training)
    assert len(set(found)) == 120 and found == asked(load(*given).training) != other_seed
    assert 0.6 < sum("a" in text.split()[1] for text in found) / len(found) < 0.9
    together = load("data=mixture", f"data.sources=[{{path: {one}}}, {{path: {other}, validation_fraction: 0.5}}]")
    assert len(together.training) == 86 + 15 and len(together.validation) == 4 + 15


@pytest.mark.promise("epochs-mixture")
def test_the_order_is_accelerates_pass_after_pass():
    pytest.importorskip("trl")
    from zero_train.tune.trainers import Order

    wanted = [torch.randperm(7, generator=torch.Generator().manual_seed(3 + turn)).tolist() for turn in range(3)]
    assert list(Order(7, 3, 21)) == sum(wanted, []) and list(Order(7, 3, 9)) == sum(wanted, [])[:9]
    assert list(Order(3, None, 7)) == [0, 1, 2, 0, 1, 2, 0] and len(Order(3, None, 7)) == 7


@pytest.mark.promise("row-formats")
def test_a_number_that_datasets_would_round_is_told(tmp_path):
    """Fails if a call's argument is another number in what is learned, as `datasets` keeps JSON with 10 digits."""

    def loaded(given):
        row = chat(0)
        row["messages"][1]["tool_calls"] = [{"function": {"name": "f", "arguments": {"x": given}}}]
        return load(f"data.path={lines(tmp_path / 'a.jsonl', [row])}", "data.validation_fraction=0").training[0]

    with pytest.raises(ConfigError, match=r"line 1 has a number that `datasets` rounds, .*; quote that number"):
        loaded(0.12345678901234566)
    read = loaded("0.12345678901234566")["messages"]
    assert read[1]["tool_calls"][0]["function"]["arguments"] == {"x": "0.12345678901234566"}
