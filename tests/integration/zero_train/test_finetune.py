"""task=sft, dpo and reward: TRL's losses, wherever the state is kept; a run that was stopped ends in the same bits."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("datasets")
pytest.importorskip("peft")

import peft
import torch
import transformers
import trl
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file

import zero_core
import zero_hf
from examples.sft import tiny
from zero_train import answers, config, conversations, pretrained
from zero_train.app import main
from zero_train.errors import ConfigError
from zero_train.loop import learning_rate
from zero_train.schema import OptimConfig

STEPS = 8
USUAL = [
    *("precision=fp32", f"run.steps={STEPS}", "run.micro_batch=2", "run.accumulate=2", "run.evaluate_every=0"),
    *("run.plots=false", "run.export=true", "run.checkpoint_every=0", "data.sequence_length=64"),
    *("data.validation_fraction=0", "optim.lr=1e-2", "optim.warmup_steps=2", "run.threads=1", "run.report_every=1"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a model of 0.1 M parameters and a tokenizer of bytes, whose chat template marks no answers."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    found, tokenizer = tiny()
    found.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def chats(file, turns=1):
    said = [f"the {i}th answer, said in a few words" for i in range(40)]
    turn = [
        [{"role": "user", "content": f"what is {i}?"}, {"role": "assistant", "content": said[i]}] for i in range(40)
    ]
    file.write_text("".join(json.dumps({"messages": messages * turns}) + "\n" for messages in turn))
    return file


def preferences(file):
    rows = [{"prompt": f"what is {i}?", "chosen": f" it is {i}", "rejected": " no idea"} for i in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def words(model, data, folder, *more, task="sft"):
    return [f"task={task}", f"model.path={model}", f"data.path={data}", f"run.dir={folder}", *USUAL, *more]


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def stock(model, folder, rows, trainer_class, options, adapter="none", how_adapted=None, network=None, **more):
    """The losses of TRL alone."""
    torch.set_num_threads(1)
    transformers.set_seed(0)
    arguments = options(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_length=64,
        learning_rate=1e-2,
        seed=0,
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        **more,
    )
    how = {}
    if adapter == "qlora":
        four_bits = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        how = {"quantization_config": transformers.BitsAndBytesConfig(**four_bits), "device_map": "cpu"}
    network = network or transformers.AutoModelForCausalLM.from_pretrained(model, **how)
    if adapter != "none":
        transformers.set_seed(0)
        how_adapted = {"r": 4, "lora_alpha": 32, "target_modules": "all-linear"} | (how_adapted or {})
        network = peft.get_peft_model(network, peft.LoraConfig(**how_adapted))
        network.get_base_model().is_loaded_in_4bit = False  # or TRL rounds the adapters to bf16
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    optim = OptimConfig(kind="adamw", lr=1e-2, warmup_steps=2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: learning_rate(optim, n + 1, STEPS) / 1e-2)
    trainer = trainer_class(
        network,
        args=arguments,
        train_dataset=rows,
        processing_class=transformers.AutoTokenizer.from_pretrained(model),
        optimizers=(optimizer, schedule),
    )
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def scorer(model):
    """The model of a folder with the head that a run of seed 0 draws for it, in memory."""
    torch.manual_seed(0)
    auto = transformers.AutoModelForSequenceClassification
    with pytest.warns(UserWarning, match="newly initialised: score.weight"):
        network = zero_hf.from_pretrained(auto, model, dtype=torch.float32, num_labels=1)
    zero_core.shard(network)
    zero_core.unshard(network)
    return network.train()


@pytest.mark.parametrize("task", ["sft", "dpo", "reward"])
def test_losses_are_those_of_trl_alone_on_every_tier(model, tmp_path, task):
    """Fails if a loss differs from TRL's by more than 1e-5 (relative), or host and nvme differ in a digit."""
    from datasets import Dataset

    if task == "sft":
        data = chats(tmp_path / "data.jsonl")
        rows = [json.loads(line)["messages"] for line in data.read_text().splitlines()]
        rows = Dataset.from_list([{"prompt": row[:-1], "completion": row[-1:]} for row in rows])
        wanted = stock(model, tmp_path / "stock", rows, trl.SFTTrainer, trl.SFTConfig)
    else:
        data = preferences(tmp_path / "data.jsonl")
        rows = Dataset.from_list([json.loads(line) for line in data.read_text().splitlines()])
        if task == "dpo":
            wanted = stock(model, tmp_path / "stock", rows, trl.DPOTrainer, trl.DPOConfig)
        else:
            given = (rows, trl.RewardTrainer, trl.RewardConfig)
            wanted = stock(model, tmp_path / "stock", *given, network=scorer(model))
    found = {}
    for place in ("none", "host", "nvme"):
        folder = tmp_path / place
        assert main(words(model, data, folder, f"offload={place}", "io.allow_memory=true", task=task)) == 0
        found[place] = losses(folder)
    assert len(wanted) == STEPS and wanted[-1] < wanted[0]
    assert found["nvme"] == pytest.approx(wanted, rel=1e-5, abs=0)
    assert found["nvme"] == found["host"]
    assert found["none"] == pytest.approx(wanted, rel=1e-5, abs=0)


