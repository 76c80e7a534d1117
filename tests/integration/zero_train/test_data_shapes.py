"""Rows in the shapes that people publish: what TRL makes of each is what it makes of rows that were written for it.

Fails if a token, a label or a row differs, or if a refused file is not accepted once its sentence is followed.
"""

import gzip
import json

import pytest

pytest.importorskip("trl")

import trl
from datasets import Dataset

from examples.sft import tiny
from zero_train.data import row_sets
from zero_train.settings import compose
from zero_train.tune import answers


def user(text, **more):
    return {"role": "user", "content": text, **more}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


SYSTEM, ASKED, SAID = {"role": "system", "content": "be brief"}, [user("2+2?")], [assistant("4")]
CHAT = {"messages": ASKED + SAID}
PAIR = {"prompt": ASKED, "completion": SAID}
LONGER = {"messages": [*ASKED, *SAID, user("3+3?"), assistant("6")]}
TEXTS = {"prompt": "2+2?", "completion": "4"}
SHARED = {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}
ALPACA = {"instruction": "add", "input": "2, 2", "output": "4"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"x": 2}}}
CALLS = {"messages": [*ASKED, assistant(None, tool_calls=[CALL]), {"role": "tool", "content": "4"}, *SAID]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"x": {"type": "number"}}}}]
PREFERENCE = {"prompt": ASKED, "chosen": SAID, "rejected": [assistant("5")]}
WHOLE = {"chosen": [*ASKED, *SAID], "rejected": [*ASKED, assistant("5")]}
WORDS = {"prompt": "2+2?", "chosen": " 4", "rejected": " 5"}
JUDGED = {"prompt": "2+2?", "completion": " 4"}
# {% generation %} marks answers; tools and calls are shown.
MARKING = (
    "{{ tools or '' }}{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content or m.tool_calls }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def chat(*messages):
    return {"messages": [*messages]}


def asks(*messages, answers=SAID):
    return {"prompt": [*messages], "completion": answers}


def shape(given, wanted=None, task="sft", file="a.jsonl"):
    """(name and content of a file, its task, rows for TRL as they could have been written).

    given: a row or several, or bytes. wanted: the same as `given` where it is left out.
    """
    rows, wanted = (found if isinstance(found, list) else [found] for found in (given, wanted or given))
    if isinstance(given, bytes):
        return file, given, task, wanted
    return file, rows if file.endswith("parquet") else lines(*rows), task, wanted


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


TOLD = {**CALLS, "tools": json.dumps(TOOLS)}
CALLING, ROUND = chat(*ASKED, assistant("", tool_calls=[CALL])), SHARED["conversations"]
RESULT = [{"from": "function_call", "value": json.dumps(CALL["function"])}, {"from": "observation", "value": "4"}]
QUOTED = json.dumps(CHAT["messages"]).replace('"', '""')
DATES = [{"prompt": "2024-05-01", "completion": "NA"}, {"prompt": "007", "completion": "null"}]
JUDGEMENTS = [{**JUDGED, "label": True}, {**JUDGED, "label": False}]
ACCEPTED = {
    "messages": shape(CHAT, PAIR),
    "a name beside a message": shape(chat(user("2+2?", name="x"), *SAID), PAIR),
    "several answers": shape(LONGER, task="marks"),
    "an array": shape(json.dumps([CHAT, CHAT], indent=1).encode(), [PAIR, PAIR], file="a.json"),
    "gzip": shape(gzip.compress(lines(CHAT)), PAIR, file="a.jsonl.gz"),
    "BOM, CRLF, blank lines": shape(b"\xef\xbb\xbf" + lines(CHAT)[:-1] + b"\r\n\r\n\n", PAIR),
    "parquet": shape(CHAT, PAIR, file="a.parquet"),
    "parquet with nulls": shape(chat(user("2+2?"), assistant("4", name="x")), PAIR, file="a.parquet"),
    "tool calls": shape({**CALLS, "tools": TOOLS}, TOLD, "marks"),
    "tools as text": shape(TOLD, task="marks"),
    "an empty text beside calls": shape(CALLING, asks(*ASKED, answers=CALLING["messages"][1:])),
    "weight null": shape(chat(user("2+2?", weight=None), assistant("4", weight=1)), PAIR),
    "weight 0 on a question": shape(chat(user("2+2?", weight=0), *SAID), PAIR),
    "weight 0 on the first answer": shape(
        chat(*ASKED, assistant("4", weight=0), user("3+3?"), assistant("6")),
        asks(*LONGER["messages"][:3], answers=[assistant("6")]),
        "marks",
    ),
    "train": shape(chat(user("2+2?", train=False), assistant("4", train=True)), PAIR),
    "ShareGPT": shape(SHARED, PAIR),
    "ShareGPT with a system": shape({**SHARED, "system": "be brief"}, asks(SYSTEM, *ASKED)),
    "SlimOrca": shape({"conversations": [{**turn, "weight": n} for n, turn in enumerate(ROUND)]}, PAIR),
    "function_call": shape({"conversations": [ROUND[0], *RESULT, ROUND[1]]}, CALLS, "marks"),
    "Alpaca": shape(json.dumps([ALPACA]).encode(), asks(user("add\n\n2, 2")), file="a.json"),
    "Alpaca without input": shape({**ALPACA, "input": ""}, asks(user("add"))),
    "Alpaca with history": shape(
        {**ALPACA, "input": None, "history": [["a", "b"]]}, asks(user("a"), assistant("b"), user("add"))
    ),
    "Alpaca with a text": shape({**ALPACA, "text": "add: 4"}, {"text": "add: 4"}),
    "texts": shape(TEXTS),
    "texts in CSV": shape(b"prompt,completion\n2+2?,4\n", TEXTS, file="a.csv"),
    "texts in TSV": shape(b"prompt\tcompletion\n2+2?\t4\n", TEXTS, file="a.tsv"),
    "a CSV of dates and NA": shape(b"prompt,completion\n2024-05-01,NA\n007,null\n", DATES, file="a.csv"),
    "JSON of dates": shape({"prompt": "when?", "completion": "2024-05-01"}),
    "messages in CSV": shape(f'messages\n"{QUOTED}"\n'.encode(), PAIR, file="a.csv"),
    "lists of messages": shape(PAIR),
    "text with metadata": shape({"text": "words", "id": 3, "meta": {"a": 1}}, {"text": "words"}),
    "metadata of several types": shape(
        [{"text": "words", "id": 3}, {"text": "more", "id": "x"}], [{"text": "words"}, {"text": "more"}]
    ),
    "two answers in a row": shape(chat(*ASKED, *SAID, *SAID), task="marks"),
    "the assistant begins": shape(chat(*SAID, *ASKED, *SAID), task="marks"),
    "a long row": shape({"text": "x" * 5000}),
    "UltraFeedback": shape({"prompt": "2+2?", **WHOLE, "score_chosen": 9.0}, PREFERENCE, "dpo"),
    "an implicit prompt": shape(WHOLE, PREFERENCE, "dpo", "a.parquet"),
    "an implicit prompt of texts": shape({"chosen": "a b", "rejected": "a c"}, task="dpo"),
    "preferences": shape(PREFERENCE, task="dpo"),
    "preferences of texts": shape(b"prompt,chosen,rejected\n2+2?, 4, 5\n", WORDS, "dpo", "a.csv"),
    "pairs": shape(WHOLE, task="reward"),
    "pairs with a margin": shape({**WORDS, "margin": 0.5}, task="reward"),
    "judged": shape(JUDGEMENTS, task="kto"),
    "judged in CSV": shape(b"prompt,completion,label\n2+2?, 4,true\n2+2?, 4,False\n", JUDGEMENTS, "kto", "a.csv"),
}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


def taken(tmp_path, name, content, task):
    """The rows of a file as they are given to TRL, and the tokenizer."""
    path = tmp_path / name
    Dataset.from_list(content).to_parquet(path) if isinstance(content, list) else path.write_bytes(content)
    _, tokenizer = tiny()
    if task == "marks":
        tokenizer.chat_template, task = MARKING, "sft"
    words = [f"task={task}", "model=hf", "model.path=x", "data=jsonl", f"data.path={path}", "run.dir=run"]
    composed = compose.compose([*words, "data.validation_fraction=0"])
    read = row_sets.load(composed)
    return answers.mapped(read, tokenizer, tmp_path, composed) if task == "sft" else read, tokenizer


def prepared(rows, task, tokenizer, tmp_path):
    """What TRL alone would train on: tokens and labels of each row."""
    kind = {"sft": "SFT", "marks": "SFT", "dpo": "DPO", "reward": "Reward", "kto": "KTO"}[task]
    given = {"report_to": "none", "use_cpu": True, "bf16": False, "max_length": None, "per_device_train_batch_size": 2}
    if kind == "SFT":
        given["assistant_only_loss"] = "messages" in rows.column_names
    args, trainer = getattr(trl, f"{kind}Config")(str(tmp_path), **given), getattr(trl, f"{kind}Trainer")
    if task == "reward":
        found = trainer._prepare_dataset(trainer.__new__(trainer), rows, tokenizer, args, "train")
    else:
        more = {} if kind == "SFT" else {"ref_model": tiny()[0]}
        found = trainer(tiny()[0], args=args, train_dataset=rows, processing_class=tokenizer, **more).train_dataset
    columns = [name for name in found.column_names if name.endswith("ids") or name in ("labels", "label", "margin")]
    return found.select_columns(columns).to_list()


@pytest.mark.promise("bad-row", "data-shapes", "row-formats")
@pytest.mark.parametrize("name", list(ACCEPTED))
def test_trl_makes_the_same_of_a_published_shape(tmp_path, name):
    file, content, task, wanted = ACCEPTED[name]
    read, tokenizer = taken(tmp_path, file, content, task)
    found, ours = (prepared(rows, task, tokenizer, tmp_path) for rows in (read.training, Dataset.from_list(wanted)))
    assert found == ours
