"""task=sft, dpo and reward: TRL's losses, wherever the state is kept; a run that was stopped ends in the same bits."""

import json
import os
import re
import shutil

import pytest

pytest.importorskip("trl")

import peft
import torch
import transformers
import trl
from safetensors.torch import load_file

import zero_core
import zero_hf
from tests.integration.zero_hf.launching import launched
from zero_train.cli.app import main
from zero_train.data import row_sets
from zero_train.model import pretrained
from zero_train.run.loop import learning_rate
from zero_train.run.run_folder import results
from zero_train.schema import OptimConfig
from zero_train.settings import compose
from zero_train.tune import answers

pytestmark = pytest.mark.usefixtures("own_cache")

STEPS = 8
USUAL = [
    *("precision=fp32", f"run.steps={STEPS}", "run.micro_batch=2", "run.accumulate=2", "run.evaluate_every=0"),
    *("run.plots=false", "run.export=true", "run.checkpoint_every=0", "data.sequence_length=64"),
    *("data.validation_fraction=0", "optim.lr=1e-2", "optim.warmup_steps=2", "run.threads=1", "run.report_every=1"),
]


def written(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def chats(file, turns=1):
    said = [(f"what is {i}?", f"the {i}th answer, said in a few words") for i in range(40)]
    turn = [[{"role": "user", "content": q}, {"role": "assistant", "content": answer}] for q, answer in said]
    return written(file, ({"messages": messages * turns} for messages in turn))


def preferences(file):
    rows = [{"prompt": f"what is {i}?", "chosen": f" it is {i}", "rejected": " no idea"} for i in range(40)]
    return written(file, rows)


def judged(file):
    rows = [{"prompt": f"what is {i}?", "completion": f" it is {i}", "label": i % 3 > 0} for i in range(40)]
    return written(file, rows)


def prompts(file):
    return written(file, ({"prompt": f"what is {i}?", "answer": str(i)} for i in range(40)))


def words(model, data, folder, *more, task="sft"):
    return [f"task={task}", f"model.path={model}", f"data.path={data}", f"run.dir={folder}", *USUAL, *more]


def refused(given, capsys):
    """What a run that ends with exit code 2 has printed as its error."""
    assert main(given) == 2
    return capsys.readouterr().err


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


ROWS = {"sft": chats, "dpo": preferences, "reward": preferences, "kto": judged, "grpo": prompts}
OF_GRPO = {"num_generations": 2, "max_completion_length": 6}


def length(completions, answer, **_):
    """The reward of GRPO. Fails if a column that holds a text is no longer one."""
    assert all(isinstance(each, str) for each in answer)
    return [len(said) / 10 for said in completions]


def four_bits():
    """What from_pretrained is given for a base of adapter=qlora."""
    how = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    return {"quantization_config": transformers.BitsAndBytesConfig(**how), "device_map": "cpu"}


def stock(model, folder, data, task="sft", adapter="none", network=None, **how_adapted):
    """The losses of TRL alone on the rows of a file."""
    from datasets import Dataset

    torch.set_num_threads(1)
    transformers.set_seed(0)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    if task == "sft":
        rows = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in rows]
    name = "Reward" if task == "reward" else task.upper()
    arguments = getattr(trl, f"{name}Config")(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=1e-2, seed=0, use_cpu=True, bf16=False, activation_checkpointing=False, logging_steps=1,
        save_strategy="no", report_to="none", **(OF_GRPO if task == "grpo" else {"max_length": 64}),
    )  # fmt: skip
    how = four_bits() if adapter == "qlora" else {}
    network = network or transformers.AutoModelForCausalLM.from_pretrained(model, **how)
    if adapter != "none":
        transformers.set_seed(0)
        how_adapted = {"r": 4, "lora_alpha": 32, "target_modules": "all-linear"} | how_adapted
        network = peft.get_peft_model(network, peft.LoraConfig(**how_adapted))
        network.get_base_model().is_loaded_in_4bit = False  # or TRL rounds the adapters to bf16
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    optim = OptimConfig(kind="adamw", lr=1e-2, warmup_steps=2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: learning_rate(optim, n + 1, STEPS) / 1e-2)
    trainer = getattr(trl, f"{name}Trainer")(
        network,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(model),
        optimizers=(optimizer, schedule),
        **({"reward_funcs": length} if task == "grpo" else {}),
    )
    trainer.train()
    found = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(found) == STEPS
    return found


