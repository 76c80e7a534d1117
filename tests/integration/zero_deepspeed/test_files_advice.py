"""Advice about DeepSpeed's checkpoints that is followed: each test does what the error says, and reads one."""

import shutil
import zipfile

import pytest
import torch
import transformers

import zero_core
import zero_deepspeed as deepspeed
from tests.unit.zero_deepspeed.written import STATES, Net, Settings, classes, rewrite, write
from zero_core.errors import CheckpointError, ConfigError
from zero_deepspeed.files import FilesError, open_checkpoint

pytestmark = pytest.mark.usefixtures("process_group_ends")

TAG = "global_step10"
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}
CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": ADAMW, "zero_optimization": {"stage": 3}}


def made(model=None, **more):
    model = model or Net()
    return deepspeed.initialize(model=model, config=CONFIG | more, model_parameters=model.groups())[0]


def reads(folder, truth, tag=None):
    """Every master and state is there."""
    found = open_checkpoint(folder, tag)
    for name, states in truth.values.items():
        for state in STATES:
            pieces = found.tensors[f"model.{name}" if state == "fp32" else f"optim.state.{name}.{state}"]
            assert torch.equal(pieces.read(0, states[state].numel()), states[state].reshape(-1))


def refused(folder, part, tag=None):
    with pytest.raises(FilesError) as raised:
        open_checkpoint(folder, tag)
    assert part in str(raised.value), raised.value


@pytest.mark.promise("ds-damaged")
def test_the_folder_and_the_tag_are_named(tmp_path):
    truth = write(tmp_path / "run", 2, 2)
    way_out = "Name the folder that save_checkpoint was given, and with tag= one of the tags found in that folder"
    refused(tmp_path / "none", f"Tags found there: none. {way_out}")
    reads(tmp_path / "run", truth)
    for latest, fact in (("global_step20", "has no tag 'global_step20'"), (None, "has no file `latest`")):
        (tmp_path / "run" / "latest").unlink()
        if latest is not None:
            (tmp_path / "run" / "latest").write_text(f"{latest}\n")
        refused(tmp_path / "run", f"{fact}. Tags found there: global_step10. {way_out}")
        reads(tmp_path / "run", truth, TAG)
    reads(tmp_path / "run" / TAG, truth)


