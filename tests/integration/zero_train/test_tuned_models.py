"""What fine-tuning leaves, and who takes it: reward models that score, adapters, merged ones, folders of a stage."""

import json
import shlex
from pathlib import Path

import pytest

pytest.importorskip("trl")

import peft
import torch
import transformers

import zero_core
from examples.two_stages import QUESTION, answer, lora
from tests.integration.zero_train.test_finetune import (
    USUAL,
    chats,
    four_bits,
    losses,
    on_a_rank,
    preferences,
    stock,
    words,
    written,
)
from zero_hf import commands
from zero_train.cli.app import main
from zero_train.model import pretrained
from zero_train.settings import compose

pytestmark = [pytest.mark.promise("reward", "two-stage-commands"), pytest.mark.usefixtures("own_cache")]

HELD_OUT = 5  # rows: on two ranks the last batch has one row for one of them


def held_out(folder: Path) -> Path:
    """Pairs of which a model that likes numbers gets some wrong."""
    rows = [{"prompt": f"what is {n}?", "chosen": f" it is {n}", "rejected": " no idea"} for n in (71, 72, 73)]
    rows += [{"prompt": f"what is {n}?", "chosen": " no idea", "rejected": f" it is {n}"} for n in (74, 75)]
    assert len(rows) == HELD_OUT
    return written(folder / "held_out.jsonl", rows)


def given(model: Path, data: Path, folder: Path, *more: str) -> list[str]:
    own = [f"data.validation_path={held_out(data.parent)}", "run.evaluate_every=4", "run.evaluate_batches=null"]
    usual = words(model, data, folder, "offload=host", *own, *more, task="reward")
    return [word for word in usual if word not in ("run.evaluate_every=0", "data.validation_fraction=0")]


def validation(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "validation.jsonl").read_text().splitlines()]


def by_torch(network: torch.nn.Module, tokenizer, file: Path) -> tuple[float, float]:
    """Loss and accuracy over the pairs of a file by plain torch, one text at a time."""
    margins = []
    for row in map(json.loads, file.read_text().splitlines()):
        texts = [row["prompt"] + row[name] + tokenizer.eos_token for name in ("chosen", "rejected")]
        with torch.no_grad():
            one, other = (network(**tokenizer(text, return_tensors="pt")).logits.squeeze() for text in texts)
        margins.append(one - other)
    found = torch.stack(margins).double()
    return float(torch.nn.functional.softplus(-found).mean()), float((found > 0).double().mean())


@pytest.mark.advice("holds a reward model, which scores texts")
def test_what_is_exported_scores_and_its_validation_is_torchs_on_one_rank_and_on_two(ranks, model, tmp_path, capsys):
    """Fails if transformers draws a head of its own, or a batch of one row weighs as much as a full one."""
    data = preferences(tmp_path / "pairs.jsonl")
    best = given(model, data, tmp_path / "one", "run.keep_best=true", "run.checkpoint_every=4")
    assert main([word for word in best if word != "run.checkpoint_every=0"]) == 0
    printed = capsys.readouterr().out
    assert "nats per pair, accuracy 0." in printed and "the lowest validation loss was" in printed
    folder = tmp_path / "one" / "pretrained"
    auto = transformers.AutoModelForSequenceClassification
    network, info = auto.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and network.config.num_labels == 1
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    best = min(validation(tmp_path / "one")[1:], key=lambda line: line["loss"])
    loss, accuracy = by_torch(network.eval(), tokenizer, tmp_path / "held_out.jsonl")
    assert (best["loss"], best["accuracy"]) == (pytest.approx(loss, rel=1e-5), accuracy)
    two = [word for word in given(model, data, tmp_path / "two", "run.accumulate=1") if word != "run.accumulate=2"]
    assert ranks(2).run(on_a_rank, str(tmp_path / "cache"), main, two) == [0, 0]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    for one, other in zip(validation(tmp_path / "one"), validation(tmp_path / "two"), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_adapters_are_trained_with_the_head_and_saved_with_it(model, tmp_path, kind):
    """Fails if the head is frozen, quantised or drawn anew when the adapters are opened, or a merge leaves it out."""
    if kind == "qlora":
        pytest.importorskip("bitsandbytes")
    data = preferences(tmp_path / "pairs.jsonl")
    adapted = [f"adapter={kind}", "adapter.rank=4"]
    assert main(given(model, data, tmp_path / "run", *adapted)) == 0
    seen = validation(tmp_path / "run")
    assert seen[-1]["loss"] != seen[0]["loss"] and losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0]
    folder = tmp_path / "run" / "pretrained"
    how = {"num_labels": 1} | (four_bits() if kind == "qlora" else {})
    base = transformers.AutoModelForSequenceClassification.from_pretrained(model, **how)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    base.config.pad_token_id = tokenizer.pad_token_id
    network = peft.PeftModel.from_pretrained(base, folder).eval()
    loss, accuracy = by_torch(network, tokenizer, tmp_path / "held_out.jsonl")
    assert (seen[-1]["loss"], seen[-1]["accuracy"]) == (pytest.approx(loss, rel=1e-4), accuracy)
    if kind == "lora":  # as the error of adapter.merge=true says: merge with PEFT's merge_and_unload()
        merged = by_torch(network.merge_and_unload(), tokenizer, tmp_path / "held_out.jsonl")
        assert merged == (pytest.approx(loss, rel=1e-4), accuracy)


