"""Several sets of rows, passes over them, validation losses, the best checkpoint and an early end.

What would have to break: rows that come in another order on other ranks or after a resume, a validation loss that is
not torch's over all tokens that are held out, or an end that a resumed run forgets.
"""

import json
import shutil

import pytest

pytest.importorskip("trl")

import torch
import transformers
from safetensors.torch import load_file

from tests.integration.zero_train.test_finetune import chats, losses, on_a_rank, refused
from zero_train.cli.app import main
from zero_train.data import row_sets
from zero_train.model import pretrained
from zero_train.run.run_folder import results
from zero_train.settings import compose
from zero_train.tune import validation as evaluating

pytestmark = pytest.mark.usefixtures("own_cache")

USUAL = ["task=sft", "precision=fp32", "offload=host", "run.plots=false", "run.report_every=1", "run.threads=1"]
USUAL += ["data.sequence_length=96", "optim.lr=1e-2", "optim.warmup_steps=2", "run.micro_batch=2", "run.export=true"]
USUAL += ["run.checkpoint_every=4", "run.evaluate_every=4", "run.evaluate_batches=null", "data.validation_fraction=0.2"]


@pytest.fixture
def two(tmp_path):
    """Two files, and the words that mix them 3 to 1."""
    first, other = chats(tmp_path / "first.jsonl"), tmp_path / "other.jsonl"
    said = "".join(line for line in first.read_text().splitlines(keepends=True)[:15])
    other.write_text(said.replace("what is", "tell me of").replace("few words", "short line, which is a longer one"))
    return f"data.sources=[{{path: {first}, weight: 3}}, {{path: {other}, weight: 1}}]"


def validation(folder):
    lines = (folder / "validation.jsonl").read_text().splitlines()
    return [(line["step"], line["loss"]) for line in map(json.loads, lines)]


def by_torch(folder, model, words):
    """The mean over all tokens of the answers that the run's own data hold out, by plain torch, row by row."""
    read = row_sets.load(compose.compose(words))
    network = transformers.AutoModelForCausalLM.from_pretrained(folder / "pretrained").eval()
    tokenizer, total, count = transformers.AutoTokenizer.from_pretrained(model), 0.0, 0
    for row in read.validation:
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        asked = tokenizer.apply_chat_template(row["messages"][:1], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"][:, :96]
        begins = len(tokenizer(asked, add_special_tokens=False)["input_ids"])
        with torch.no_grad():
            scores = network(input_ids=ids).logits[0, :-1]
        each = torch.nn.functional.cross_entropy(scores, ids[0, 1:], reduction="none")[begins - 1 :]
        total, count = total + float(each.double().sum()), count + len(each)
    return total / count


@pytest.mark.promise("epochs-mixture")
def test_a_mixture_is_the_same_on_other_ranks_and_after_a_resume_and_its_loss_is_torchs(
    ranks, model, tmp_path, two, capsys
):
    """One rank; two with half as many micro-batches; and from a checkpoint of the first, on two ranks to the end."""
    words = [*USUAL, f"model.path={model}", two, "run.epochs=0.9", "run.keep_checkpoints=9"]
    assert main([*words, "run.accumulate=2", f"run.dir={tmp_path / 'one'}"]) == 0
    said = capsys.readouterr().out
    steps = len(losses(tmp_path / "one"))
    assert f"trained {steps} steps, " in said and " rows of " in said and f"step {steps}/{steps}" in said
    cache = str(tmp_path / "cache")
    assert ranks(2).run(on_a_rank, cache, main, [*words, "run.accumulate=1", f"run.dir={tmp_path / 'two'}"]) == [0, 0]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert dict(validation(tmp_path / "two")) == pytest.approx(dict(validation(tmp_path / "one")), rel=1e-5)
    assert validation(tmp_path / "one")[-1][1] == pytest.approx(by_torch(tmp_path / "one", model, words), rel=1e-5)
    (tmp_path / "one" / "checkpoints" / "checkpoint-4").rename(tmp_path / "checkpoint-4")
    more = [*words, "run.accumulate=1", f"run.dir={tmp_path / 'more'}", f"run.resume={tmp_path / 'checkpoint-4'}"]
    assert ranks(2).run(on_a_rank, cache, main, more) == [0, 0]
    assert losses(tmp_path / "more") == pytest.approx(losses(tmp_path / "one")[4:], rel=1e-5)


@pytest.mark.promise("other-ranks")
def test_a_run_that_is_named_goes_on_with_the_rates_and_options_of_its_command(model, tmp_path):
    """At a rate of 0 both runs save the same. Fails if one goes on with the rate, or the decay, that it saved."""
    ends = []
    for decay in ("0", "5"):
        data = chats(tmp_path / "chats.jsonl")
        words = [*USUAL, f"model.path={model}", f"data.path={data}", "optim.warmup_steps=0"]
        before = ["run.steps=4", "optim.lr=0", f"optim.weight_decay={decay}", f"run.dir={tmp_path / decay}"]
        assert main([*words, *before]) == 0
        more = ["run.steps=8", "optim.weight_decay=5", f"run.dir={tmp_path / decay}_more"]
        assert main([*words, *more, f"run.resume={tmp_path / decay}"]) == 0
        lines = map(json.loads, (tmp_path / f"{decay}_more" / "metrics.jsonl").read_text().splitlines())
        ends.append([(line["loss"], line["learning_rate"]) for line in lines])
    assert ends[0] == ends[1] and ends[0][-1][1] == pytest.approx(1e-3)  # optim.final_fraction=0.1 of optim.lr


@pytest.mark.promise("validation-best")
def test_the_best_checkpoint_is_kept_and_exported_and_an_early_end_is_remembered(model, tmp_path, capsys, monkeypatch):
    """Losses are made up, and the second is the lowest: fails if the last weights are exported, or a run goes on."""
    made = iter([9.0, 3.0, 2.0, 2.5, 2.4, 1.0])
    monkeypatch.setattr(evaluating, "mean_loss", lambda *given: next(made))
    data = chats(tmp_path / "chats.jsonl")
    words = [*USUAL, f"model.path={model}", f"data.path={data}", f"run.dir={tmp_path / 'run'}"]
    words += ["run.epochs=8", "run.keep_best=true", "run.patience=2", "run.keep_checkpoints=1"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "stopping after step 16: the last 2 validation losses did not fall" in said
    assert "the lowest validation loss was 2.0000 nats per token, after step 8" in said
    there = json.loads((tmp_path / "run" / "best.json").read_text())
    assert there == {"step": 8, "loss": 2.0, "checkpoint": "checkpoints/checkpoint-8"}
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("checkpoint-*"))
    assert kept == ["checkpoint-16", "checkpoint-8"]
    weights = load_file(tmp_path / "run" / "pretrained" / "model.safetensors")
    assert main([*words, "run.resume=auto"]) == 0  # nothing is left to train
    assert len(losses(tmp_path / "run")) == 16
    again = load_file(tmp_path / "run" / "pretrained" / "model.safetensors")
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "checkpoint-8")
    capsys.readouterr()
    assert main([*words, "run.resume=auto"]) == 1
    assert "checkpoint-8 is gone; set run.keep_best=false to export the last step's" in capsys.readouterr().err
    assert main([*words, "run.resume=auto", "run.keep_best=false"]) == 0
    last = load_file(tmp_path / "run" / "pretrained" / "model.safetensors")
    assert not all(torch.equal(weights[name], last[name]) for name in weights)


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A: {% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    "{% else %}Q: {{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
)