def scorer(model):
    """The model of a folder with the head that a run of seed 0 draws for it, in memory."""
    torch.manual_seed(0)
    auto = transformers.AutoModelForSequenceClassification
    with pytest.warns(UserWarning, match="newly initialised: score.weight"):
        network = zero_hf.from_pretrained(auto, model, dtype=torch.float32, num_labels=1)
    zero_core.shard(network)
    zero_core.unshard(network)
    return network.train()


def given_to(task):
    """The words of a task that needs more than rows."""
    ours = "tests.integration.zero_train.test_finetune:length"
    return [f"task.reward={ours}", *(f"trl.{name}={value}" for name, value in OF_GRPO.items())] * (task == "grpo")


@pytest.mark.promise("trl-losses", "finetune-rows")
@pytest.mark.parametrize("task", list(ROWS))
def test_losses_are_those_of_trl_alone_on_every_tier(model, tmp_path, task, capsys):
    """Fails if a loss differs from TRL's by more than 1e-5 (relative), or host and nvme differ in a digit.

    Also of blocks that take a row at a time beside TRL's own head, which makes no logits.
    """
    data = ROWS[task](tmp_path / "data.jsonl")
    wanted = stock(model, tmp_path / "stock", data, task, network=scorer(model) if task == "reward" else None)
    found = {}
    for place in ("none", "host", "nvme", "rows")[: 4 if task in ("sft", "dpo", "reward") else 3]:
        by_row = ["offload=host", "offload.activations=recompute", "offload.rows=1"]
        more = [*(by_row if place == "rows" else [f"offload={place}"]), "io.allow_memory=true", *given_to(task)]
        assert main(words(model, data, tmp_path / place, *more, task=task)) == 0
        found[place] = losses(tmp_path / place)
    assert found.get("rows", wanted) == pytest.approx(wanted, rel=1e-5)
    assert found["nvme"] == pytest.approx(wanted, rel=1e-5, abs=1e-7 * (task == "grpo"))
    assert found["nvme"] == found["host"]
    assert found["none"] == pytest.approx(wanted, rel=1e-5, abs=1e-7 * (task == "grpo"))
    if task != "grpo":
        assert wanted[-1] < wanted[0]
    else:
        printed = capsys.readouterr().out
        assert any(abs(loss) > 1e-4 for loss in wanted) and f"step {STEPS}: mean reward" in printed
        assert "each token of a batch reads all parameters that are not on the device once" in printed


@pytest.mark.promise("trl-losses-ranks")
@pytest.mark.parametrize("task", ["dpo", "kto", "grpo"])
def test_adapters_beside_4_bits_have_the_losses_of_trl_alone(model, tmp_path, task):
    """Fails if the reference is another than the base: TRL's is a copy of the adapters as they begin."""
    pytest.importorskip("bitsandbytes")
    data = ROWS[task](tmp_path / "data.jsonl")
    wanted = stock(model, tmp_path / "stock", data, task, adapter="qlora")
    more = ["offload=host", "adapter=qlora", "adapter.rank=4", *given_to(task)]
    assert main(words(model, data, tmp_path / "run", *more, task=task)) == 0
    assert losses(tmp_path / "run") == pytest.approx(wanted, rel=1e-5, abs=1e-7 * (task == "grpo"))


def on_a_rank(cache, function, *given, **more):
    with launched(XDG_CACHE_HOME=cache, HF_DATASETS_CACHE=cache):
        return function(*given, **more)