@pytest.mark.parametrize("task", ["sft", "dpo", "reward"])
def test_rows_at_a_time_have_the_losses_of_whole_batches(model, tmp_path, task):
    """Fails if blocks that take a row at a time and TRL's own head, which makes no logits, do not go together."""
    data, found = (chats if task == "sft" else preferences)(tmp_path / "rows.jsonl"), []
    more = ["offload=host", "offload.activations=recompute", "run.steps=3", "run.micro_batch=2"]
    for rows in ("null", "1"):
        given = words(model, data, tmp_path / rows, *more, f"offload.rows={rows}", "precision=fp32", task=task)
        assert main([*given, "precision.states=fp32"]) == 0
        found.append(losses(tmp_path / rows))
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_adapters_are_trained_alone_and_saved_alone(model, tmp_path, kind):
    """Over a base of 4 bits with TRL's losses: fails if it is quantised in another way, trained, or changed by a tier.

    Beside a dense base the adapters begin with other values than PEFT's.
    """
    from datasets import Dataset

    if kind == "qlora":
        pytest.importorskip("bitsandbytes")
    data, held_out = chats(tmp_path / "chats.jsonl"), tmp_path / "held_out.jsonl"
    held_out.write_text(data.read_text().splitlines()[0].replace("what is", "and what is") + "\n")
    rows = [json.loads(line)["messages"] for line in data.read_text().splitlines()]
    rows = Dataset.from_list([{"prompt": row[:-1], "completion": row[-1:]} for row in rows])
    wanted = stock(model, tmp_path / "stock", rows, trl.SFTTrainer, trl.SFTConfig, adapter=kind)
    assert wanted[-1] < wanted[0]
    found = {}
    for place in ("none", "host", "nvme"):
        more = (
            f"adapter={kind}",
            "adapter.rank=4",
            "adapter.merge=true",
            f"offload={place}",
            "io.allow_memory=true",
            "run.evaluate_every=4",
        )
        if place == "nvme":  # of a block, whose units are frozen and trained
            more += ("offload.activations=recompute",)
        given = words(model, data, tmp_path / place, *more, f"data.validation_path={held_out}")
        assert main([w for w in given if w not in ("run.evaluate_every=0", "data.validation_fraction=0")]) == 0
        found[place] = losses(tmp_path / place)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "nvme" / "merged").state_dict()
    before = transformers.AutoModelForCausalLM.from_pretrained(model).state_dict()
    changed = {name for name, value in merged.items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if "_proj" in name}
    assert found["nvme"] == found["host"] == pytest.approx(found["none"], rel=1e-5)
    alike = STEPS if kind == "qlora" else 1
    assert found["nvme"][:alike] == pytest.approx(wanted[:alike], rel=1e-5, abs=0)
    assert found["nvme"][-1] < found["nvme"][0]
    saved = load_file(tmp_path / "host" / "pretrained" / "adapter_model.safetensors")
    assert saved and all("lora_" in name for name in saved)
    assert not (tmp_path / "host" / "pretrained" / "model.safetensors").exists()


