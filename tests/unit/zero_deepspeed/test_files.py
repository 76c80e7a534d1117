"""What lies where in DeepSpeed's layouts, which folders are no whole checkpoint, and that no file is executed."""

import math
import os
import pickle
import shutil

import numpy as np
import pytest
import torch

from zero_core.errors import ConfigError
from zero_deepspeed.files import FilesError, open_checkpoint
from zero_deepspeed.pickles import read_plain

from .written import GROUPS, STATES, Settings, rewrite, write

TAG = "global_step10"
OPTIMIZER_1 = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.mark.promise("ds-elements")
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["1", "2", "3", "3 in parts"])
def test_every_element_is_found(tmp_path, kind, size):
    stage = int(kind[0])
    truth = write(tmp_path, stage, size, one_flat_group="parts" not in kind)
    found = open_checkpoint(tmp_path)
    assert (found.stage, found.world_size, found.version, found.global_steps) == (stage, size, "0.19.8", 10)
    wanted = {f"model.{name}": states["fp32"] for name, states in truth.values.items()}
    for state in STATES[1:]:
        wanted |= {f"optim.state.{name}.{state}": states[state] for name, states in truth.values.items()}
    wanted |= {f"optim.state.{name}.step": torch.tensor(9.0) for name in truth.values}
    wanted |= {"model.frozen.weight": truth.frozen, "model.seen": torch.tensor(4)}
    assert found.tensors.keys() == wanted.keys()
    for name, value in wanted.items():
        pieces = found.tensors[name]
        assert torch.equal(pieces.read(0, math.prod(pieces.shape)).view(pieces.shape), value)
        assert torch.equal(pieces.read(2, 5), value.reshape(-1)[2:5])
    assert found.aliases == {"model.head.weight": "model.b.weight"}
    assert [tuple(group["params"]) for group in found.run["groups"]] == list(GROUPS)
    assert [group["weight_decay"] for group in found.run["groups"]] == [0.1, 0.0]
    assert sorted(found.parameters) == sorted([*truth.values, "frozen.weight"])


@pytest.mark.promise("ds-damaged")
def test_ranks_that_saved_after_different_steps_are_refused(tmp_path):
    write(tmp_path / "new", 1, 2, step=torch.tensor(9.0))
    write(tmp_path / "old", 1, 2, step=8)
    shutil.copy(tmp_path / "old" / TAG / OPTIMIZER_1, tmp_path / "new" / TAG)
    with pytest.raises(FilesError, match="ranks have taken different steps"):
        open_checkpoint(tmp_path / "new")


@pytest.mark.promise("ds-refused")
@pytest.mark.parametrize(
    "name",
    [
        "layer_01-model_00-model_states.pt",
        "mp_rank_01_model_states.pt",
        "zero_pp_rank_0_mp_rank_01_optim_states.pt",
        "layer_0_expert_3_mp_rank_00_model_states.pt",
        "expp_rank_0_mp_rank_00_optim_states.pt",
        OPTIMIZER_1,
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path, name):
    """Files of pipeline and tensor parallelism and of experts, and one of a run of more ranks."""
    write(tmp_path, 1, 1)
    (tmp_path / TAG / name).write_bytes(b"")
    with pytest.raises(FilesError, match=rf"or of pipeline, tensor or expert parallelism: {name}"):
        open_checkpoint(tmp_path)


def _change(path, **changes):
    saved = torch.load(path, weights_only=False)
    saved.update(changes)
    torch.save(saved, path)


@pytest.mark.promise("ds-refused")
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"buffer_names": None}, "does not have the layout of DeepSpeed 0.19"),
        ({"mp_world_size": 2}, "is of a run with tensor or pipeline parallelism"),
        ({"num_experts": [4]}, "or with DeepSpeed's own experts .*: continue that run with DeepSpeed"),
        (
            {"param_shapes": [{"a.weight": torch.Size([7, 5])}]},
            "2 parameter groups, and .* param_shapes has 1",
        ),
        (
            {"param_shapes": [{"a.weight": torch.Size([7, 5])}, {"a.bias": torch.Size([9])}]},
            "flat group 0 has 70 elements, and its parameters 35",
        ),
    ],
)
def test_another_kind_of_model_states_is_refused(tmp_path, changes, message):
    write(tmp_path, 2, 2)
    _change(tmp_path / TAG / "mp_rank_00_model_states.pt", **changes)
    with pytest.raises(FilesError, match=message):
        open_checkpoint(tmp_path)


def test_states_are_called_as_torch_calls_them(tmp_path):
    """DeepSpeed's CPU Lion keeps an exp_avg_sq that it never uses."""
    write(tmp_path, 1, 1)
    _change(tmp_path / TAG / "mp_rank_00_model_states.pt", ds_config={"optimizer": {"type": "Lion"}})
    found = {name for name in open_checkpoint(tmp_path).tensors if name.startswith("optim.state.a.weight.")}
    assert found == {"optim.state.a.weight.exp_avg", "optim.state.a.weight.step"}


class Malicious:
    def __init__(self, call, *arguments):
        self.call = call, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.promise("ds-malicious")
@pytest.mark.parametrize("call, name", [(os.system, "system"), (eval, "eval"), (exec, "exec"), (os.mkdir, "mkdir")])
@pytest.mark.parametrize("file", ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"])
def test_a_malicious_pickle_executes_nothing_and_is_named(tmp_path, file, call, name):
    write(tmp_path, 2, 2)
    path, trace = tmp_path / "global_step10" / file, tmp_path / "trace"
    argument = {"system": f"touch {trace}", "mkdir": str(trace)}.get(name, f"open({str(trace)!r}, 'w')")
    torch.save({"module": Malicious(call, argument)}, path)
    with pytest.raises(ConfigError, match=rf"{file} wants to call \w+\.{name}. No code was executed"):
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
    rewrite(path, lambda name, data: code if name.endswith("data.pkl") else data)
    with pytest.raises(ConfigError, match="UnpicklingError.* No code was executed"):
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
