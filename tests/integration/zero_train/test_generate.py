"""zero-train generate: a run folder's model answers, and what cannot answer is refused by one line."""

import io
import runpy
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from tests.integration.zero_train.helpers import COMMON
from zero_train.cli import app, generate

pytestmark = pytest.mark.promise("generate")

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tiny():
    """A Llama of 0.1 M parameters, and a tokenizer of bytes with a chat template."""
    for name in ("trl", "datasets"):
        pytest.importorskip(name)
    torch.manual_seed(0)
    return runpy.run_path(str(ROOT / "examples" / "sft.py"))["tiny"]()


def left_by_run(folder: Path, model=None, tokenizer=None, base="") -> Path:
    """A folder as a run leaves it."""
    folder.mkdir()
    OmegaConf.save(OmegaConf.create({"model": {"path": base}}), folder / "config.yaml")
    for part in (model, tokenizer):
        if part is not None:
            part.save_pretrained(folder / "pretrained")
    return folder


def said(capsys, *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = app.main(["generate", *words])
    return code, *capsys.readouterr()


@pytest.mark.advice("ask in one line")
def test_a_prompt_and_each_line_of_stdin_are_answered_alike(tiny, tmp_path, capsys, monkeypatch):
    """Fails if the chat template is left out, if the question is repeated, or if two lines see each other."""
    model, tokenizer = tiny
    run = left_by_run(tmp_path / "run", model, tokenizer)
    code, answer, _ = said(capsys, f"run.dir={run}", "generate.prompt=What, then?", "generate.tokens=8")
    asked = tokenizer("<|user|>What, then?<|end|><|assistant|>", return_tensors="pt", add_special_tokens=False)
    model.eval()
    tokens = model.generate(**asked, do_sample=False, max_new_tokens=8, pad_token_id=tokenizer.pad_token_id)
    wanted = tokenizer.decode(tokens[0, asked["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    assert (code, answer) == (0, wanted + "\n")

    monkeypatch.setattr("sys.stdin", io.StringIO("What, then?\n\nWhat, then?\n"))
    assert said(capsys, f"run.dir={run}", "generate.tokens=8")[:2] == (0, 2 * answer)


def test_a_model_of_bytes_continues_the_text(tmp_path, capsys):
    """Fails if a run of task=pretrain, which exports no tokenizer, is not answered."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    run = left_by_run(tmp_path / "run", LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)))
    code, text, _ = said(capsys, f"run.dir={run}", "generate.prompt=def ", "generate.tokens=4")
    assert code == 0
    assert text.startswith("def")
    assert len(text) > len("def \n")


@pytest.mark.parametrize("saved", [(), ("run.checkpoint_every=2",)])
def test_the_command_of_a_run_is_repeated_to_be_asked(saved, tmp_path, capsys):
    """Fails if what the error says is refused: a run that left no checkpoint, for instance, as its folder is used."""
    run = tmp_path / "run"
    command = [*COMMON, "offload=none", "run.steps=2", *saved]
    asked = [f"run.dir={run}", "generate.prompt=def", "generate.tokens=2"]
    assert "has no config.yaml; set run.dir to the folder of a run" in said(capsys, *asked)[2]
    assert app.main([*command, f"run.dir={run}"]) == 0
    way = f"run.dir={run} run.export=true run.resume=auto"
    assert f"repeat the run's command with {way}. Without a checkpoint, the run starts over" in said(capsys, *asked)[2]
    assert app.main([*command, *way.split()]) == 0
    assert said(capsys, *asked)[0] == 0


@pytest.mark.advice(
    "write zero-train generate run.dir=FOLDER", "is not a number; set", "does not exist; choose from {}"
)
@pytest.mark.parametrize(
    ("words", "named", "way"),
    [
        ("generate.prompt=x", "run.dir is not given: write zero-train generate run.dir", "run.dir=x"),
        ("run.dir={here} generate.promt=x", "generate.promt does not exist; choose", "run.dir=x generate.prompt=x"),
        ("hello", "cannot read 'hello': write zero-train generate run.dir=FOLDER", "run.dir=x generate.prompt=hello"),
        ("run.dir={here} generate.tokens=many", "is not a number; set generate.tokens=128", "run.dir=x"),
        ("run.dir={here} generate.tokens=0", "is too small; set it to 1, for instance", "run.dir=x generate.tokens=1"),
        ("run.dir={here}/nowhere", "has no config.yaml", ""),
        ("run.dir={here}/run", "has no exported model", ""),
        ("run.dir={here}/empty", "cannot be loaded: ", ""),
    ],
)
def test_what_cannot_answer_is_one_line(words, named, way, tmp_path, capsys):
    """Fails if a mistake is a traceback, another exit code than 2, or does not name what to change."""
    left_by_run(tmp_path / "run")
    left_by_run(tmp_path / "empty")
    (tmp_path / "empty" / "pretrained").mkdir()
    (tmp_path / "empty" / "pretrained" / "config.json").write_text('{"model_type": "llama"}')
    code, out, complaint = said(capsys, *words.format(here=tmp_path).split())
    assert (code, out, complaint.count("\n")) == (2, "", 1)
    assert named in complaint
    if way:
        generate._read(way.split())