def test_dora_has_the_losses_of_trl_alone_on_every_tier(model, tmp_path, capsys):
    """Fails if the lengths begin with other values than those of the weights, or a tier changes a digit."""
    from datasets import Dataset

    data = chats(tmp_path / "chats.jsonl")
    rows = [json.loads(line)["messages"] for line in data.read_text().splitlines()]
    rows = Dataset.from_list([{"prompt": row[:-1], "completion": row[-1:]} for row in rows])
    how = {"use_dora": True, "use_rslora": True}
    wanted = stock(model, tmp_path / "stock", rows, trl.SFTTrainer, trl.SFTConfig, adapter="lora", how_adapted=how)
    adapted = ["adapter=lora", "adapter.rank=4", "adapter.dora=true", "adapter.rslora=true", "io.allow_memory=true"]
    found = {}
    for place in ("host", "nvme"):
        assert main(words(model, data, tmp_path / place, *adapted, f"offload={place}")) == 0
        found[place] = losses(tmp_path / place)
    assert found["nvme"] == found["host"] == pytest.approx(wanted, rel=1e-5, abs=0)
    assert wanted[-1] < wanted[0]
    saved = load_file(tmp_path / "nvme" / "pretrained" / "adapter_model.safetensors")
    assert any("magnitude" in name for name in saved)
    tuned = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(model), tmp_path / "nvme" / "pretrained"
    )
    assert torch.isfinite(tuned(input_ids=torch.tensor([[5, 6, 7]])).logits).all()
    capsys.readouterr()
    for more, said in (("adapter.merge=true", "set adapter.merge=false"), ("adapter=qlora", "choose adapter=lora")):
        given = words(model, data, tmp_path / "other", *adapted, "run.dry=true", "offload=host", more)
        assert main([word for word in given if more != "adapter=qlora" or word != "adapter=lora"]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(("given", "scaling"), [("true", 32 / 4), ("false", 32 / 16)])
def test_rslora_divides_by_the_root_of_the_rank(model, given, scaling):
    words = ["task=sft", f"model.path={model}", "adapter=lora", f"adapter.rslora={given}", "run.dry=true"]
    found = pretrained.build(model, config.compose(words)).modules()
    assert {module.scaling["default"] for module in found if hasattr(module, "lora_A")} == {scaling}


def test_every_answer_of_a_conversation_is_learned_from_and_nothing_else(model, tmp_path):
    """Fails if a template without {% generation %} loses an answer, or a question counts in the loss."""
    data = chats(tmp_path / "chats.jsonl", turns=2)
    chosen = config.compose(["task=sft", f"data.path={data}", "data.validation_fraction=0"]).data
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    read = conversations.load(chosen, "sft", tmp_path / "cache")
    found = answers.marked(read, tokenizer, model, chosen).training
    row = json.loads(data.read_text().splitlines()[7])["messages"]
    assert found[7]["input_ids"] == tokenizer.apply_chat_template(row, tokenize=True, return_dict=True)["input_ids"]
    learned = [token for token in found[7]["labels"] if token != -100]
    assert tokenizer.decode(learned) == 2 * f"{row[1]['content']}<|end|>"
    assert main(words(model, data, tmp_path / "run", "offload=host", "run.steps=30", "data.sequence_length=160")) == 0
    seen = losses(tmp_path / "run")
    assert seen[-1] < seen[0] - 0.5


def test_marks_against_learning_hold_with_the_loss_on_answers_and_are_refused_with_that_on_everything(
    model, tmp_path, capsys
):
    """Fails if a question is learned from, of which the row says that it is not."""
    data = chats(tmp_path / "chats.jsonl")
    marked = data.read_text().replace('"role": "user"', '"train": false, "role": "user"')
    data.write_text(marked)
    given = words(model, data, tmp_path / "run", "offload=host", "run.dry=true")
    assert main(given) == 0
    capsys.readouterr()
    assert main([*given, "task.loss_on=everything"]) == 2
    said = capsys.readouterr().err
    assert f"in {data} messages that are no answers are marked" in said and "remove `train` and `weight`" in said
    data.write_text(marked.replace('"train": false, ', ""))
    assert main([*given, "task.loss_on=everything"]) == 0


def test_answers_that_cannot_be_marked_are_refused_with_their_line(model, tmp_path, capsys):
    """Fails if the loss on everything, which the error offers, is refused too."""
    data = chats(tmp_path / "chats.jsonl")
    lines = data.read_text().splitlines()
    lines[4] = lines[4].replace("]}", ', {"role": "user", "content": "thanks"}]}')
    data.write_text("\n".join(lines) + "\n")
    odd = tmp_path / "model"
    shutil.copytree(model, odd)
    tokenizer = transformers.AutoTokenizer.from_pretrained(odd)
    start = "{% for message in messages %}"
    tokenizer.chat_template = tokenizer.chat_template.replace(start, "{{ messages[-1]['role'] }}" + start)
    tokenizer.save_pretrained(odd)
    given = words(odd, data, tmp_path / "run", "offload=host", "run.dry=true")
    assert main(given) == 2
    said = capsys.readouterr().err
    assert f"the answers of {data}, line 5: it has no {{% generation %}}" in said and "message 2" in said
    assert main([*given, "task.loss_on=everything"]) == 0
    pairs = [json.loads(line)["messages"] for line in data.read_text().splitlines()]
    data.write_text("".join(json.dumps({"prompt": m[:1], "completion": m[1:2]}) + "\n" for m in pairs))
    assert main(given) == 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("task", "more", "counts"),
    [
        ("sft", [], {"rows": 40, "cut": 10, "left_out": 10}),
        ("sft", ["task.packing=true"], {"rows": 40, "cut": 20, "left_out": 0}),
        ("dpo", [], {"rows": 40, "cut": 10, "left_out": 10}),
        ("reward", [], {"rows": 40, "cut": 0, "left_out": 20}),
    ],
)
def test_rows_longer_than_a_sequence_are_counted_before_the_run_and_in_its_folder(
    model, tmp_path, capsys, task, more, counts
):
    """10 rows lose the end of their answers, and 10 whole ones: fails if a run learns from less without a word."""
    data, rows = tmp_path / "rows.jsonl", []
    for at in range(40):
        asked, said = "?" * (90 if at % 4 == 0 else 3), "." * (90 if at % 4 == 1 else 4)
        pair = {"prompt": asked + str(at), "chosen": said, "rejected": "no"}
        rows.append(pair if task != "sft" else {"prompt": pair["prompt"], "completion": said})
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["offload=host", "run.steps=2", "run.plots=true", *more]
    short = [word for word in words(model, data, tmp_path / "run", *given, task=task) if word != "run.plots=false"]
    assert main(short) == 0
    printed = capsys.readouterr().out
    assert printed.index("20 of 40 rows to train on are longer than data.sequence_length=64") < printed.index("step 1/")
    saved = json.loads((tmp_path / "run" / "data.json").read_text())["train"]
    enough, tokens, lost = (saved.pop(name) for name in ("longest", "tokens", "tokens_after_the_end"))
    assert f"; {lost:,} of {tokens:,} tokens come after it" in printed and 0 < lost < tokens
    nothing = ", and of 10 nothing is learned" in printed
    assert nothing == bool(more)
    assert saved == counts and f"data.sequence_length={enough} would keep all" in printed
    none = [*words(model, data, tmp_path / "none", *given, task=task), "data.sequence_length=3"]
    assert main(none) == 2
    said = capsys.readouterr().err
    assert "data.sequence_length=3: each of the 40 rows to train on" in said and f"({enough} would keep" in said
    assert not (tmp_path / "none").exists()
    assert main([*none, f"data.sequence_length={enough}", f"run.dir={tmp_path / 'all'}"]) == 0
    assert "are longer than" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("targets", "found"),
    [("q_proj", ["q"]), ("[q_proj,v_proj]", ["q", "v"]), ("'.*[kv]_proj'", ["k", "v"])],
)
def test_targets_are_a_name_or_several_or_a_pattern(model, targets, found):
    words = ["task=sft", f"model.path={model}", "adapter=lora", f"adapter.targets={targets}", "run.dry=true"]
    names = {name for name, _ in pretrained.build(model, config.compose(words)).named_modules()}
    assert sorted({name.split(".")[-2][0] for name in names if name.endswith("lora_A")}) == found


