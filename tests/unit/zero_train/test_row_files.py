"""Files are read row by row, and a mistake is told with its place. JSONL and CSV need nothing beyond Python."""

import json
import tracemalloc

import pytest

from zero_train import row_files
from zero_train.errors import ConfigError
from zero_train.rows import Mistake


def read(reader, path, content):
    path.write_bytes(content)
    return [(place, str(row) if isinstance(row, Mistake) else row) for place, row in reader(path)]


def test_lines_are_objects_with_their_numbers(tmp_path):
    found = read(row_files.jsonl, tmp_path / "a", b'\xef\xbb\xbf{"a": 1}\r\n {"b": "\xc3\xa9"} \n\n\r\n')
    assert found == [("line 1", {"a": 1}), ("line 2", {"b": "é"})]
    assert read(row_files.jsonl, tmp_path / "a", b'{"a": 1}') == [("line 1", {"a": 1})]
    assert read(row_files.jsonl, tmp_path / "a", b"") == read(row_files.jsonl, tmp_path / "a", b"\n\n") == []


@pytest.mark.parametrize(
    ("content", "place", "words"),
    [
        (b'{}\n{"a": }\n{}', "line 2", "is not JSON: Expecting value at column 7; a line holds one whole object"),
        (b"{}\n\n\n{}\n\n", "line 2", "is empty; delete it"),
        (b'{}\n{"a": "\xe9"}\n{}', "line 2", "is not UTF-8: byte 0xe9 at offset 10 of the file"),
        (b'\xef\xbb\xbf{}\n{"a": "\xe9"}\n{}', "line 2", "is not UTF-8: byte 0xe9 at offset 13 of the file"),
        (b"{}\n" + b"[" * 100_000 + b"\n{}", "line 2", "is JSON that cannot be read"),
        (b"{}\n" + b"9" * 10_000 + b"\n{}", "line 2", "is JSON that cannot be read"),
    ],
)
def test_a_mistake_in_a_line_leaves_the_others(tmp_path, content, place, words):
    found = read(row_files.jsonl, tmp_path / "a", content)
    assert [place for place, row in found if isinstance(row, str)] == [place]
    assert words in dict(found)[place] and [row for _, row in found if row == {}] == [{}, {}]


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"PAR1\0\0", "data=parquet"), (b"\x1f\x8b\x08\0", "gzip"), (b"\x28\xb5\x2f\xfd\0", "zstd"), (b"PK\3\4", "zip")],
)
@pytest.mark.parametrize("reader", [row_files.jsonl, row_files.csv_rows])
def test_another_format_is_named(tmp_path, reader, content, words):
    [(place, text)] = read(reader, tmp_path / "a", content * 100)
    assert place == "line 1" and words in text


