"""Advice of zero-hf's that is followed: each test makes a mistake, does what the message says, and that works.

Trainers and accelerators are in test_followed_trainer_advice.py.
"""

import sys

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import zero_core
import zero_hf
from tests.following import advised
from tests.integration.zero_hf.trainers import llama
from zero_hf import ZeroConfig

from .test_from_pretrained import load, same

pytestmark = pytest.mark.promise("hf-advice")

TOKENS = torch.arange(24).view(2, 12)


def trained(config, model=None, **options):
    """One step of a sharded model."""
    model = llama() if model is None else model
    run = zero_hf.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), ZeroConfig.of(config), **options)
    loss = model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss
    loss.backward()
    run.optimizer.step()
    run.close()
    return loss.item()


# -- settings ----------------------------------------------------------------------------------------------------------

NVME = {"optimizer": "nvme", "nvme_paths": "DRIVE"}
RECOMPUTED = [{"activations": "recompute"}, {"activations": "host"}, {"activations": "nvme"} | NVME]
BOTH = {"offload": "host", "activations": "nvme"}
MIXED = [NVME, {"activations": "host"}]
UNITS = {"host_bytes": "1GiB", "offload": "host"}


@pytest.mark.advice("give a whole number of at least {}")
@pytest.mark.parametrize(
    ("given", "advice", "ways"),
    [
        ({"rows": 1}, "write activations: recompute (or host, or nvme), or", RECOMPUTED),
        ({"offload": "nvme"}, "name a folder on your fastest drive", [{"nvme_paths": "DRIVE"}]),
        (BOTH, "write optimizer: nvme, or activations: host", MIXED),
        (UNITS, "give a whole number of at least 0, without a unit", [{"host_bytes": 1 << 30}]),
    ],
)
def test_settings_that_an_error_names_train(given, advice, ways, tmp_path):
    wanted = trained({})
    with advised(advice):
        trained(given)
    for way in ways:
        chosen = {key: str(tmp_path) if value == "DRIVE" else value for key, value in (given | way).items()}
        assert trained(chosen) == pytest.approx(wanted, rel=1e-5)


def test_settings_are_given_as_a_mapping_or_a_file(tmp_path):
    with advised("give a mapping, such as {'offload': 'host'}"):
        ZeroConfig.of(["host"])
    assert ZeroConfig.of({"offload": "host"}).offload == "host"
    file = tmp_path / "zero.yaml"
    with advised("give the path of a YAML or JSON file"):
        ZeroConfig.of(file)
    file.write_text("")
    with advised("has no settings: write some, or {} to keep everything on the device"):
        ZeroConfig.of(file)
    for text, offload in ("offload: host", "host"), ('{"offload": "host"}', "host"), ("{}", "none"):
        file.write_text(text)
        assert ZeroConfig.of(file).offload == offload


def test_without_zero_nvme_states_are_on_the_host(monkeypatch, tmp_path):
    nvme = {"offload": "nvme", "nvme_paths": str(tmp_path)}
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "zero_nvme", None)
        with advised("install it, or write offload: host"):
            trained(nvme)
        trained(nvme | {"offload": "host"})
    trained(nvme)  # it is installed


# -- models of transformers --------------------------------------------------------------------------------------------


def test_a_model_of_the_hub_is_fetched(tmp_path):
    """What the Hub's client fetched earlier stands for a download."""
    from huggingface_hub import snapshot_download

    model = llama()
    repository = tmp_path / "models--some--model"
    model.save_pretrained(repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    with advised("fetch it with huggingface_hub.snapshot_download, and give the folder that it returns"):
        load(AutoModelForCausalLM, "some/model")
    fetched = snapshot_download("some/model", cache_dir=tmp_path, local_files_only=True)
    same(load(AutoModelForCausalLM, fetched)[0], model)


@pytest.mark.advice("zero_core.save_pretrained(model, another_folder). Then load another_folder")
def test_a_model_in_a_pickle_is_saved_again(tmp_path):
    model = llama()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with advised("zero_core.save_pretrained(model, another_folder). Then load another_folder"):
        load(AutoModelForCausalLM, tmp_path)
    zero_core.save_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path), tmp_path / "another_folder")
    same(load(AutoModelForCausalLM, tmp_path / "another_folder")[0], model)


@pytest.mark.advice("holds quantised weights: load them")
def test_a_quantised_model_is_loaded_with_transformers_and_sharded_then(tmp_path):
    pytest.importorskip("bitsandbytes")
    llama(hidden_size=64).save_pretrained(tmp_path / "dense")
    eight_bits = transformers.BitsAndBytesConfig(load_in_8bit=True)
    with advised("load a quantised model with transformers, then shard it"):
        load(AutoModelForCausalLM, tmp_path / "dense", quantization_config=eight_bits)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=eight_bits, device_map="cpu")
    model.save_pretrained(tmp_path / "quantised")
    with advised("load them with AutoModelForCausalLM.from_pretrained, on every rank whole, and shard the model then"):
        load(AutoModelForCausalLM, tmp_path / "quantised")
    for again in (model, AutoModelForCausalLM.from_pretrained(tmp_path / "quantised", device_map="cpu")):
        with torch.no_grad():
            wanted = again(input_ids=TOKENS).logits
            run = zero_hf.shard(again, None, ZeroConfig(offload="host"))
            assert torch.equal(again(input_ids=TOKENS).logits, wanted)
        run.close()