@pytest.mark.promise("ds-damaged", "ds-advice")
@pytest.mark.parametrize(
    ("stage", "away", "strays", "fact"),
    [
        (
            2,
            "",
            "*_model_states.pt",
            "files of another run, or of pipeline, tensor or expert parallelism: mp_rank_00_model",
        ),
        (3, "", "zero_pp_rank_2_*", "zero_pp_rank_2_mp_rank_00_model_states.pt, zero_pp_rank_2_mp_rank_00_optim"),
        (3, "*_optim_states.pt", "", "absent files of its 2 ranks: zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        (3, "zero_pp_rank_1_*_model_states.pt", "", "of its 2 ranks: zero_pp_rank_1_mp_rank_00_model_states.pt"),
        (2, "mp_rank_00_model_states.pt", "", "mp_rank_00_model_states.pt is absent"),
    ],
)
def test_the_files_of_one_save_are_put_into_one_folder(tmp_path, stage, away, strays, fact):
    """Those of another run are removed, and those of all ranks copied to it."""
    truth, _ = write(tmp_path / "run", stage, 2), write(tmp_path / "other", 3, 3 if "_2_" in strays else 2)
    folder, moved = tmp_path / "run" / TAG, tmp_path / "elsewhere"
    moved.mkdir()
    own = {path.name for path in folder.iterdir()}
    for path in list(folder.glob(away or "none")):
        path.rename(moved / path.name)
    for path in (tmp_path / "other" / TAG).glob(strays or "none"):
        if path.name not in own:
            shutil.copy(path, folder)
    refused(tmp_path / "run", fact)
    refused(tmp_path / "run", "Copy the files of all ranks to one folder, and remove files of other runs")
    for path in list(moved.iterdir()):
        path.rename(folder / path.name)
    for name in {path.name for path in folder.iterdir()} - own:
        (folder / name).unlink()
    reads(tmp_path / "run", truth)


def _cut(length):
    return lambda path: path.write_bytes(path.read_bytes()[:length])


def _old_format(path):
    with classes():
        torch.save(torch.load(path, weights_only=False), path, _use_new_zipfile_serialization=False)


@pytest.mark.promise("ds-damaged", "ds-advice")
@pytest.mark.parametrize(
    "damage",
    [
        *map(_cut, (0, 3, 700, -1)),
        # the pickle asks for what is not on its stack
        lambda path: rewrite(path, lambda name, data: b"\x80\x02R." if name.endswith("data.pkl") else data),
        # a tensor's record is shorter than the tensor, whose values would be those of what lies behind it
        lambda path: rewrite(path, lambda name, data: data[:4] if "/data/" in name else data),
        lambda path: rewrite(path, lambda name, data: data, zipfile.ZIP_DEFLATED),
        _old_format,
    ],
)
@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"])
def test_a_damaged_file_is_copied_or_saved_anew(tmp_path, name, damage):
    truth = write(tmp_path / "run", 2, 2)
    shutil.copytree(tmp_path / "run", tmp_path / "theirs")
    damage(tmp_path / "run" / TAG / name)
    refused(tmp_path / "run", f"{name} is cut short, damaged or not as torch.save writes it")
    refused(tmp_path / "run", "Copy it again, or save it again with a current DeepSpeed")
    shutil.copyfile(tmp_path / "theirs" / TAG / name, tmp_path / "run" / TAG / name)
    reads(tmp_path / "run", truth)


@pytest.mark.promise("ds-swap-files")
def test_masters_on_nvme_are_saved_anew_without(tmp_path):
    """Their files of states are empty, and swap files lie beside them."""
    write(tmp_path, 3, 1)
    path = tmp_path / TAG / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    with classes():
        saved = torch.load(path, weights_only=False)
        saved["optimizer_state_dict"]["fp32_flat_groups"] = [torch.empty(0), torch.empty(0)]
        torch.save(saved, path)
    (tmp_path / TAG / "offloaded_tensors").mkdir()
    refused(tmp_path, "save it again without nvme in offload_optimizer. Or save the weights with")
    shutil.rmtree(tmp_path)
    reads(tmp_path, write(tmp_path, 3, 1))


class Learner(Net):
    def forward(self, x):
        return {"loss": self.head(torch.tanh(self.a(x))).square().mean()}


def resumed(folder):
    """The weights after the step that follows a Trainer's checkpoint."""
    arguments = transformers.TrainingArguments(
        str(folder.parent), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", max_steps=11,
        weight_decay=0.1, remove_unused_columns=False, lr_scheduler_type="constant",
    )  # fmt: skip
    torch.manual_seed(0)
    zero_hf = pytest.importorskip("zero_hf")
    trainer = zero_hf.sharded(transformers.Trainer)(Learner(), arguments, train_dataset=[{"x": torch.ones(5)}] * 8)
    trainer.train(resume_from_checkpoint=str(folder))
    assert trainer.state.global_step == 11
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.promise("ds-client-state")
def test_a_class_of_the_clients_is_named_when_a_trainers_checkpoint_is_converted(tmp_path):
    """Fails if a Trainer, which takes no list of classes, does not go on from what the error says to make."""
    plain, folder = tmp_path / "plain" / "checkpoint-10", tmp_path / "run" / "checkpoint-10"
    for each, client in ((plain, {}), (folder, {"settings": Settings()})):
        write(each, 2, 2, client=client)
        state = transformers.TrainerState(global_step=10, max_steps=11, train_batch_size=8)
        state.save_to_json(str(each / "trainer_state.json"))
        schedule = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(Net().groups(), lr=1e-2), lambda _: 1.0)
        torch.save(schedule.state_dict(), each / "scheduler.pt")
    with pytest.raises(
        FilesError,
        match="zero-hf convert FOLDER OUT .*FOLDER is checkpoint-N, and OUT is checkpoint-N/zero",
    ):
        resumed(folder)
    main = pytest.importorskip("zero_hf.commands").main
    name = f"{Settings.__module__}.Settings"
    assert main(["convert", str(folder), str(folder / "zero"), "--inert", name]) == 0
    wanted, found = resumed(plain), resumed(folder)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