def test_targets_that_are_nowhere_are_named(model):
    words = ["task=sft", f"model.path={model}", "adapter=lora", "adapter.targets=query", "run.dry=true"]
    with pytest.raises(ConfigError, match=r"adapter\.targets=query"):
        pretrained.build(model, config.compose(words))


def test_a_plan_needs_neither_data_nor_weights(tmp_path, capsys):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    transformers.LlamaConfig(vocab_size=300, architectures=["LlamaForCausalLM"], **sizes).save_pretrained(tmp_path)
    assert main(["task=sft", f"model.path={tmp_path}", "run.dry=true", "offload=host"]) == 0
    assert "data: none" in (printed := capsys.readouterr().out) and "optimizer" in printed
    assert main(["task=sft", f"model.path={tmp_path}", "run.dry=true", "offload=host", "run.epochs=1"]) == 2
    assert "run.epochs=1 counts passes over data that this dry run does not read" in capsys.readouterr().err
    assert main(["task=sft", f"model.path={tmp_path}", "run.dry=true", "offload=host", "run.steps=7"]) == 0
    assert main(["task=sft", f"model.path={tmp_path}", "offload=host", f"run.dir={tmp_path / 'run'}"]) == 2
    assert main(["task=sft", "run.dry=true"]) == 2
    assert "needs a pretrained model" in capsys.readouterr().err


