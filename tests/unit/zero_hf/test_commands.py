"""The command line: what it prints, and its exit codes."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

import zero_core
import zero_hf
from tests.unit.zero_deepspeed.test_checkpoint import _compare, _sharded
from tests.unit.zero_deepspeed.written import write
from zero_core.checkpoint.safetensors import open_index
from zero_hf.commands import main

CONFIGS = Path(__file__).parents[1] / "zero_deepspeed" / "configs"


@pytest.mark.promise("translate-command")
def test_translate_prints_the_table_and_the_plan_of_a_model_that_is_never_read(tmp_path, capsys):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    for where, name in ((tmp_path, "LlamaForCausalLM"), (tmp_path / "config.json", "pipeline")):
        LlamaConfig(vocab_size=100, architectures=[name], **sizes).save_pretrained(tmp_path)
        code = main(["translate", str(CONFIGS / "stage3_nvme.json"), "--world-size", "4", "--model", str(where)])
        printed = capsys.readouterr().out
        assert code == 0
        assert "zero_optimization.offload_param.max_in_cpu" in printed and "parameters={'host': 1.0" in printed
        assert ("LlamaForCausalLM of " if name != "pipeline" else "LlamaModel of ") in printed
        assert " parameters at stage 3 on 4 ranks, of each:" in printed
        assert "each step reads 0." in printed and "in /local_nvme" in printed
    assert not Path("/local_nvme").exists()


@pytest.mark.promise("translate-command")
def test_what_is_refused_and_what_cannot_be_read_exit_with_2(tmp_path, capsys):
    assert main(["translate", str(CONFIGS / "zenflow.json")]) == 2
    assert " REFUSED " in capsys.readouterr().out
    assert main(["translate", str(tmp_path / "none.json")]) == 2
    assert main(["translate", str(CONFIGS / "mics.json"), "--model", str(tmp_path / "none")]) == 2
    assert "none.json: [Errno 2]" in (said := capsys.readouterr().err) and "name a config.json or its folder (" in said
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(SystemExit):
        main(["translates"])


@pytest.mark.promise("ds-convert")
def test_convert_writes_a_checkpoint_or_safetensors(tmp_path):
    for stage, size in ((1, 2), (3, 3)):
        truth = write(tmp_path / "theirs", stage, size, client={"epoch": 3})
        assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
        model, optimizer = _sharded()
        loaded = zero_core.checkpoint.load(tmp_path / "ours", model, optimizer)
        _compare(model, optimizer, truth)
        assert (loaded.step, loaded.extra, loaded.world_size) == (9, {"epoch": 3}, size)
        shutil.rmtree(tmp_path / "theirs")
    write(tmp_path / "theirs", 3, 2)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "net"}))
    arguments = ["--weights", "--dtype", "bf16", "--model", str(tmp_path)]
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "half"), *arguments]) == 0
    assert str(open_index(tmp_path / "half")["a.weight"].dtype) == "torch.bfloat16"


def test_what_cannot_be_read_ends_the_command_with_a_sentence(tmp_path, capsys):
    assert main(["convert", str(tmp_path), str(tmp_path / "ours")]) == 2
    assert "has no file `latest`. Tags found there: none. Name the folder that" in capsys.readouterr().err
    write(tmp_path / "theirs", 1, 1)
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--dtype", "bf16"]) == 2
    assert "add --weights, or leave them out" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--weights", "--model", "/nowhere"]) == 2
    assert "/nowhere has no config.json" in capsys.readouterr().err


@pytest.mark.promise("without-zero-deepspeed")
def test_without_zero_deepspeed_a_command_says_what_to_install(monkeypatch, capsys):
    with monkeypatch.context() as patch:
        for name in [name for name in sys.modules if name.startswith("zero_hf.deepspeed")]:
            patch.delitem(sys.modules, name)
        patch.delattr(zero_hf, "deepspeed", raising=False)
        patch.setitem(sys.modules, "zero_deepspeed", None)
        assert main(["translate", str(CONFIGS / "stage1.json")]) == 2
        assert "pip install zero-deepspeed" in capsys.readouterr().err
    assert main(["translate", str(CONFIGS / "stage1.json"), "--world-size", "4"]) == 0
