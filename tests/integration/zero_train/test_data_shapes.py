"""Rows in the shapes that people publish: what TRL makes of each is what it makes of rows that were written for it.

Fails if a token, a label or a row differs, or if a refused file is not accepted once its sentence is followed.
"""

import gzip
import json

import pytest

pytest.importorskip("trl")

import torch
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


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(*rows):
    def write(path):
        Dataset.from_list(list(rows)).to_parquet(path)

    return write


ACCEPTED = {  # name: the file, its content, the task, and rows for TRL as they could have been written
    "messages": ("a.jsonl", lines(CHAT), "sft", [PAIR]),
    "a name beside a message": ("a.jsonl", lines({"messages": [user("2+2?", name="x"), *SAID]}), "sft", [PAIR]),
    "several answers": ("a.jsonl", lines(LONGER), "marks", [LONGER]),
    "an array": ("a.json", json.dumps([CHAT, CHAT], indent=1).encode(), "sft", [PAIR, PAIR]),
    "gzip": ("a.jsonl.gz", gzip.compress(lines(CHAT)), "sft", [PAIR]),
    "BOM, CRLF, blank lines": ("a.jsonl", b"\xef\xbb\xbf" + lines(CHAT)[:-1] + b"\r\n\r\n\n", "sft", [PAIR]),
    "parquet": ("a.parquet", parquet(CHAT), "sft", [PAIR]),
    "parquet with nulls": ("a.parquet", parquet({"messages": [user("2+2?"), assistant("4", name="x")]}), "sft", [PAIR]),
    "tool calls": ("a.jsonl", lines({**CALLS, "tools": TOOLS}), "marks", [{**CALLS, "tools": json.dumps(TOOLS)}]),
    "tools as text": (
        "a.jsonl",
        lines({**CALLS, "tools": json.dumps(TOOLS)}),
        "marks",
        [{**CALLS, "tools": json.dumps(TOOLS)}],
    ),
    "an empty text beside calls": (
        "a.jsonl",
        lines({"messages": [*ASKED, assistant("", tool_calls=[CALL])]}),
        "sft",
        [{"prompt": ASKED, "completion": [assistant("", tool_calls=[CALL])]}],
    ),
    "weight null": (
        "a.jsonl",
        lines({"messages": [user("2+2?", weight=None), assistant("4", weight=1)]}),
        "sft",
        [PAIR],
    ),
    "weight 0 on a question": ("a.jsonl", lines({"messages": [user("2+2?", weight=0), *SAID]}), "sft", [PAIR]),
    "weight 0 on the first answer": (
        "a.jsonl",
        lines({"messages": [*ASKED, assistant("4", weight=0), user("3+3?"), assistant("6")]}),
        "marks",
        [{"prompt": LONGER["messages"][:3], "completion": LONGER["messages"][3:]}],
    ),
    "train": ("a.jsonl", lines({"messages": [user("2+2?", train=False), assistant("4", train=True)]}), "sft", [PAIR]),
    "ShareGPT": ("a.jsonl", lines(SHARED), "sft", [PAIR]),
    "ShareGPT with a system": (
        "a.jsonl",
        lines({**SHARED, "system": "be brief"}),
        "sft",
        [{"prompt": [SYSTEM, *ASKED], "completion": SAID}],
    ),
    "SlimOrca": (
        "a.jsonl",
        lines({"conversations": [{**turn, "weight": n} for n, turn in enumerate(SHARED["conversations"])]}),
        "sft",
        [PAIR],
    ),
    "function_call": (
        "a.jsonl",
        lines(
            {
                "conversations": [
                    SHARED["conversations"][0],
                    {"from": "function_call", "value": json.dumps(CALL["function"])},
                    {"from": "observation", "value": "4"},
                    SHARED["conversations"][1],
                ]
            }
        ),
        "marks",
        [CALLS],
    ),
    "Alpaca": ("a.json", json.dumps([ALPACA]).encode(), "sft", [{"prompt": [user("add\n\n2, 2")], "completion": SAID}]),
    "Alpaca without input": (
        "a.jsonl",
        lines({**ALPACA, "input": ""}),
        "sft",
        [{"prompt": [user("add")], "completion": SAID}],
    ),
    "Alpaca with history": (
        "a.jsonl",
        lines({**ALPACA, "input": None, "history": [["a", "b"]]}),
        "sft",
        [{"prompt": [user("a"), assistant("b"), user("add")], "completion": SAID}],
    ),
    "Alpaca with a text": ("a.jsonl", lines({**ALPACA, "text": "add: 4"}), "sft", [{"text": "add: 4"}]),
    "texts": ("a.jsonl", lines(TEXTS), "sft", [TEXTS]),
    "texts in CSV": ("a.csv", b"prompt,completion\n2+2?,4\n", "sft", [TEXTS]),
    "texts in TSV": ("a.tsv", b"prompt\tcompletion\n2+2?\t4\n", "sft", [TEXTS]),
    "a CSV of dates and NA": (
        "a.csv",
        b"prompt,completion\n2024-05-01,NA\n007,null\n",
        "sft",
        [{"prompt": "2024-05-01", "completion": "NA"}, {"prompt": "007", "completion": "null"}],
    ),
    "JSON of dates": (
        "a.jsonl",
        lines({"prompt": "when?", "completion": "2024-05-01"}),
        "sft",
        [{"prompt": "when?", "completion": "2024-05-01"}],
    ),
    "messages in CSV": (
        "a.csv",
        ('messages\n"' + json.dumps(CHAT["messages"]).replace('"', '""') + '"\n').encode(),
        "sft",
        [PAIR],
    ),
    "lists of messages": ("a.jsonl", lines(PAIR), "sft", [PAIR]),
    "text with metadata": ("a.jsonl", lines({"text": "words", "id": 3, "meta": {"a": 1}}), "sft", [{"text": "words"}]),
    "metadata of several types": (
        "a.jsonl",
        lines({"text": "words", "id": 3}, {"text": "more", "id": "x"}),
        "sft",
        [{"text": "words"}, {"text": "more"}],
    ),
    "two answers in a row": (
        "a.jsonl",
        lines({"messages": [*ASKED, *SAID, *SAID]}),
        "marks",
        [{"messages": [*ASKED, *SAID, *SAID]}],
    ),
    "the assistant begins": (
        "a.jsonl",
        lines({"messages": SAID + ASKED + SAID}),
        "marks",
        [{"messages": SAID + ASKED + SAID}],
    ),
    "a long row": ("a.jsonl", lines({"text": "x" * 5000}), "sft", [{"text": "x" * 5000}]),
    "UltraFeedback": ("a.jsonl", lines({"prompt": "2+2?", **WHOLE, "score_chosen": 9.0}), "dpo", [PREFERENCE]),
    "an implicit prompt": ("a.parquet", parquet(WHOLE), "dpo", [PREFERENCE]),
    "an implicit prompt of texts": (
        "a.jsonl",
        lines({"chosen": "a b", "rejected": "a c"}),
        "dpo",
        [{"chosen": "a b", "rejected": "a c"}],
    ),
    "preferences": ("a.jsonl", lines(PREFERENCE), "dpo", [PREFERENCE]),
    "preferences of texts": ("a.csv", b"prompt,chosen,rejected\n2+2?, 4, 5\n", "dpo", [WORDS]),
    "pairs": ("a.jsonl", lines(WHOLE), "reward", [WHOLE]),
    "pairs with a margin": ("a.jsonl", lines({**WORDS, "margin": 0.5}), "reward", [{**WORDS, "margin": 0.5}]),
    "judged": (
        "a.jsonl",
        lines({**JUDGED, "label": True}, {**JUDGED, "label": False}),
        "kto",
        [{**JUDGED, "label": True}, {**JUDGED, "label": False}],
    ),
    "judged in CSV": (
        "a.csv",
        b"prompt,completion,label\n2+2?, 4,true\n2+2?, 4,False\n",
        "kto",
        [{**JUDGED, "label": True}, {**JUDGED, "label": False}],
    ),
}


