"""task=pretrain over text that a tokenizer reads: the tokens are the tokenizer's, in every kind of data, read once."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from zero_train.cli.app import main
from zero_train.data import tokens
from zero_train.errors import ConfigError
from zero_train.settings.compose import compose

pytestmark = pytest.mark.promise("pretrain-tokens")

LINES = [f"line {i} says größer things about {i * i}, and then no more" for i in range(400)]
USUAL = ["recipe=tiny", "precision=fp32", "run.steps=6", "offload=host", "run.plots=false", "optim.lr=1e-2"]


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A folder with a tokenizer of 400 tokens, whose end of text is token 0."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<end>"], initial_alphabet=alphabet)
    made.train_from_iterator(LINES, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>").save_pretrained(folder)
    return folder


def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(20):
        (folder / f"{i}.txt").write_text("\n".join(LINES[i * 20 : i * 20 + 20]))
    return folder


def corpus(words, said=lambda _: None):
    config = compose(words)
    folder = tokens.folder_of(config)
    return tokens.load(config, transformers.AutoTokenizer.from_pretrained(folder), folder, said)


def test_tokens_are_the_tokenizers_and_documents_end(tmp_path, reader):
    """Fails if a token is lost, changed or added, documents run into one another, or a held-out one is trained on."""
    folder, tokenizer = text(tmp_path), transformers.AutoTokenizer.from_pretrained(reader)
    found = corpus([f"data.path={folder}", f"data.tokenizer={reader}", "data.sequence_length=16"])
    assert found.training.dtype == torch.int32
    documents, read = [], []
    for token in found.training.tolist() + found.validation.tolist():
        if token:
            read.append(token)
        else:
            documents.append(tokenizer.decode(read))
            read = []
    assert not read and found.training[-1] == 0
    assert sorted(documents) == sorted(file.read_text() for file in folder.iterdir())
    tokens_, targets = found.batch(3, 2, 16, seed=1)
    assert tokens_.dtype == torch.int64 and torch.equal(tokens_[:, 1:], targets[:, :-1])


def test_rows_of_text_are_read_as_documents(tmp_path, reader):
    file = tmp_path / "rows.jsonl"
    pytest.importorskip("datasets")
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    words = [f"data.path={file}", f"data.tokenizer={reader}", "data.sequence_length=16"]
    found = corpus(words)
    ends = sum(int((part == 0).sum()) for part in (found.training, found.validation))
    assert compose(words).data.kind == "jsonl" and ends == len(LINES)


def test_a_long_text_is_cut_at_a_line_and_no_token_is_lost(tmp_path, reader, monkeypatch):
    monkeypatch.setattr(tokens, "_PIECE_BYTES", 256)
    monkeypatch.setattr(tokens, "_AT_ONCE", 2)
    (tmp_path / "long.txt").write_text("\n".join(LINES) + "x" * 1000)
    found = corpus([f"data.path={tmp_path / 'long.txt'}", f"data.tokenizer={reader}", "data.sequence_length=16"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(reader)
    whole = [tokenizer.decode(part.tolist()[:-1]) for part in (found.training, found.validation)]
    assert "".join(whole) == (tmp_path / "long.txt").read_text()


def test_the_same_text_is_read_once_and_another_tokenizer_reads_it_again(tmp_path, reader):
    words = [f"data.path={text(tmp_path)}", f"data.tokenizer={reader}", "data.sequence_length=16"]
    said = []
    first, again = corpus(words, said.append), corpus(words, said.append)
    assert len(said) == 2 and first.digest == again.digest
    (tmp_path / "text" / "0.txt").write_text("something else\n" * 9)
    assert corpus(words, said.append).digest != first.digest and len(said) == 4
    file = Path(reader, "tokenizer_config.json")
    before = file.read_text()
    try:
        file.write_text(before + "\n")  # as good as another one: its files differ
        corpus(words, said.append)
    finally:
        file.write_text(before)
    assert len(said) == 6
    assert not list(tmp_path.rglob("*.partial"))


def test_a_run_learns_resumes_exports_and_is_asked(tmp_path, reader, capsys):
    """Fails if the exported folder lacks the tokenizer, or a run that continues reads other tokens."""
    folder = text(tmp_path)
    words = [*USUAL, f"data.path={folder}", f"data.tokenizer={reader}", "model.vocab_size=401"]
    words += ["run.checkpoint_every=3", "run.export=true", "run.sample_bytes=8", "run.evaluate_every=6"]
    assert main([*words, f"run.dir={tmp_path / 'run'}"]) == 0
    printed = capsys.readouterr().out
    assert "M tokens to train on" in printed and "nats/token" in printed and "--- sample ---\ndef " in printed
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
    assert main([*words, f"run.dir={tmp_path / 'run'}", "run.resume=auto"]) == 0
    assert main(["generate", f"run.dir={tmp_path / 'run'}", "generate.prompt=line", "generate.tokens=4"]) == 0
    exported = tmp_path / "run" / "pretrained"
    more = [*USUAL, f"model.path={exported}", f"data.path={folder}", f"run.dir={tmp_path / 'more'}"]
    assert main(more) == 0  # its own tokenizer
    went_on = json.loads((tmp_path / "more" / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert went_on == pytest.approx(losses[-1], abs=0.5) and went_on < losses[0] - 0.3
    (folder / "0.txt").write_text("something else\n" * 9)
    assert main([*words, f"run.dir={tmp_path / 'run'}", "run.resume=auto", "run.steps=7"]) == 2


def test_tokens_that_find_no_room_go_to_the_folder_that_is_named(tmp_path, reader, monkeypatch):
    words = [f"data.path={text(tmp_path)}", f"data.tokenizer={reader}", "data.sequence_length=16"]
    (tmp_path / "full").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "full"))
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME to another folder. Or, if the disk is full, make room"):
        corpus(words)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert corpus(words).unit == "token"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.vocab_size=300"], "set model.vocab_size=40"),
        (["data.sequence_length=4000"], "tokens of"),
        (["data.tokenizer=nowhere"], "has no tokenizer"),
        (["task=sft", "model.path=x"], "data.tokenizer is given and not used with task=sft"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, reader, capsys, words, said):
    given = [*USUAL, f"data.path={text(tmp_path)}", f"data.tokenizer={reader}", "model.vocab_size=401"]
    keys = {word.split("=")[0] for word in words}
    assert main([*(w for w in given if w.split("=")[0] not in keys), *words, f"run.dir={tmp_path / 'run'}"]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "run").exists()