def started(given, until, number):
    """Starts a run in a process, sends it `number` once it has printed `until`, and returns its exit code."""
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "zero_train", *given]
    with subprocess.Popen(command, cwd=root, env=os.environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if re.match(until, line):
                process.send_signal(number)
                break
        process.stdout.read()
    return process.returncode


def test_a_run_that_was_killed_or_interrupted_ends_in_the_same_bits(model, tmp_path):
    """kill -9 after step 5, then Ctrl-C after step 7; the checkpoints are of steps 3, 6 and the one of Ctrl-C."""
    data = chats(tmp_path / "chats.jsonl")
    more = ["offload=nvme", "io.allow_memory=true", "run.checkpoint_every=3"]
    assert main(words(model, data, tmp_path / "whole", *more)) == 0
    given = words(model, data, tmp_path / "stopped", *more, "run.resume=auto")
    assert started(given, r"step 5/", signal.SIGKILL) == -signal.SIGKILL
    assert started(given, r"step 7/", signal.SIGINT) in (130, 0)  # 0: it was the last step's turn already
    assert main(given) == 0
    assert main(given) == 0  # nothing is left to train
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    whole, stopped = (load_file(tmp_path / name / "pretrained" / "model.safetensors") for name in ("whole", "stopped"))
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)


def test_a_tokenizer_without_a_chat_template_takes_texts_and_no_messages(model, tmp_path, capsys):
    """Fails if such a model is refused for texts, or messages end in an error of TRL's."""
    plain = tmp_path / "plain"
    shutil.copytree(model, plain)
    (plain / "chat_template.jinja").unlink()
    data = chats(tmp_path / "chats.jsonl")
    assert main(words(plain, data, tmp_path / "run", "offload=host")) == 2
    assert "its tokenizer has no chat template" in capsys.readouterr().err
    assert main(words(model, data, tmp_path / "run", "offload=host", "run.dry=true")) == 0
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{i} is followed by {i + 1}"}) + "\n" for i in range(40)))
    assert main(words(plain, texts, tmp_path / "run", "offload=host")) == 0
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0]


def test_tensorboard_gets_the_losses_of_the_run(model, tmp_path, capsys, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    data = chats(tmp_path / "chats.jsonl")
    assert main(words(model, data, tmp_path / "run", "offload=host", "tracker=tensorboard")) == 0
    read = EventAccumulator(str(tmp_path / "run" / "tracker"))
    read.Reload()
    assert [event.value for event in read.Scalars("train/loss")] == pytest.approx(losses(tmp_path / "run"))
    assert "TENSORBOARD_LOGGING_DIR" not in os.environ  # a sweep's next job has a folder of its own
    found = importlib.util.find_spec
    missing = lambda name, *more: None if name == "wandb" else found(name, *more)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", missing)
    assert main(words(model, data, tmp_path / "other", "offload=host", "tracker=wandb")) == 2
    assert "tracker=wandb needs wandb, which is not installed" in capsys.readouterr().err


def test_a_missing_package_is_named_with_the_extra_that_has_it(model, tmp_path, capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "trl" else found(name, *more))
    assert main(words(model, chats(tmp_path / "chats.jsonl"), tmp_path / "run", "offload=host")) == 2
    assert "task=sft needs trl, which is not installed; pip install 'zero-train[finetune]'" in capsys.readouterr().err


def test_ten_random_moments_of_kill_and_ctrl_c(model, tmp_path):
    """Fails if a run that was killed or interrupted ten times, anywhere from its start on, ends in other bits."""
    data = chats(tmp_path / "chats.jsonl")
    more = ["offload=nvme", "io.allow_memory=true", "run.checkpoint_every=4", "run.steps=40"]
    steady = [word for word in words(model, data, tmp_path, *more) if word not in (f"run.steps={STEPS}",)]
    whole, given = (
        [*(w for w in steady if w[:7] != "run.dir"), f"run.dir={tmp_path / n}"] for n in ("whole", "stopped")
    )
    assert main(whole) == 0
    given.append("run.resume=auto")
    chosen = random.Random(5)
    codes = []
    for _ in range(10):
        command = [sys.executable, "-m", "zero_train", *given]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, cwd=Path(__file__).parents[3], env=os.environ, **quiet) as process:
            try:
                process.wait(chosen.uniform(1, 15))
            except subprocess.TimeoutExpired:
                process.send_signal(chosen.choice([signal.SIGKILL, signal.SIGINT]))
        codes.append(process.returncode)
    assert set(codes) <= {0, 130, -signal.SIGINT, -signal.SIGKILL} and len(set(codes)) > 1, codes
    assert main(given) == 0
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    one, other = (load_file(tmp_path / name / "pretrained" / "model.safetensors") for name in ("whole", "stopped"))
    assert all(torch.equal(one[name], other[name]) for name in one)
