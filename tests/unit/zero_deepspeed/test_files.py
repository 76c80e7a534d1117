"""What lies where in DeepSpeed's layouts, and which folders are no whole checkpoint."""

from __future__ import annotations

import math

import pytest
import torch

from zero_deepspeed.files import FilesError, open_checkpoint

from .written import GROUPS, STATES, write

TAG = "global_step10"


def _read(source, shape):
    return source.read(0, math.prod(shape)).view(shape)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["1", "2", "3", "3 in parts"])
def test_every_element_is_found(tmp_path, kind, size):
    stage = int(kind[0])
    truth = write(tmp_path, stage, size, one_flat_group="parts" not in kind)
    found = open_checkpoint(tmp_path)
    assert (found.stage, found.world_size, found.version, found.global_steps) == (stage, size, "0.19.8", 10)
    for name, states in truth.values.items():
        parameter = found.parameters[name]
        sources = {"fp32": parameter.values, **parameter.states}
        assert sources.keys() == set(STATES) and parameter.step == 9
        for state, value in states.items():
            assert torch.equal(_read(sources[state], parameter.shape), value)
            assert torch.equal(sources[state].read(2, 5), value.reshape(-1)[2:5])
    frozen = found.parameters["frozen.weight"]
    assert torch.equal(_read(frozen.values, frozen.shape), truth.frozen) and frozen.group is None
    assert found.aliases == {"head.weight": "b.weight"} and found.buffers["seen"] == 4
    assert [tuple(group["params"]) for group in found.groups] == list(GROUPS)
    assert [group["weight_decay"] for group in found.groups] == [0.1, 0.0]


def test_a_checkpoint_is_named_by_its_tag_or_by_itself(tmp_path):
    write(tmp_path, 1, 1)
    (tmp_path / "latest").write_text("global_step20\n")
    with pytest.raises(
        FilesError, match=r"latest names 'global_step20', which is not there: its tags are global_step10"
    ):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path, "global_step10").folder == open_checkpoint(tmp_path / TAG).folder
    with pytest.raises(FilesError, match="has no tag 'global_step30': its tags are global_step10"):
        open_checkpoint(tmp_path, "global_step30")
    (tmp_path / "latest").unlink()
    with pytest.raises(FilesError, match="has no file `latest`: its tags are global_step10"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("kind", ["optim", "model"])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_whose_file_is_absent_leaves_no_half_model(tmp_path, stage, kind):
    write(tmp_path, stage, 3)
    names = sorted((tmp_path / TAG).glob(f"*{kind}*"))
    names[-1].unlink()
    wanted = (
        "holds no .*_model_states" if len(names) == 1 else rf"lacks \*_{kind}_states.pt of rank 2: 3 ranks saved it"
    )
    with pytest.raises(FilesError, match=wanted):
        open_checkpoint(tmp_path, TAG)


@pytest.mark.parametrize("left", [0, 3, 700, -1])
@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"])
def test_a_file_that_is_cut_short_is_named(tmp_path, name, left):
    write(tmp_path, 2, 2)
    path = tmp_path / TAG / name
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(FilesError, match=rf"{name} is (cut short|not in torch.save's format)"):
        open_checkpoint(tmp_path)


def test_files_of_two_checkpoints_are_refused(tmp_path):
    write(tmp_path / "two", 2, 2)
    write(tmp_path / "three", 3, 2)
    folder = tmp_path / "two" / TAG
    for path in (tmp_path / "three" / TAG).glob("*_model_states.pt"):
        (folder / path.name).write_bytes(path.read_bytes())
    with pytest.raises(FilesError, match="files of two checkpoints"):
        open_checkpoint(folder)
    write(tmp_path / "more", 1, 3)
    stray = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    write(tmp_path / "one", 1, 1)
    (tmp_path / "one" / TAG / stray).write_bytes((tmp_path / "more" / TAG / stray).read_bytes())
    with pytest.raises(FilesError, match="of 2 ranks, and 1 saved it"):
        open_checkpoint(tmp_path / "one")


def test_ranks_that_saved_after_different_steps_are_refused(tmp_path):
    write(tmp_path / "new", 1, 2, step=torch.tensor(9.0))
    write(tmp_path / "old", 1, 2, step=8)
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (tmp_path / "new" / TAG / name).write_bytes((tmp_path / "old" / TAG / name).read_bytes())
    with pytest.raises(FilesError, match="ranks have taken different steps"):
        open_checkpoint(tmp_path / "new")


@pytest.mark.parametrize(
    "name, what",
    [
        ("layer_01-model_00-model_states.pt", "pipeline parallelism"),
        ("mp_rank_01_model_states.pt", "tensor parallelism"),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor parallelism"),
        ("layer_0_expert_3_mp_rank_00_model_states.pt", r"\(MoE\)"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", r"\(MoE\)"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path, name, what):
    write(tmp_path, 1, 1)
    (tmp_path / TAG / name).write_bytes(b"")
    with pytest.raises(FilesError, match=f"{what}.*{name}"):
        open_checkpoint(tmp_path)


def _change(path, **changes):
    saved = torch.load(path, weights_only=False)
    saved.update(changes)
    torch.save(saved, path)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"param_shapes": None}, "has no param_shapes: it was saved at stage 0"),
        ({"buffer_names": None}, "is not laid out as DeepSpeed 0.19 does it"),
        ({"mp_world_size": 2}, "tensor or pipeline parallelism"),
        ({"num_experts": [4]}, "own experts"),
        ({"param_shapes": [{"a.weight": torch.Size([7, 5])}]}, "2 flat groups, and param_shapes 1"),
        (
            {"param_shapes": [{"a.weight": torch.Size([7, 5])}, {"a.bias": torch.Size([9])}]},
            "has 70 elements, in parts of .*, and its parameters 35",
        ),
    ],
)
def test_another_kind_of_model_states_is_refused(tmp_path, changes, message):
    write(tmp_path, 2, 2)
    _change(tmp_path / TAG / "mp_rank_00_model_states.pt", **changes)
    with pytest.raises(FilesError, match=message):
        open_checkpoint(tmp_path)


def test_states_are_called_as_torch_calls_them(tmp_path):
    """DeepSpeed's CPU Adagrad keeps exp_avg_sq for torch's sum, and its CPU Lion an exp_avg_sq that it never uses."""
    write(tmp_path, 1, 1)
    path = tmp_path / TAG / "mp_rank_00_model_states.pt"
    _change(path, ds_config={"optimizer": {"type": "Lion"}})
    assert open_checkpoint(tmp_path).parameters["a.weight"].states.keys() == {"exp_avg"}
