"""From DeepSpeed's files to a checkpoint of zero-core's, or to safetensors: whole, or not there."""

import json

import pytest
import torch

import zero_core
from zero_core.checkpoint.safetensors import Reader, open_index
from zero_core.errors import CheckpointError, ConfigError, PretrainedError
from zero_deepspeed.convert import convert, convert_weights
from zero_deepspeed.files import Pieces

from .test_checkpoint import _compare, _sharded
from .written import write

pytestmark = pytest.mark.promise("ds-convert")


@pytest.mark.parametrize("stage, size", [(1, 2), (3, 3)])
def test_what_was_converted_is_loaded_as_any_checkpoint(tmp_path, stage, size):
    truth = write(tmp_path / "theirs", stage, size, client={"epoch": 3})
    convert(tmp_path / "theirs", tmp_path / "ours")
    model, optimizer = _sharded()
    loaded = zero_core.checkpoint.load(tmp_path / "ours", model, optimizer)
    _compare(model, optimizer, truth)
    assert (loaded.step, loaded.extra, loaded.world_size) == (9, {"epoch": 3}, size)


def test_weights_are_the_masters(tmp_path):
    truth = write(tmp_path / "theirs", 3, 2)
    convert_weights(tmp_path / "theirs", tmp_path / "exact", max_file_bytes=200)
    entries, reader = open_index(tmp_path / "exact"), Reader()
    assert "head.weight" not in entries and len({entry.path for entry in entries.values()}) > 1
    for name, states in truth.values.items():
        found = reader.read(entries[name], 0, entries[name].numel)
        assert torch.equal(found.view(entries[name].shape), states["fp32"])
    with pytest.raises(ConfigError, match="name the folder of the model that was trained, or leave it out"):
        convert_weights(tmp_path / "theirs", tmp_path / "half", model=tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "net"}))
    convert_weights(tmp_path / "theirs", tmp_path / "half", dtype=torch.bfloat16, model=tmp_path)
    entry = open_index(tmp_path / "half")["a.weight"]
    assert torch.equal(reader.read(entry, 0, 35), truth.values["a.weight"]["fp32"].bfloat16().reshape(-1))
    assert (tmp_path / "half" / "config.json").is_file()


def _stop(monkeypatch, error, after):
    reads, read = iter(range(after)), Pieces.read

    def stopping(self, *arguments):
        if next(reads, None) is None:
            raise error
        return read(self, *arguments)

    monkeypatch.setattr(Pieces, "read", stopping)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_nothing_half_written_passes_for_a_checkpoint(tmp_path, monkeypatch, error):
    write(tmp_path / "theirs", 2, 2)
    truth = write(tmp_path / "earlier", 1, 1)
    convert(tmp_path / "earlier", tmp_path / "ours")
    with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, CheckpointError)):
        _stop(patch, error, 8)
        convert(tmp_path / "theirs", tmp_path / "ours")
    model, optimizer = _sharded()
    zero_core.checkpoint.load(tmp_path / "ours", model, optimizer)
    _compare(model, optimizer, truth)
    with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, PretrainedError)):
        _stop(patch, error, 5)
        convert_weights(tmp_path / "theirs", tmp_path / "weights")
    with pytest.raises(PretrainedError, match="holds no"):
        open_index(tmp_path / "weights")
