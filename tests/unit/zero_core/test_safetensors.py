"""Our reader and writer against the `safetensors` package, and against damaged files."""

import json
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

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


def test_an_incomplete_index_names_what_is_absent(tmp_path: Path) -> None:
    save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    index = tmp_path / safetensors.INDEX_NAME
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    with pytest.raises(PretrainedError, match="two.safetensors"):
        safetensors.open_index(tmp_path)
    index.write_text(json.dumps({"weight_map": {"lost": "one.safetensors"}}))
    with pytest.raises(PretrainedError, match="lost"):
        safetensors.open_index(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../one.safetensors"}}))
    with pytest.raises(PretrainedError, match="not in the folder"):
        safetensors.open_index(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_a_file_cut_short_is_named(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    with pytest.raises(PretrainedError, match=r"model.safetensors .*cut short"):
        safetensors.open_index(folder)


def test_a_file_cut_after_it_was_opened_is_an_error_not_a_short_tensor(folder: Path) -> None:
    entry = safetensors.open_index(folder)["a"]
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(entry.start_bytes + 100)
    with pytest.raises(PretrainedError, match="wanted 240 bytes, got 100"):
        safetensors.Reader().read(entry, 0, 60)


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        ({"w": {"dtype": "F31", "shape": [2], "data_offsets": [0, 8]}}, "dtype F31"),
        ({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, "12 bytes, data_offsets span 8"),
        ({"w": {"dtype": "F32", "shape": [2]}}, "damaged"),
    ],
)
def test_a_damaged_header_is_named(tmp_path: Path, header: dict, complaint: str) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(PretrainedError, match=complaint):
        safetensors.open_index(tmp_path)