@pytest.mark.promise("generation-mark-end")
def test_an_end_of_answers_that_is_not_learned_is_told_and_the_way_out_works(model, tmp_path, capsys):
    """Fails if TRL no longer warns of it, or warns of a template that marks the end."""
    data, file = chats(tmp_path / "chats.jsonl"), tmp_path / "chat.jinja"
    words = [*USUAL, f"model.path={model}", f"data.path={data}", f"data.chat_template={file}", "run.steps=2"]
    outside = TEMPLATE.replace("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>")
    for name, template, said in (("outside", outside, 1), ("inside", TEMPLATE, 0)):
        file.write_text(template)
        assert main([*words, f"run.dir={tmp_path / name}"]) == 0
        told = capsys.readouterr()
        assert (told.out + told.err).count("does not include the assistant turn's end-of-turn token") == said


@pytest.mark.promise("chat-template")
@pytest.mark.advice("correct the row or the template, or name")
def test_a_template_of_a_file_is_learned_from_and_exported_and_a_row_that_it_refuses_is_told(
    model, tmp_path, capsys, monkeypatch
):
    """Fails if the tokenizer's own template is used, or a template's own error ends in a traceback without a place."""
    data, file = chats(tmp_path / "chats.jsonl"), tmp_path / "chat.jinja"
    words = [*USUAL, f"model.path={model}", f"data.path={data}", f"data.chat_template={file}", "run.steps=2"]
    file.write_text(TEMPLATE)
    assert main([*words, f"run.dir={tmp_path / 'run'}"]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "pretrained")
    asked = [{"role": "user", "content": "hm?"}]
    assert tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True) == "Q: hm?\nA: "
    assert json.loads((tmp_path / "run" / "data.json").read_text())["train"]["longest"] < 60  # as bytes of that text
    capsys.readouterr()
    refuses = "{% if messages[0].content == 'what is 7?' %}{{ raise_exception('no sevens') }}{% endif %}"
    file.write_text(refuses + TEMPLATE)
    said = refused([*words, f"run.dir={tmp_path / 'other'}"], capsys)
    assert f"the chat template fails for {data}, line 8: no sevens; correct the row or the template, or name" in said, (
        said
    )
    with monkeypatch.context() as patch:  # where the model is read before TRL has the rows
        patch.setattr(pretrained, "build", lambda *_: pytest.fail("the model is read"))
        assert main([*words, f"run.dir={tmp_path / 'other'}", "adapter=lora", "adapter.dora=true"]) == 2
    assert (
        f"the chat template fails for {data}, line 8: no sevens; correct the row or the template, or name"
        in capsys.readouterr().err
    )
    marked = "{% generation %}{% if messages[0].content != 'what is 7?' %}{{ m.content }}{% endif %}{% endgeneration %}"
    file.write_text("{% for m in messages %}" + marked + "{% endfor %}")
    assert main([*words, f"run.dir={tmp_path / 'other'}"]) == 2
    assert f"{{% generation %}} marks no answer in {data}, line 8; correct it" in capsys.readouterr().err
    assert not results(tmp_path / "other")
    assert main([*words, f"run.dir={tmp_path / 'other'}", "task.loss_on=everything"]) == 0
