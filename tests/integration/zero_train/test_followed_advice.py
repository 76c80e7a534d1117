"""Advice of zero-train about text and rows that is followed: each test makes a mistake and does what is said."""

import gzip
import json
import re

import pytest

from tests.following import advised
from zero_train.cli import app
from zero_train.data import row_files, row_sets, rows, text
from zero_train.errors import ConfigError
from zero_train.schema import DataConfig
from zero_train.settings import compose

NO_PART = {"validation_fraction": 0}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def lines(path, *found):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in found))
    return str(path)


@pytest.mark.promise("binary-text")
@pytest.mark.parametrize(
    "row",
    [
        ({"kind": "jsonl"}, "data=text, stdlib or synthetic", {"kind": "text"}, {"kind": "synthetic"}),
        ({"sequence_length": 500}, "or lower data.sequence_length", {"sequence_length": 4}, {"path": "long.txt"}),
        ({"path": "zeros"}, "name a text file", {}),
        ({"path": "late"}, "name a text file", {}),
        ({"path": "nowhere"}, "name text that exists with data.path", {}),
        ({"path": "odd"}, "change data.path or data.pattern", {"path": "odd", "pattern": "*.txt"}, {}),
        ({"path": ".", "pattern": "*.c"}, "change data.path or data.pattern", {"path": "."}, {}),
    ],
)
def test_text_that_an_error_asks_for_is_read(monkeypatch, tmp_path, row):
    given, advice, *ways = row
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd").mkdir()
    for name, times in (("a.txt", 40), ("long.txt", 4000), ("odd/a.txt", 40)):
        (tmp_path / name).write_text("some text " * times)
    (tmp_path / "zeros").write_bytes(bytes(1000))
    (tmp_path / "late").write_bytes(b"x" * 70_000 + b"\0")
    if given.get("path") == "odd":
        (tmp_path / "odd" / "unreadable").symlink_to("/proc/self/mem")
    base = {"kind": "text", "path": "a.txt", "sequence_length": 4, "validation_fraction": 0.2}
    with pytest.raises(ConfigError, match=re.escape(advice)):
        text.load(DataConfig(**base | given), 0)
    for way in ways:
        length = {"sequence_length": given["sequence_length"]} if "path" in way and "sequence_length" in given else {}
        text.load(DataConfig(**base | length | way), 0)


def read(path):
    return [row for _, row in row_files.places("jsonl", [path])]


ZIPPED = gzip.compress(b'{"a": 1}', mtime=0)  # whose bytes, and so the test's name, never change


@pytest.mark.promise("bad-row")
@pytest.mark.parametrize(
    ("name", "content", "place", "advice", "fixed"),
    [
        ("a.jsonl", b'{}\n{\n"a": 1\n}\n', "line 2", "write one whole object a line, or one array", b'[{\n"a": 1\n}]'),
        ("a", b'{}\n{"a": }\n{}', "line 2", "write one whole object a line, or one array", b'{"a": 1}\n'),
        ("a", b"{}\n" + b"[" * 100_000, "line 2", "write one whole object a line, or one array", b'{"a": 1}\n'),
        ("a.json", b'[{"a": 1}', "after its beginning,", "name a whole file", b'[{"a": 1}]'),
        ("a.jsonl.gz", b"\x1f\x8b\x08", "after its beginning,", "name a whole file", ZIPPED),
        ("a.parquet", b"{}\n", "after its beginning,", "name a whole file", None),
        ("a.csv", b"a,b\n1,2,3\n", "row 1 (line 2)", "more or fewer cells than the header has columns", b"a,b\n1,2\n"),
        ("a.csv", b"a,b\n1\n", "row 1 (line 2)", "more or fewer cells than the header has columns", b"a,b\n1,2\n"),
        ("a.csv", b'a,b\n1,2\n4,"5\n6', "after row 1 (line 2),", "name a whole file", b"a,b\n1,2\n"),
        ("a.csv", b'a,b\n1,2\n4,"5"6\n', "after row 1 (line 2),", "name a whole file", b"a,b\n1,2\n"),
    ],
)
def test_lines_that_are_corrected_are_read(tmp_path, name, content, place, advice, fixed):
    """Fails if a mistake is not told with its place, or a corrected file is not read."""
    path = tmp_path / name
    path.write_bytes(content)
    found = {place: str(row) for place, row in row_files.places("jsonl", [path]) if isinstance(row, rows.Mistake)}
    assert advice in found[f"{path}, {place}"]
    if fixed is not None:
        path.write_bytes(fixed)
        assert [type(row) for row in read(path)] == [dict]


@pytest.mark.promise("bad-row")
@pytest.mark.parametrize("written", [b'{"text": "\xe9"}', b'{"text": "\\ud83d"}', b"text\n\xe9"])
def test_half_of_a_character_and_another_encoding_are_told(tmp_path, written):
    path = tmp_path / ("a.csv" if written[:1] == b"t" else "a.jsonl")
    path.write_bytes(written + b"\n")
    (found,) = read(path)
    with pytest.raises(rows.Mistake, match="which is no character; save the file as UTF-8, or remove it"):
        rows.read(found, "sft")
    path.write_bytes(written.replace(b"\xe9", "é".encode()).replace(b"\\ud83d", b"") + b"\n")
    assert [type(row) for row in read(path)] == [dict]