@pytest.mark.advice("is a reward model, which scores texts and has no head")
def test_a_reward_model_is_trained_on_and_neither_answers_nor_takes_another_task(model, tmp_path, capsys):
    """Fails if a head that writes is drawn at random for it, without a word; or its own head is drawn anew."""
    data = preferences(tmp_path / "pairs.jsonl")
    assert main(words(model, data, tmp_path / "run", "offload=host", task="reward")) == 0
    scores = tmp_path / "run" / "pretrained"
    assert main(words(scores, data, tmp_path / "more", "offload=host", "run.resume=null", task="reward")) == 0
    assert losses(tmp_path / "more")[0] < losses(tmp_path / "run")[0] / 2
    capsys.readouterr()
    assert main(["generate", f"run.dir={tmp_path / 'run'}", "generate.prompt=a"]) == 2
    assert "holds a reward model, which scores texts and writes none" in capsys.readouterr().err
    assert main(words(scores, chats(tmp_path / "chats.jsonl"), tmp_path / "sft", "offload=host")) == 2
    assert "is a reward model, which scores texts and has no head that writes them" in capsys.readouterr().err


def test_a_plan_counts_both_texts_of_a_pair(model, capsys):
    counted = []
    for task in ("sft", "dpo", "reward"):
        assert main([f"task={task}", f"model.path={model}", "run.dry=true", "offload=host", *USUAL[:3]]) == 0
        counted.append(capsys.readouterr().out)
    tokens = [int(text.split(" steps of ")[1].split(" ")[0].replace(",", "")) for text in counted]
    assert tokens[1] == tokens[2] == 2 * tokens[0]


ADAPTED = ("adapter=lora", "adapter.rank=8", "adapter.alpha=16", "adapter.merge=true")


def adapted(network, folder, line):
    """`network` with adapters, whose values are those with which the run of this command begins."""
    drawn = pretrained.build(folder, compose.compose(line))
    zero_core.materialise(drawn)
    values = {name: value for name, value in drawn.state_dict().items() if "lora_" in name}
    network = peft.get_peft_model(network, lora())
    assert values and not network.load_state_dict(values, strict=False).unexpected_keys
    return network


def test_two_commands_have_the_losses_of_trl_alone_and_its_answer(model, tmp_path, capsys):
    """Fails if a stage begins with other values than the one before has merged, or an answer is another model's."""
    begun, network = model, transformers.AutoModelForCausalLM.from_pretrained(model)
    for task, rows in (("sft", chats), ("dpo", preferences)):
        data = rows(tmp_path / f"{task}.jsonl")
        line = words(begun, data, tmp_path / task, *ADAPTED, "offload=nvme", "io.allow_memory=true", task=task)
        network = adapted(network, model, line)
        wanted = stock(model, tmp_path / "alone", data, task, network=network)
        network = network.merge_and_unload()
        assert main(line) == 0
        assert losses(tmp_path / task) == pytest.approx(wanted, rel=1e-5, abs=0)
        begun = tmp_path / task / "merged"
    said = answer(network, transformers.AutoTokenizer.from_pretrained(model))
    for folder in (tmp_path / "dpo", begun):  # with the adapter beside what SFT has merged, and merged
        capsys.readouterr()
        assert main(["generate", f"run.dir={folder}", f"generate.prompt={QUESTION}", "generate.tokens=24"]) == 0
        assert capsys.readouterr().out.strip() == said


@pytest.mark.advice(
    "is the folder of a run; name its exported model",
    "name {}, which has both",
    "write both as one model with `zero-hf merge",
)
def test_a_stage_takes_the_folder_that_it_is_told(model, tmp_path, capsys):
    """Fails if a run folder or an adapter, given as a model, ends in a message that leads nowhere."""
    data = chats(tmp_path / "chats.jsonl")

    def checked(folder, *more):
        code = main(words(folder, data, tmp_path / "next", *ADAPTED, "offload=host", "run.dry=true", *more))
        return code, capsys.readouterr().err

    def trained(name, adapted):
        assert main(words(model, data, tmp_path / name, "offload=host", *(ADAPTED[:3] if adapted else ()))) == 0
        return tmp_path / name

    whole = trained("whole", adapted=False)
    code, said = checked(whole)
    assert code == 2 and f"is the folder of a run; name its exported model, {whole / 'pretrained'}" in said
    assert checked(whole / "pretrained")[0] == 0
    alone = trained("alone", adapted=True)
    for given in (alone, alone / "pretrained"):
        code, said = checked(given)
        assert code == 2 and f"model.path={given} has an adapter, and not the model" in said
        command = said.partition("`")[2].partition("`")[0]
    assert commands.main(shlex.split(command)[1:]) == 0
    assert checked(said.strip().rpartition(" and name ")[2])[0] == 0
    code, said = checked(alone)
    assert code == 2 and f"name {alone / 'merged'}, which has both" in said
