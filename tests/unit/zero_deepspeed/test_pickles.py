"""Nothing in a file is executed, whatever it asks for."""

import os
import pickle
import zipfile

import numpy as np
import pytest
import torch

from zero_core.errors import ConfigError
from zero_deepspeed.files import open_checkpoint
from zero_deepspeed.pickles import read_plain

from .written import write


class Malicious:
    def __init__(self, call, *arguments):
        self.call = call, arguments

    def __reduce__(self):
        return self.call


class Settings:
    def __init__(self):
        self.depth, self.order = 3, torch.arange(3)


@pytest.mark.promise("ds-malicious")
@pytest.mark.parametrize("call, name", [(os.system, "system"), (eval, "eval"), (exec, "exec"), (os.mkdir, "mkdir")])
@pytest.mark.parametrize("file", ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"])
def test_a_malicious_pickle_executes_nothing_and_is_named(tmp_path, file, call, name):
    write(tmp_path, 2, 2)
    path, trace = tmp_path / "global_step10" / file, tmp_path / "trace"
    argument = {"system": f"touch {trace}", "mkdir": str(trace)}.get(name, f"open({str(trace)!r}, 'w')")
    torch.save({"module": Malicious(call, argument)}, path)
    with pytest.raises(ConfigError, match=rf"{file} wants to call \w+\.{name}, and nothing of it was executed"):
        open_checkpoint(tmp_path)
    assert not trace.exists()


@pytest.mark.promise("ds-malicious")
def test_a_pickle_without_torch_s_archive_is_refused_unread(tmp_path):
    path, trace = tmp_path / "mp_rank_00_model_states.pt", tmp_path / "trace"
    path.write_bytes(pickle.dumps(Malicious(os.system, f"touch {trace}")))
    with pytest.raises(ConfigError, match="not as torch.save writes it .BadZipFile"):
        read_plain(path)
    assert not trace.exists()


@pytest.mark.promise("ds-malicious")
def test_a_call_that_the_list_of_names_does_not_show_is_refused(tmp_path):
    """A name that is put together while the pickle runs: torch's unpickler refuses it."""
    path = tmp_path / "x.pt"
    torch.save({"a": 1}, path)
    code = b"\x80\x02\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R."
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, code if name.endswith("data.pkl") else data)
    with pytest.raises(ConfigError, match="UnpicklingError.* and nothing of it was executed"):
        read_plain(path)


@pytest.mark.promise("ds-classes")
def test_a_class_of_the_client_s_is_read_as_a_dict_if_it_is_named(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"settings": Settings(), "seed": np.float64(2)}, path)
    with pytest.raises(ConfigError, match="wants to call numpy.* numpy.*Settings.*--inert module.Class"):
        read_plain(path)
    torch.save({"settings": Settings()}, path)
    name = f"{Settings.__module__}.Settings"
    found = read_plain(path, [name])["settings"]
    assert found["depth"] == 3 and found["order"].tolist() == [0, 1, 2]