@pytest.mark.advice("build the optimizer with {}={}")
def test_the_weights_of_another_optimizer_are_loaded_or_the_same_optimizer_is_built(tmp_path):
    truth = write(tmp_path / "uncorrected", 2, 2, options={"bias_correction": False})
    engine = made()
    with pytest.raises(ConfigError, match="load the weights alone, by engine.load_checkpoint"):
        engine.load_checkpoint(tmp_path / "uncorrected")
    engine.load_checkpoint(tmp_path / "uncorrected", load_module_only=True)
    assert torch.equal(engine.module.a.weight.detach(), truth.values["a.weight"]["fp32"])
    engine.destroy()
    write(tmp_path / "decoupled", 2, 2)
    with_l2 = {"type": "Adam", "params": {"adam_w_mode": False}}
    engine = made(optimizer=with_l2)
    with pytest.raises(CheckpointError, match="build the optimizer with decoupled_weight_decay=True"):
        engine.load_checkpoint(tmp_path / "decoupled")
    engine.destroy()
    engine = made()
    engine.load_checkpoint(tmp_path / "decoupled")
    assert engine.global_steps == 10
    engine.destroy()


@pytest.mark.advice("frozen parameters: save zero_core.trained_state_dict(engine.module)")
def test_an_engine_loads_and_saves_in_the_ways_that_it_names(tmp_path):
    engine = made()
    engine.save_checkpoint(tmp_path / "run", tag="first", save_latest=False)
    with pytest.warns(UserWarning, match="nothing was loaded: give a tag, or another folder"):
        assert engine.load_checkpoint(tmp_path / "run") == (None, None)
    assert engine.load_checkpoint(tmp_path / "run", "first")[0] == str(tmp_path / "run" / "first")
    engine.save_checkpoint(tmp_path / "other")
    assert engine.load_checkpoint(tmp_path / "other")[0] == str(tmp_path / "other" / "global_step0")
    with pytest.raises(ConfigError, match="_model cannot exclude frozen parameters: save zero_core.trained_state_d"):
        engine.save_16bit_model(tmp_path / "weights", exclude_frozen_parameters=True)
    torch.save(zero_core.trained_state_dict(engine.module), tmp_path / "trained.pt")
    with pytest.raises(ConfigError, match="load your weights into the model before initialize"):
        engine.load_checkpoint(tmp_path / "run", custom_load_fn=print)
    trained = {name: value.clone() for name, value in engine.module.state_dict().items() if name != "frozen.weight"}
    engine.destroy()
    torch.manual_seed(1)
    model = Net()
    assert not torch.equal(model.a.weight, trained["a.weight"])
    model.load_state_dict(torch.load(tmp_path / "trained.pt"), strict=False)
    engine = made(model)
    loaded = engine.module.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in trained.items())
    engine.destroy()


@pytest.mark.advice("without an optimizer. Read the weights")
def test_the_weights_of_a_file_without_shapes_are_read_by_torch(tmp_path):
    """As it is saved at stage 0: torch reads it without executing anything, too."""
    truth = write(tmp_path, 2, 2)
    path = tmp_path / TAG / "mp_rank_00_model_states.pt"
    torch.save(torch.load(path, weights_only=True) | {"param_shapes": None}, path)
    refused(tmp_path, 'Read the weights of this file with torch.load(path, weights_only=True)["module"]')
    model = Net()
    model.load_state_dict(torch.load(path, weights_only=True)["module"])
    assert torch.equal(model.a.weight, truth.values["a.weight"]["fp32"])


@pytest.mark.promise("ds-refused")
def test_the_checkpoint_that_a_universal_one_was_made_of_is_read(tmp_path):
    truth = write(tmp_path / "plain", 1, 2)
    (tmp_path / "universal" / TAG / "zero").mkdir(parents=True)
    (tmp_path / "universal" / "latest").write_text(TAG)
    refused(tmp_path / "universal", "Name the checkpoint that was converted to it")
    reads(tmp_path / "plain", truth)
