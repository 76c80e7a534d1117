"""Our reader and writer against the `safetensors` package, and against damaged files."""

import json
from contextlib import closing, nullcontext
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from zero_core.checkpoint import safetensors
from zero_core.errors import PretrainedError

TENSORS = {
    "a": torch.arange(60, dtype=torch.float32).view(3, 4, 5),
    "b": torch.randn(7, 3).bfloat16(),
    "scalar": torch.tensor(2.5, dtype=torch.float16),
    "empty": torch.zeros(0, 4),
    "mask": torch.tensor([True, False, True]),
    "count": torch.arange(5),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def test_what_we_write_in_parts_the_package_and_we_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    shapes = {name: (t.dtype, tuple(t.shape)) for name, t in TENSORS.items()}
    safetensors.Writer(path, shapes).close()
    with (
        closing(safetensors.Writer(path, shapes, create=False)) as late,
        closing(safetensors.Writer(path, shapes, create=False)) as early,
    ):
        for name, tensor in TENSORS.items():
            half = tensor.numel() // 2
            late.write(name, half, tensor.reshape(-1)[half:])
            early.write(name, 0, tensor.reshape(-1)[:half])
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        for name, expected in TENSORS.items():
            assert torch.equal(file.get_tensor(name), expected), name
    entries, reader = safetensors.open_index(tmp_path), safetensors.Reader()
    for name, expected in TENSORS.items():
        got = reader.read(entries[name], 0, expected.numel()).view(entries[name].shape)
        assert got.dtype == expected.dtype and torch.equal(got, expected), name


@pytest.mark.promise("safetensors-dtypes")
@pytest.mark.parametrize("code", safetensors.DTYPES)
def test_each_dtype_of_the_format_is_that_of_the_package(code: str, tmp_path: Path) -> None:
    """Both ways, by bytes. Fails if a dtype is missing, or its shape is counted otherwise."""
    dtype = safetensors.DTYPES[code]
    tensor = torch.arange(32, dtype=torch.uint8).remainder(2).view(dtype).view(2, -1)
    save_file({"t": tensor}, tmp_path / "theirs.safetensors")
    entry = safetensors.open_index(tmp_path / "theirs.safetensors")["t"]
    assert (entry.dtype, entry.shape) == (dtype, tuple(tensor.shape))
    values = safetensors.Reader().read(entry, 0, entry.numel)
    with closing(safetensors.Writer(tmp_path / "ours.safetensors", {"t": (dtype, entry.shape)})) as writer:
        writer.write("t", 0, values)
    found = load_file(tmp_path / "ours.safetensors")["t"]
    assert found.dtype == dtype and found.shape == tensor.shape
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.promise("safetensors-dtypes")
def test_lazily_conjugated_and_negated_tensors_are_written_with_their_values(tmp_path: Path) -> None:
    """Fails if the bytes are those before the conjugation."""
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    negated = tensor.conj().imag.to(torch.complex64)
    shapes = {name: (torch.complex64, (2,)) for name in ("conjugated", "negated")}
    with closing(safetensors.Writer(tmp_path / "model.safetensors", shapes)) as writer:
        writer.write("conjugated", 0, tensor.conj())
        writer.write("negated", 0, negated)
    found = load_file(tmp_path / "model.safetensors")
    assert found["conjugated"].tolist() == [1 - 2j, 3 + 4j] and found["negated"].tolist() == [-2, 4]


@pytest.mark.promise("pretrained-index")
def test_a_single_file_comes_before_an_index_and_both_are_named(folder: Path) -> None:
    """As in transformers. Fails if an index that an earlier save left is read, or its files are asked for."""
    index = folder / safetensors.INDEX_NAME
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.warns(UserWarning, match="has model.safetensors and model.safetensors.index.json, .* delete the one"):
        entries = safetensors.open_index(folder)
    assert set(entries) == set(TENSORS)
    index.unlink()  # the advice
    assert set(safetensors.open_index(folder)) == set(TENSORS)


@pytest.mark.promise("pretrained-index")
def test_an_index_that_is_damaged_or_names_two_files_for_a_tensor_is_fetched_again(tmp_path: Path) -> None:
    """Fails if the last of two files is taken in silence."""
    for name in ("one", "two"):
        save_file({"a": TENSORS["a"]}, tmp_path / f"{name}.safetensors")
    index = tmp_path / safetensors.INDEX_NAME
    index.write_text('{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}')
    with pytest.raises(PretrainedError, match=r"index.json names two files for the tensor 'a': fetch it again"):
        safetensors.open_index(tmp_path)
    for text in ('{"weight_map": {"a": "one', "[1]", "{}"):
        index.write_text(text)
        with pytest.raises(PretrainedError, match=r"is damaged, or no index: .*; fetch it again"):
            safetensors.open_index(tmp_path)
    index.write_text('{"weight_map": {"a": "one.safetensors"}}')
    assert safetensors.open_index(tmp_path)["a"].path.name == "one.safetensors"


@pytest.mark.advice("copy the file there, and name it in the index without", "fetch all files again")
def test_an_incomplete_index_names_what_is_absent(tmp_path: Path) -> None:
    save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    index = tmp_path / safetensors.INDEX_NAME
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    with pytest.raises(PretrainedError, match="names two.safetensors, no file in its folder: copy the file there"):
        safetensors.open_index(tmp_path)
    save_file({"b": TENSORS["b"]}, tmp_path / "two.safetensors")
    assert set(safetensors.open_index(tmp_path)) == {"a", "b"}
    lacks = r"lists tensors that its files lack, \['lost'\]: fetch all files again"
    outside = "names ../one.safetensors, no file .* and name it in the index without a folder"
    for name, file, told in (("lost", "one.safetensors", lacks), ("a", "../one.safetensors", outside)):
        index.write_text(json.dumps({"weight_map": {name: file}}))
        with pytest.raises(PretrainedError, match=told):
            safetensors.open_index(tmp_path)


@pytest.mark.advice("bytes, {} ends at {}: fetch it again")
@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_a_file_cut_short_is_named(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    with pytest.raises(PretrainedError, match=r"model.safetensors .*cut short.*fetch it again"):
        safetensors.open_index(folder)
    path.write_bytes(data)
    entry = safetensors.open_index(folder)["a"]
    path.write_bytes(data[: entry.start_bytes + 100])
    with pytest.raises(PretrainedError, match=r"after 100 of 240 bytes of elements \[0, 60\): fetch it again"):
        safetensors.Reader().read(entry, 0, 60)


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        ({"w": {"dtype": "F31", "shape": [2], "data_offsets": [0, 8]}}, "'w' has unknown dtype F31: cast it to one of"),
        ({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, "12 bytes, data_offsets span 8"),
        ({"w": {"dtype": "F32", "shape": [2]}}, "damaged: .*: fetch it again"),
        ({"w": {"dtype": "F4", "shape": [], "data_offsets": [0, 8]}}, "damaged"),
    ],
)
@pytest.mark.advice("has unknown dtype {}: cast it to one of")
def test_a_damaged_header_is_named(tmp_path: Path, header: dict, complaint: str) -> None:
    sound = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    for fields, told in ((header, pytest.raises(PretrainedError, match=complaint)), (sound, nullcontext())):
        text = json.dumps(fields).encode()
        (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
        with told:
            safetensors.open_index(tmp_path)