@pytest.mark.promise("trl-losses-ranks")
@pytest.mark.parametrize("task", ["kto", "grpo"])
def test_two_ranks_have_the_losses_of_trl_alone_on_two(ranks, model, tmp_path, task):
    """Fails if a rank has other rows, texts or rewards than with DDP."""
    data, cache = ROWS[task](tmp_path / "data.jsonl"), str(tmp_path / "cache")
    wanted = ranks(2).run(on_a_rank, cache, stock, model, tmp_path / "stock", data, task)
    given = words(model, data, tmp_path / "run", "offload=host", *given_to(task), task=task)
    assert ranks(2).run(on_a_rank, cache, main, given) == [0, 0]
    assert losses(tmp_path / "run") == pytest.approx(wanted[0], rel=1e-5, abs=1e-7 * (task == "grpo"))


@pytest.mark.advice("or lower trl.max_completion_length")
@pytest.mark.promise("trl-losses-ranks")
def test_a_prompt_and_what_is_generated_after_it_fit_into_what_is_planned(model, tmp_path, capsys):
    """Fails if a longer text than data.sequence_length is trained on without a word, or what is advised is refused."""
    data = prompts(tmp_path / "prompts.jsonl")
    given = words(model, data, tmp_path / "run", "offload=host", "run.steps=2", *given_to("grpo"), task="grpo")
    said = refused([*given, "data.sequence_length=16"], capsys)
    assert "and up to 6 are generated after it; set data.sequence_length=" in said
    enough = re.search(r"set (data.sequence_length=\d+)", said)[1]
    assert main([*given, enough]) == 0
    assert main([*given, "data.sequence_length=16", "trl.max_completion_length=2", "run.dry=true"]) == 0


@pytest.mark.promise("finetune-adapters")
@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_adapters_are_trained_alone_and_saved_alone(model, tmp_path, kind):
    """Over a base of 4 bits with TRL's losses: fails if it is quantised in another way, trained, or changed by a tier.

    Beside a dense base the adapters begin with other values than PEFT's.
    """
    if kind == "qlora":
        pytest.importorskip("bitsandbytes")
    data, held_out = chats(tmp_path / "chats.jsonl"), tmp_path / "held_out.jsonl"
    held_out.write_text(data.read_text().splitlines()[0].replace("what is", "and what is") + "\n")
    wanted = stock(model, tmp_path / "stock", data, adapter=kind)
    assert wanted[-1] < wanted[0]
    found = {}
    for place in ("none", "host", "nvme"):
        more = (f"adapter={kind}", "adapter.rank=4", "adapter.merge=true", f"offload={place}", "run.evaluate_every=4")
        if place == "nvme":  # of a block, whose units are frozen and trained
            more += ("offload.activations=recompute", "io.allow_memory=true")
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


@pytest.mark.promise("dora")
def test_dora_has_the_losses_of_trl_alone_on_every_tier(model, tmp_path):
    """Fails if the lengths begin with other values than those of the weights, or a tier changes a digit."""
    data = chats(tmp_path / "chats.jsonl")
    wanted = stock(model, tmp_path / "stock", data, adapter="lora", use_dora=True, use_rslora=True)
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


@pytest.mark.promise("dora", "adapter-targets")
@pytest.mark.parametrize(
    ("given", "found", "scaling"),
    [
        ("adapter.rslora=true", "dgkoquv", 32 / 4),
        ("adapter.rslora=false", "dgkoquv", 32 / 16),
        ("adapter.targets=q_proj", "q", None),
        ("adapter.targets=[q_proj,v_proj]", "qv", None),
        ("adapter.targets='.*[kv]_proj'", "kv", None),
    ],
)
def test_targets_are_a_name_or_several_or_a_pattern_and_rslora_divides_by_the_root_of_the_rank(
    model, given, found, scaling
):
    words = ["task=sft", f"model.path={model}", "adapter=lora", given, "run.dry=true"]
    adapted = {n: m for n, m in pretrained.build(model, compose.compose(words)).named_modules() if hasattr(m, "lora_A")}
    assert {name.split(".")[-1][0] for name in adapted} == set(found)
    assert scaling is None or {module.scaling["default"] for module in adapted.values()} == {scaling}