def loaded(task="sft", **values):
    composed = compose.compose([f"task={task}", "model=hf", "model.path=x", f"data={values['kind']}", "run.dir=run"])
    composed.data = DataConfig(**values)
    return row_sets.load(composed)


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.mark.advice(
    "{}={} does not exist; change",
    "write at least one, or change",
    "none is left to validate; add rows",
    "has splits; name one",
)
@pytest.mark.promise("data-shapes", "messages-name-what-exists")
@pytest.mark.parametrize(
    "row",
    [
        ({"path": None}, "name what to train on with data.path=…", {}),
        ({"validation_path": "two"}, "name other rows, or once, with the weight", {"validation_path": "other"}, {}),
        ({"validation_path": "texts"}, "write all rows in one shape", {"validation_path": "other"}),
        ({"path": "mixed"}, "write all rows in one shape", {}),
        ({"path": "none"}, "write at least one, or change data.path", {}),
        ({"path": "one"}, "add rows, or set data.validation_fraction=0", {}, {"path": "one", **NO_PART}),
        ({"path": "splits"}, "name one: data.path=splits/test or data.path=splits/train", {"path": "splits/train"}),
        ({"path": "someone/rows"}, "download it with `hf download --repo-type dataset someone/rows", {}),
        ({"path": "folder", "pattern": "*.jsonl"}, "change data.pattern", {"path": "folder", "pattern": "*.json"}),
        ({"path": "./nowhere/rows"}, "change data.path", {}),
        ({"path": "zzzzzzzzzzzz.json"}, "change data.path", {}),
    ],
)
def test_rows_that_an_error_asks_for_are_converted(monkeypatch, tmp_path, row):
    import datasets

    given, advice, *ways = row
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    chats = [{**CHAT, "id": number} for number in range(2)]
    found = {"two": chats, "other": [*chats, CHAT], "texts": [{"text": "a"}] * 2, "one": [CHAT], "none": []}
    for name, written in {**found, "mixed": [CHAT, {"text": "a"}], "folder/rows.json": chats}.items():
        lines(tmp_path / name, *written)
    part = datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}])
    datasets.DatasetDict(train=part, test=part).save_to_disk("splits")
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


GRPO = "task=grpo data.path=P task.reward=math:floor"


LORA = "data.path=A run.dry=true adapter=lora adapter.dora=true"


CASES = [  # words, advice, and words that it advises in their place
    (
        "data.sources=[{path:A,weight:2},{path:B}]",
        "give each of data.sources a weight, or none of them",
        "data.sources=[{path:A,weight:2},{path:B,weight:1}]",
        "data.sources=[{path:A},{path:B}]",
    ),
    (
        "data.sources=[{path:A,weight:2},{path:A,weight:1},{path:B,weight:1}]",
        "or once, with the weight of both",
        "data.sources=[{path:A,weight:3},{path:B,weight:1}]",
    ),
    ("data.sources=[{weight:2}]", "has no path; write {path: FILE}", "data.sources=[{path:A,weight:2}]"),
    ("data.sources=[{path:A,weight:0}]", "leave an entry out for 0", "data.sources=[{path:A,weight:2}]"),
    ("data.path=A task.reward=a:b", "leave it out", "task.reward=null"),
    ("task=grpo data.path=P", "task=grpo needs task.reward=MODULE:FUNCTION", "task.reward=math:floor"),
    (f"{GRPO} run.patience=2", "leave run.patience out", "run.patience=null"),
    (f"{GRPO} data.validation_path=P", "leave data.validation_path out", "data.validation_path=null"),
    ("data.path=A run.patience=2 run.evaluate_every=0", "set it to epoch", "run.evaluate_every=epoch"),
    (f"{LORA} adapter=qlora", "choose adapter=lora, or set adapter.dora=false", "adapter=lora", "adapter.dora=false"),
    (f"{LORA} adapter.merge=true", "set adapter.merge=false", "adapter.merge=false"),
    (
        "data.path=A run.keep_best=true data.validation_fraction=0",
        "set data.validation_fraction=0.05 or data.validation_path",
        "data.validation_fraction=0.05",
        "data.validation_path=B",
    ),
    (
        "task=pretrain data=stdlib model.path=null run.evaluate_batches=null",
        "to a number of micro-batches",
        "run.evaluate_batches=4",
    ),
    (
        "task=pretrain data=stdlib model.path=null trl.packing=true",
        "choose task=sft, or leave it out",
        "task=sft data=jsonl data.path=A model.path=.",
    ),
]


@pytest.mark.advice("task=grpo needs task.reward=MODULE:FUNCTION", "and task=grpo takes none; leave")
@pytest.mark.promise("early-mistake")
@pytest.mark.parametrize("case", CASES, ids=[case[1][:24] for case in CASES])
def test_a_mistake_of_fine_tuning_is_corrected_as_it_says(tmp_path, monkeypatch, case):
    """Fails if what a message offers is refused too."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.chdir(tmp_path)
    for name in ("A", "B"):
        said = [[{"role": "user", "content": f"{name}{n}"}, {"role": "assistant", "content": "b"}] for n in range(9)]
        (tmp_path / name).write_text("".join(json.dumps({"messages": row}) + "\n" for row in said))
    (tmp_path / "P").write_text('{"prompt": "a"}\n' * 9)
    (tmp_path / "config.json").write_text("{}")

    def checked(words):
        words = words.replace("{path:", "{kind:jsonl,path:").split()
        data = "mixture" if any(word.startswith("data.sources") for word in words) else "jsonl"
        usual = ["task=sft", "model.path=.", f"data={data}", "offload=host", "run.checkpoint_every=4", "run.dir=run"]
        last = {word.partition("=")[0]: word for word in (*usual, *words)}
        app.check(compose.compose([*last.values()]))

    given, advice, *ways = case
    with advised(advice):
        checked(given)
    for way in ways:
        checked(f"{given} {way}")