def test_a_long_line_is_not_read_into_memory(tmp_path, monkeypatch):
    """Fails if the reader holds more of a line than the limit and one chunk, or loses count behind it."""
    monkeypatch.setattr(row_files, "LINE_LIMIT", 1 << 16)
    with (tmp_path / "a").open("wb") as file:
        file.write(b'{}\n"' + b"x" * (24 << 20) + b'"\n{}\n' + b'"' + b"x" * (1 << 16))
    tracemalloc.start()
    found = list(row_files.jsonl(tmp_path / "a"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [place for place, _ in found] == ["line 1", "line 2", "line 3", "line 4"]
    assert "has 25,165,827 bytes, and a line may have 65536 bytes; split the row" in str(found[1][1])
    assert found[2][1] == {} and "has 65,537 bytes" in str(found[3][1])
    assert peak < 8 << 20


def test_a_line_of_the_limit_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(row_files, "LINE_LIMIT", 4)
    found = read(row_files.jsonl, tmp_path / "a", b'"a"\n"abc"\n')
    assert found[0] == ("line 1", "a") and "has 6 bytes" in found[1][1]


def test_csv_rows_have_names_and_may_span_lines(tmp_path):
    chat = [{"role": "user", "content": "a"}]
    quoted = json.dumps(chat).replace('"', '""')
    content = f'prompt,messages,tools\r\n"a ""b""\n\nc","{quoted}",\r\nd,[e,[]\n'.encode()
    assert read(row_files.csv_rows, tmp_path / "a", content) == [
        ("row 1 (line 4)", {"prompt": 'a "b"\n\nc', "messages": chat, "tools": None}),
        ("row 2 (line 5)", {"prompt": "d", "messages": "[e", "tools": "[]"}),
    ]


@pytest.mark.parametrize(
    ("content", "place", "words"),
    [
        (b"a,b\n1,2,3\n4,5\n", "row 1 (line 2)", "has 3 cells, and the header names 2 columns"),
        (b"a,b\n1,2\n\n4,5\n", "line 3", "is empty; delete it"),
        (b"a,b\n1,2\n4,\xe9\n4,5\n", "line 3", "is not UTF-8: byte 0xe9 at offset 10"),
        (b'a,b\n1,2\n4,"5\n6,7\n', "line 4", "is not CSV: unexpected end of data"),
        (b'a,b\n1,2\n4,"5"6\n6,7\n', "line 3", "is not CSV: "),
    ],
)
def test_a_mistake_in_csv_has_its_place(tmp_path, content, place, words):
    found = dict(read(row_files.csv_rows, tmp_path / "a", content))
    assert words in found[place]
    assert sum(isinstance(row, str) for row in found.values()) == 1


def test_parquet_is_read_row_by_row(tmp_path):
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    good = pyarrow.array(["a", "b", "c"])
    bad = pyarrow.array([b"a", b"\xe9", b"c"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": good}), tmp_path / "a.parquet")
    assert list(row_files.parquet(tmp_path / "a.parquet"))[2] == ("row 3", {"text": "c"})
    pyarrow.parquet.write_table(pyarrow.table({"text": bad}), tmp_path / "a.parquet")
    found = list(row_files.parquet(tmp_path / "a.parquet"))
    assert found[0] == ("row 1", {"text": "a"}) and found[2] == ("row 3", {"text": "c"})
    assert "has a text that is not UTF-8" in str(found[1][1])
    (tmp_path / "a.parquet").write_bytes(b"{}\n" * 10)
    assert "cannot be read as parquet" in str(list(row_files.parquet(tmp_path / "a.parquet"))[0][1])


def test_a_row_group_of_parquet_is_not_read_into_memory(tmp_path):
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    text = pyarrow.array([f"{number}" * 2000 for number in range(5000)])
    pyarrow.parquet.write_table(
        pyarrow.table({"text": text}), tmp_path / "a.parquet", compression="none", use_dictionary=False
    )
    before = pyarrow.total_allocated_bytes()
    held = [pyarrow.total_allocated_bytes() - before for _ in row_files.parquet(tmp_path / "a.parquet")]
    assert (tmp_path / "a.parquet").stat().st_size > 30 << 20 and max(held) < 8 << 20


def test_files_are_found_or_missing_with_near_names(tmp_path):
    for name in ("chats.jsonl", "b.jsonl", "notes.txt"):
        (tmp_path / name).write_text("x")
    assert row_files.found("data.path", f"{tmp_path}/b.jsonl", "jsonl", "*.jsonl") == [tmp_path / "b.jsonl"]
    assert row_files.found("data.path", f"{tmp_path}", "jsonl", "*.jsonl") == [
        tmp_path / "b.jsonl",
        tmp_path / "chats.jsonl",
    ]
    for given, pattern, words in (
        (f"{tmp_path}/chat.jsonl", "*.jsonl", "does not exist; did you mean chats.jsonl"),
        (f"{tmp_path}/none/chat.jsonl", "*.jsonl", f"does not exist, nor does the folder {tmp_path}/none"),
        (f"{tmp_path}", "*.json", "has no file that matches *.json: it has b.jsonl, chats.jsonl, notes.txt"),
        (f"{tmp_path}/b.jsonl", "*.txt", "is a file, so data.pattern=*.txt chooses nothing"),
    ):
        with pytest.raises(ConfigError) as caught:
            row_files.found("data.path", given, "jsonl", pattern)
        assert f"data.path={given}" in str(caught.value) and words in str(caught.value)