def taken(tmp_path, name, content, task):
    """The rows of a file as they are given to TRL, and the tokenizer."""
    path = tmp_path / name
    content(path) if callable(content) else path.write_bytes(content)
    _, tokenizer = tiny()
    if task == "marks":
        tokenizer.chat_template = MARKING
    words = [
        f"task={'sft' if task == 'marks' else task}",
        "model=hf",
        "model.path=x",
        "data=jsonl",
        f"data.path={path}",
    ]
    composed = compose.compose([*words, "data.validation_fraction=0", "run.dir=run"])
    read = row_sets.load(composed)
    return answers.mapped(read, tokenizer, tmp_path, composed) if task in ("sft", "marks") else read, tokenizer


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


def prepared(rows, task, tokenizer, tmp_path):
    """What TRL alone would train on: tokens and labels of each row."""
    kind = {"sft": "SFT", "marks": "SFT", "dpo": "DPO", "reward": "Reward", "kto": "KTO"}[task]
    more = {"assistant_only_loss": "messages" in rows.column_names} if kind == "SFT" else {}
    args = getattr(trl, f"{kind}Config")(
        str(tmp_path),
        report_to="none",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=2,
        max_length=None,
        **more,
    )
    network, _ = tiny()
    if task == "reward":
        network = torch.nn.Module()  # of which nothing is asked
    trainer = getattr(trl, f"{kind}Trainer")
    if task == "reward":
        found = trainer._prepare_dataset(trainer.__new__(trainer), rows, tokenizer, args, "train")
    else:
        given = {} if kind == "SFT" else {"ref_model": tiny()[0]}
        found = trainer(network, args=args, train_dataset=rows, processing_class=tokenizer, **given).train_dataset
    columns = [name for name in found.column_names if name.endswith("ids") or name in ("labels", "label", "margin")]
    return found.select_columns(columns).to_list()


@pytest.mark.promise("bad-row", "data-shapes", "row-formats")
@pytest.mark.parametrize("name", list(ACCEPTED))
def test_trl_makes_the_same_of_a_published_shape(tmp_path, name):
    file, content, task, wanted = ACCEPTED[name]
    read, tokenizer = taken(tmp_path, file, content, task)
    assert prepared(read.training, task, tokenizer, tmp_path) == prepared(
        Dataset.from_list(wanted), task, tokenizer, tmp_path
    )
