"""Files are read row by row, and a mistake is told with its place. JSON and CSV need nothing beyond Python."""

import gzip
import json

import pytest

from zero_train import row_files
from zero_train.errors import ConfigError
from zero_train.rows import Mistake


def read(path, content, kind="jsonl"):
    path.write_bytes(content)
    places = row_files.places("data.path", str(path), kind, [path])
    return [(place.removeprefix(f"{path}, "), str(row) if isinstance(row, Mistake) else row) for place, row in places]


def test_lines_are_objects_with_their_numbers(tmp_path):
    content = b'\xef\xbb\xbf{"a": 1}\r\n\n {"b": "\xc3\xa9"} \n\n\r\n'
    found = [("line 1", {"a": 1}), ("line 3", {"b": "é"})]
    assert read(tmp_path / "a.jsonl", content) == read(tmp_path / "a", content) == found
    assert (
        read(tmp_path / "a.jsonl.gz", gzip.compress(content)) == read(tmp_path / "b", gzip.compress(content)) == found
    )
    assert read(tmp_path / "a.jsonl", b"") == read(tmp_path / "a.jsonl", b"\n\n") == []


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_one_array_has_rows(tmp_path, name):
    content = json.dumps([{"a": "2024-05-01"}, {"a": "NA"}], indent=2).encode()
    assert read(tmp_path / name, b"\n " + content) == [("row 1", {"a": "2024-05-01"}), ("row 2", {"a": "NA"})]
    assert "is not JSON" in read(tmp_path / name, content[:-1])[0][1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{}\n{"a": }\n{}', "is not JSON: Expecting value: line 1 column 7 (char 6); write one whole object a line"),
        (b'{}\n{"a": "\xe9"}\n{}', "is not UTF-8: it has the byte 0xe9; save it as UTF-8"),
        (b'{}\n{"a": "\\ud83d"}\n{}', r"has \ud83d, half of a surrogate pair, which is no character; remove it"),
        (b"{}\n" + b"[" * 100_000 + b"\n{}", "is not JSON: "),
        (b"{}\n" + b"9" * 10_000 + b"\n{}", "is not JSON: "),
    ],
)
def test_a_mistake_in_a_line_leaves_the_others(tmp_path, content, words):
    found = read(tmp_path / "a", content)
    assert [place for place, row in found if isinstance(row, str)] == ["line 2"]
    assert words in dict(found)["line 2"] and [row for _, row in found if row == {}] == [{}, {}]


@pytest.mark.parametrize(("name", "between"), [("a.csv", ","), ("a.tsv", "\t")])
def test_cells_are_texts_whatever_they_look_like(tmp_path, name, between):
    """Fails if a reader that guesses makes a number, a date or nothing of a text."""
    content = 'prompt,text,tools\r\n"a ""b""\n\nc",007,\r\n2024-05-01,NA,[]\n'.replace(",", between).encode()
    assert read(tmp_path / name, content) == [
        ("row 1 (line 4)", {"prompt": 'a "b"\n\nc', "text": "007", "tools": None}),
        ("row 2 (line 5)", {"prompt": "2024-05-01", "text": "NA", "tools": "[]"}),
    ]


@pytest.mark.parametrize(
    ("content", "place", "words"),
    [
        (b"a,b\n1,2,3\n4,5\n", "row 1 (line 2)", "has more cells than the 2 columns of the header"),
        (b"a,b\n1\n4,5\n", "row 1 (line 2)", "has fewer cells than the 2 columns of the header"),
        (b'a,b\n1,2\n4,"5\n6,7\n', "line 4", "is not CSV: unexpected end of data"),
        (b'a,b\n1,2\n4,"5"6\n6,7\n', "line 3", "is not CSV: "),
    ],
)
def test_a_mistake_in_csv_has_its_place(tmp_path, content, place, words):
    assert words in dict(read(tmp_path / "a.csv", content))[place]


def test_the_other_formats_are_read_by_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_list([{"text": "a"}, {"text": "2024-05-01"}])
    rows.to_parquet(tmp_path / "a.parquet")
    rows.save_to_disk(tmp_path / "saved")
    (tmp_path / "a.arrow").write_bytes((tmp_path / "saved" / "data-00000-of-00001.arrow").read_bytes())
    for name in ("a.parquet", "a.arrow", "saved"):
        files = row_files.found("data.path", str(tmp_path / name), "*")
        found = list(row_files.places("data.path", str(tmp_path / name), "datasets", files))
        assert found[1] == (f"{tmp_path / name}, row 2", {"text": "2024-05-01"})
    assert "cannot be read as parquet" in read(tmp_path / "a.parquet", b"{}\n" * 10)[0][1]


def test_files_are_found_or_missing_with_near_names(tmp_path):
    for name in ("chats.jsonl", "b.jsonl", "notes.txt"):
        (tmp_path / name).write_text("x")
    assert row_files.found("data.path", f"{tmp_path}/b.jsonl", "*.csv") == [tmp_path / "b.jsonl"]
    for pattern in ("*", "*.jsonl"):
        names = ["b.jsonl", "chats.jsonl"]
        assert [path.name for path in row_files.found("data.path", f"{tmp_path}", pattern)] == names
    assert row_files.found("data.path", "someone/rows", "*") == []  # of the hub
    for given, pattern, words in (
        (f"{tmp_path}/chat.jsonl", "*.jsonl", "does not exist; did you mean chats.jsonl"),
        (f"{tmp_path}/none/chat.jsonl", "*.jsonl", f"does not exist, nor does the folder {tmp_path}/none"),
        (f"{tmp_path}", "*.json", "that matches *.json: it has b.jsonl, chats.jsonl, notes.txt"),
        (f"{tmp_path}/b.jsonl", "*.txt", "is a file, so data.pattern=*.txt chooses nothing"),
        ("rows.jsonl", "*", "does not exist"),
    ):
        with pytest.raises(ConfigError) as caught:
            row_files.found("data.path", given, pattern)
        assert f"data.path={given}" in str(caught.value) and words in str(caught.value)


def test_a_digest_is_that_of_the_bytes(tmp_path):
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").write_text("y")
    one, other = tmp_path / "a", tmp_path / "b"
    found = {row_files.digest("data.path", "a", files) for files in ([one], [other], [one, other], [other, one])}
    assert len(found) == 4