@pytest.mark.advice(
    "; set them with trl.NAME=…, or", "names no {}: {}; write MODULE", "is not a {}; write MODULE",
    "TRL refuses its settings",
)  # fmt: skip
@pytest.mark.promise("trl-settings")
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("trl.max_length=9", "trl.max_length follows from data.sequence_length"),
        ("trl.weight_decay=0.1", "trl.weight_decay is a setting of transformers' Trainer"),
        ("trl.pakcing=true", "unexpected keyword argument 'pakcing'"),
        ("trl.loss_type=x run.dry=false", "loss_type"),
        ("task=grpo task.reward=math:floor trl.num_generations=3", "TRL refuses its settings"),
        ("task=grpo task.reward=nowhere:f", "task.reward=nowhere:f names no function"),
        ("task=grpo task.reward=math:pi", "task.reward=math:pi is not a function"),
    ],
)
def test_settings_that_do_not_go_are_one_line(model, tmp_path, capsys, more, said):
    rows, two = (prompts, ["trl.num_generations=2"]) if "grpo" in more else (chats, [])
    given = words(model, rows(tmp_path / "rows.jsonl"), tmp_path / "run", "offload=host", "run.dry=true", *two)
    last = {word.partition("=")[0]: word for word in (*given, *more.split())}
    assert said in refused([*last.values()], capsys)
    assert not results(tmp_path / "run")


@pytest.mark.promise("trl-settings")
def test_trls_own_settings_pass_through(model, tmp_path):
    """Fails if packing by TRL's name is another than by ours, or a setting is dropped."""
    data = chats(tmp_path / "chats.jsonl")
    for name, more in (("ours", "task.packing=true"), ("trls", "trl.packing=true"), ("dft", "trl.loss_type=dft")):
        assert main(words(model, data, tmp_path / name, "offload=host", more, "run.steps=2")) == 0
    assert losses(tmp_path / "ours") == losses(tmp_path / "trls") != losses(tmp_path / "dft")


MARKS = "{% if message['role'] == 'assistant' %}{% generation %}"


def marking(model, file):
    """A file with the template of `model` in which {% generation %} marks answers and their ends."""
    own = transformers.AutoTokenizer.from_pretrained(model).chat_template
    said = "{{ message['content'] }}<|end|>"
    assert said in own
    file.write_text(own.replace(said, MARKS + said + "{% endgeneration %}{% else %}" + said + "{% endif %}"))
    return file


@pytest.mark.promise("answers-alone")
@pytest.mark.parametrize(("turns", "marked"), [(1, False), (1, True), (2, True)])
def test_every_answer_is_learned_from_and_nothing_else(model, tmp_path, turns, marked):
    """Fails if an answer is lost, or a question counts in the loss: as a completion, or by {% generation %}."""
    data = chats(tmp_path / "chats.jsonl", turns=turns)
    chosen = compose.compose(words(model, data, tmp_path / "run"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    if marked:
        answers.take_template(tokenizer, str(marking(model, tmp_path / "chat.jinja")))
    read = answers.mapped(row_sets.load(chosen), tokenizer, model, chosen)
    assert read.kind == (("messages",) if marked else ("prompt", "completion"))
    args = trl.SFTConfig(str(tmp_path), report_to="none", use_cpu=True, bf16=False, assistant_only_loss=marked)
    network = transformers.AutoModelForCausalLM.from_pretrained(model)
    found = trl.SFTTrainer(network, args=args, train_dataset=read.training, processing_class=tokenizer).train_dataset
    row = json.loads(data.read_text().splitlines()[7])["messages"]
    assert found[7]["input_ids"] == tokenizer.apply_chat_template(row, tokenize=True, return_dict=True)["input_ids"]
    learned = [token for token in found[7]["labels"] if token != -100]
    assert tokenizer.decode(learned) == turns * f"{row[1]['content']}<|end|>"


@pytest.mark.promise("chat-template")
def test_a_template_that_cannot_be_read_is_told(model, tmp_path, capsys):
    """Fails if a file that is missing, in another encoding or no template is not told before the run, with the key."""
    data, file = chats(tmp_path / "chats.jsonl"), tmp_path / "chat.jinja"
    given = words(model, data, tmp_path / "run", "offload=host", "run.dry=true", f"data.chat_template={file}")
    assert f"data.chat_template={file} cannot be read" in refused(given, capsys)
    for content, said in (
        (b"{{ messages }}\xff", "name a UTF-8 file"),
        (b"{{ messages }}\n{% for m in messages %}\n", "name another one with data.chat_template=FILE"),
    ):
        file.write_bytes(content)
        assert said in refused(given, capsys)
    assert marking(model, file) and main(given) == 0


@pytest.mark.advice("leaves an answer out, so all rows must end with their only answer; split")
@pytest.mark.promise("marks")
def test_marks_against_learning_are_followed_or_refused(model, tmp_path, capsys):
    """Fails if an answer is learned from, of which the row says that it is not; or what is advised does not work."""
    data = chats(tmp_path / "chats.jsonl", turns=2)
    rows = [json.loads(line)["messages"] for line in data.read_text().splitlines()]
    for row in rows:
        row[1]["weight"] = 0  # the first of two answers
    written(data, ({"messages": row} for row in rows))
    given = words(model, data, tmp_path / "run", "offload=host", "run.dry=true")
    chosen = compose.compose(given)
    for template in (None, marking(model, tmp_path / "chat.jinja")):
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        if template is not None:
            answers.take_template(tokenizer, str(template))
        read = answers.mapped(row_sets.load(chosen), tokenizer, model, chosen)
        assert read.training[3]["prompt"] == rows[3][:3] and read.training[3]["completion"] == rows[3][3:]
    assert main([*given, "task.loss_on=everything"]) == 2
    assert (
        "has `weight` 0 in message 2 of `messages`, but this task trains on all of `messages`"
        in capsys.readouterr().err
    )
    rows[5] = [{key: value for key, value in message.items() if key != "weight"} for message in rows[5]]
    written(data, ({"messages": row} for row in rows))
    assert f"all rows must end with their only answer; split {data}, line 6 into rows" in refused(given, capsys)
    pairs = [{"messages": row[:2] if at == 5 else row} for at, row in enumerate(rows)]
    written(data, [*pairs, {"messages": rows[5]}][:40])
    assert main(given) == 0


@pytest.mark.promise("answers-alone")
def test_answers_that_trl_would_not_find_are_refused_with_their_line(model, tmp_path, capsys):
    """Fails if all tokens are learned from without a word, or what the error offers is refused too."""
    data = chats(tmp_path / "chats.jsonl")
    lines = data.read_text().splitlines()
    lines[4] = lines[4].replace("]}", ', {"role": "user", "content": "thanks"}]}')
    data.write_text("\n".join(lines) + "\n")
    given = words(model, data, tmp_path / "run", "offload=host", "run.dry=true")
    said = refused(given, capsys)
    assert f"{data}, line 5 has several answers to learn, which neither the chat template of model.path={model}" in said
    assert main([*given, "task.loss_on=everything"]) == 0
    assert main([*given, f"data.chat_template={marking(model, tmp_path / 'chat.jinja')}"]) == 0
    pairs = [json.loads(line)["messages"] for line in data.read_text().splitlines()]
    written(data, ({"messages": messages[:2]} for messages in pairs))
    assert main(given) == 0
    assert not results(tmp_path / "run")


@pytest.mark.advice("bring its rows back, or continue from its weights")
@pytest.mark.promise("finetune-0-2")
def test_a_fine_tune_of_0_2_goes_on_from_its_weights(model, tmp_path, capsys):
    """Fails if other rows are drawn in silence, or what the sentence offers is refused."""
    data = chats(tmp_path / "chats.jsonl")
    given = words(model, data, tmp_path / "old", "offload=host", "run.checkpoint_every=4")
    assert main([*given, "run.steps=4"]) == 0
    (tmp_path / "old" / "data.json").write_text('{"digest": "40 rows with SHA-256 0"}')
    before = losses(tmp_path / "old")
    said = refused([*given, "run.resume=auto"], capsys)
    assert f"bring its rows back, or continue from its weights with run.resume={tmp_path / 'old'} and another" in said
    more = words(model, data, tmp_path / "new", "offload=host", f"run.resume={tmp_path / 'old'}")
    assert main(more) == 0
    assert losses(tmp_path / "new")[0] < before[0]


@pytest.mark.promise("long-rows")
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
    written(data, rows)
    given = ["offload=host", "run.steps=2", "run.plots=true", *more]
    short = [word for word in words(model, data, tmp_path / "run", *given, task=task) if word != "run.plots=false"]
    assert main(short) == 0
    printed = capsys.readouterr().out
    assert printed.index("20 of 40 rows to train on are longer than data.sequence_length=64") < printed.index("step 1/")
    saved = json.loads((tmp_path / "run" / "data.json").read_text())["train"]
    enough, tokens, lost = (saved.pop(name) for name in ("longest", "tokens", "tokens_after_the_end"))
    assert f"; {lost:,} of {tokens:,} tokens are beyond it" in printed and 0 < lost < tokens
    nothing = ", and of 10 nothing is learned" in printed
    assert nothing == bool(more)
    assert saved == counts and f"data.sequence_length={enough} would keep all" in printed
    none = [*words(model, data, tmp_path / "none", *given, task=task), "data.sequence_length=3"]
    said = refused(none, capsys)
    assert (
        "data.sequence_length=3: each of the 40 rows to train on" in said and f"({enough} would keep every row)" in said
    )
    assert not results(tmp_path / "none")
    assert main([*none, f"data.sequence_length={enough}", f"run.dir={tmp_path / 'all'}"]) == 0
    assert "are longer than" not in capsys.readouterr().out


@pytest.mark.advice("give run.steps in its place")
@pytest.mark.promise("plan-from-config")
def test_a_plan_needs_neither_data_nor_weights(tmp_path, capsys):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    transformers.LlamaConfig(vocab_size=300, architectures=["LlamaForCausalLM"], **sizes).save_pretrained(tmp_path)
    assert main(["task=sft", f"model.path={tmp_path}", "run.dry=true", "offload=host"]) == 0
    assert "data: none" in (printed := capsys.readouterr().out) and "optimizer" in printed
    assert main(["task=sft", f"model.path={tmp_path}", "run.dry=true", "offload=host", "run.epochs=1"]) == 2
    assert "run.epochs=1 counts passes over data that this dry run does not read" in capsys.readouterr().err
    assert main(["task=sft", f"model.path={tmp_path}", "run.dry=true", "offload=host", "run.steps=7"]) == 0
    assert main(["task=sft", f"model.path={tmp_path}", "offload=host", f"run.dir={tmp_path / 'run'}"]) == 2
    assert "needs a pretrained model" in refused(["task=sft", "run.dry=true"], capsys)


@pytest.mark.advice("its tokenizer has no chat template")
def test_a_tokenizer_without_a_chat_template_takes_texts_and_no_messages(model, tmp_path, capsys):
    """Fails if such a model is refused for texts, or messages end in an error of TRL's."""
    plain = tmp_path / "plain"
    shutil.copytree(model, plain)
    (plain / "chat_template.jinja").unlink()
    data = chats(tmp_path / "chats.jsonl")
    assert "its tokenizer has no chat template" in refused(words(plain, data, tmp_path / "run", "offload=host"), capsys)
    assert main(words(model, data, tmp_path / "run", "offload=host", "run.dry=true")) == 0
    texts = written(tmp_path / "texts.jsonl", ({"text": f"{i} is followed by {i + 1}"} for i in range(40)))
    assert main(words(plain, texts, tmp_path / "run", "offload=host")) == 0
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0]


def test_tensorboard_gets_the_losses_of_the_run(model, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    data = chats(tmp_path / "chats.jsonl")
    assert main(words(model, data, tmp_path / "run", "offload=host", "tracker=tensorboard")) == 0
    read = EventAccumulator(str(tmp_path / "run" / "tracker"))
    read.Reload()
    assert [event.value for event in read.Scalars("train/loss")] == pytest.approx(losses(tmp_path / "run"))
    assert "TENSORBOARD_LOGGING_DIR" not in os.environ  # a sweep's next job has a folder of its own
