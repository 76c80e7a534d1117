"""A row is put into TRL's columns, or refused by what is wrong with it."""

import pytest

from zero_train import rows


def user(text, **more):
    return {"role": "user", "content": text, **more}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


CHAT = [user("hello"), assistant("hi")]
CALL = assistant(None, tool_calls=[{"type": "function", "function": {"name": "f"}}])
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


def columns(row):
    """The columns of TRL that say something."""
    return {name: value for name, value in row.columns.items() if not name.startswith("_") and value not in (None, {})}


@pytest.mark.parametrize(
    ("found", "task", "expected"),
    [
        ({"messages": CHAT, "prompt": None}, "sft", {"messages": CHAT}),
        ({"prompt": "a", "completion": "b"}, "sft", {"prompt": "a", "completion": "b"}),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, "sft", {"prompt": CHAT[:1], "completion": CHAT[1:]}),
        ({"text": "a"}, "sft", {"text": "a"}),
        ({"text": "a"}, "pretrain", {"text": "a"}),
        (PAIR, "dpo", PAIR),
        (PAIR, "reward", PAIR),
        ({"chosen": "b", "rejected": "c"}, "dpo", {"chosen": "b", "rejected": "c"}),
        ({**PAIR, "margin": "1.5"}, "reward", {**PAIR, "margin": 1.5}),
        (
            {"prompt": "a", "completion": "b", "label": "false"},
            "kto",
            {"prompt": "a", "completion": "b", "label": False},
        ),
        ({"prompt": "a", "x": None, "y": 3}, "grpo", {"prompt": "a", "y": 3}),
        (  # parquet has a null for what a message lacks
            {"messages": [user("a", tool_calls=None), assistant("b", name="c")]},
            "sft",
            {"messages": [user("a"), assistant("b", name="c")]},
        ),
        (
            {"messages": [user("2+2?"), CALL, {"role": "tool", "content": "4"}, assistant("4")], "tools": '[{"a": 1}]'},
            "sft",
            {"messages": [user("2+2?"), CALL, {"role": "tool", "content": "4"}, assistant("4")], "tools": '[{"a": 1}]'},
        ),
        (  # a cell of CSV
            {"messages": '[{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]'},
            "sft",
            {"messages": CHAT},
        ),
    ],
)
def test_a_row_keeps_its_values(found, task, expected):
    """Fails if a message gains a key, such as a null `tool_calls`, for which chat templates ask."""
    row = rows.read(found, task)
    assert columns(row) == expected and not row.unread and not row.remark


def test_sharegpt_and_alpaca_are_read_as_such():
    call = {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'}
    turns = [{"from": "human", "value": "hello"}, call, {"from": "observation", "value": "3"}]
    shared = rows.read({"system": "be", "conversations": [*turns, {"from": "gpt", "value": "hi"}]}, "sft")
    called = assistant("", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}])
    said = [
        {"role": "system", "content": "be"},
        user("hello"),
        called,
        {"role": "tool", "content": "3"},
        assistant("hi"),
    ]
    assert columns(shared)["messages"] == said and "`conversations`" in shared.remark and not shared.unread
    alpaca = rows.read({"instruction": "add", "input": "2 and 2", "output": "4", "source": "x"}, "sft")
    assert columns(alpaca) == {"prompt": [user("add\n\n2 and 2")], "completion": [assistant("4")]}
    assert "`instruction`" in alpaca.remark and alpaca.unread == ("source",)
    more = rows.read({"instruction": "add", "input": "", "output": "4", "history": [["a", "b"]], "system": "be"}, "sft")
    assert columns(more)["prompt"] == [{"role": "system", "content": "be"}, user("a"), assistant("b"), user("add")]
    made = rows.read({"instruction": "add", "output": "4", "text": "add: 4"}, "sft")
    assert columns(made) == {"text": "add: 4"} and made.unread == ("instruction", "output")


@pytest.mark.parametrize("prompt", [None, "a"])
def test_what_chosen_and_rejected_share_is_the_prompt(prompt):
    chosen, rejected = [user("a"), assistant("good")], [user("a"), assistant("bad")]
    row = rows.read({"prompt": prompt, "chosen": chosen, "rejected": rejected, "score": 1}, "dpo")
    assert columns(row) == {"prompt": chosen[:1], "chosen": chosen[1:], "rejected": rejected[1:]}
    assert "begin alike" in row.remark and row.unread == ("score",)


@pytest.mark.parametrize(
    ("messages", "answer", "skips"),
    [
        (CHAT, 1, False),
        ([*CHAT, *CHAT], 0, False),
        ([*CHAT, user("c")], 0, False),
        ([user("a", weight=0), assistant("b", weight=1, train=True)], 1, False),  # as SlimOrca has it
        ([user("a", weight=None), assistant("b", weight=None, train=None)], 1, False),
        ([user("a"), assistant("b", weight=0), user("c"), assistant("d", weight=1.0)], 3, True),
        ([user("a"), assistant("b", train=False), user("c", train=False), assistant("d")], 3, True),
    ],
)
def test_marks_say_which_answer_is_learned_from(messages, answer, skips):
    row = rows.read({"messages": messages}, "sft")
    assert (row.columns[rows.ANSWER], row.columns[rows.SKIPS]) == (answer, skips)


@pytest.mark.parametrize(
    ("found", "task", "words"),
    [
        ([1], "sft", "is a list ([1]); write one object with `messages`"),
        ({}, "sft", "has no columns, and task=sft needs"),
        ({"question": "a", "id": 3}, "sft", "has `question`, `id`, and task=sft needs"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "sft", "such rows are for task=dpo"),
        ({"messages": CHAT}, "pretrain", "such rows are for task=sft"),
        ({"prompt": "a", "chosen": "b"}, "dpo", "has `prompt`, `chosen`, and task=dpo needs `prompt` and `chosen`"),
        ({"prompt": "a", "completion": "b"}, "reward", "such rows are for task=sft"),
        ({"prompt": "a", "completion": "b", "label": True}, "sft", "choose task=kto, or delete `label`"),
        (
            {"prompt": "a", "completion": "b", "label": 1},
            "kto",
            "has a number (1) in `label`",
        ),
        ({**PAIR, "margin": "x"}, "reward", "in `margin`, which must be a number"),
        ({"chosen": CHAT, "rejected": CHAT[:1]}, "reward", "has no assistant message in `rejected`"),
        ({"prompt": "x", "chosen": CHAT, "rejected": CHAT}, "dpo", "none of the messages with which"),
        ({"chosen": CHAT, "rejected": [user("b"), assistant("c")]}, "dpo", "begin with different messages"),
        ({"messages": "hello"}, "sft", "has a text ('hello') in `messages`, which must be a list of messages"),
        ({"messages": []}, "sft", "has an empty list in `messages`"),
        ({"messages": ["hello"]}, "sft", "has a text ('hello') as message 1 of `messages`, which must be an object"),
        (
            {"messages": [{"content": "a"}]},
            "sft",
            "has null as `role` of message 1",
        ),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "sft", "has a list (['user']) as `role`"),
        ({"conversations": [{"from": "bing", "value": "a"}]}, "sft", "has a text ('bing') as `role`"),
        ({"conversations": [{"from": "human"}]}, "sft", "has null in `content` of message 1"),
        (
            {"conversations": [{"from": "function_call", "value": "f()"}]},
            "sft",
            "write JSON with `name`",
        ),
        ({"system": "a", "messages": [{"role": "system", "content": "b"}, *CHAT]}, "sft", "delete one of them"),
        ({"messages": [user([{"type": "text", "text": "a"}]), CHAT[1]]}, "sft", "write it as one text"),
        ({"messages": CHAT, "images": ["a.png"]}, "sft", "has `images`, and models of texts are trained here"),
        ({"messages": [user("a"), assistant("")]}, "sft", "has an empty text in `content` of message 2"),
        ({"messages": [user(" \n"), assistant("a")]}, "sft", "has nothing but spaces in `content` of message 1"),
        ({"messages": [user("a"), assistant("b", weight=0)]}, "sft", "no other answer to learn from; delete the row"),
        (
            {"messages": [user("a"), assistant("b", weight=0.5)]},
            "sft",
            "`weight` 0.5 in message 2 of `messages`",
        ),
        ({"messages": [user("a"), assistant("b", weight="0")]}, "sft", "must be the number 0 or 1"),
        ({"messages": [user("a"), assistant("b", weight=True)]}, "sft", "must be the number 0 or 1"),
        ({"messages": [user("a"), assistant("b", train=0)]}, "sft", "must be true or false"),
        ({"messages": [user("a", train=True), CHAT[1]]}, "sft", "which is not learned from; delete `train` there"),
        ({"messages": [user("a"), assistant("b", train=False), *CHAT, *CHAT]}, "sft", "write a row for each answer"),
        ({"prompt": CHAT[:1], "completion": [assistant("a", weight=0)]}, "sft", "all of that column is learned from"),
        ({"messages": [user("a"), {**assistant("b"), "tool_calls": 1}]}, "sft", "has a number (1) as `tool_calls`"),
        ({"messages": [user("a")]}, "sft", "add one, or set task.loss_on=everything"),
        ({"messages": CHAT, "tools": "{"}, "sft", "in `tools`, which is not JSON"),
        ({"messages": CHAT, "tools": "{}"}, "sft", "in `tools`, which must be a list of objects"),
        ({"prompt": CHAT[:1], "completion": "a"}, "sft", "has a list in `prompt` and a text ('a') in"),
        ({"prompt": 1.5, "completion": "a"}, "sft", "has a number (1.5) in `prompt`, which must be a text"),
        ({"text": True}, "pretrain", "has true in `text`"),
        ({"instruction": "a", "output": 4}, "sft", "has a number (4) in `content` of message 1 of `completion`"),
        ({"instruction": "a", "output": "b", "history": ["c"]}, "sft", "write [[question, answer], …]"),
    ],
)
def test_a_mistake_names_the_key_and_what_was_there(found, task, words):
    with pytest.raises(rows.Mistake) as caught:
        rows.read(found, task)
    assert words in str(caught.value)


def test_with_the_loss_on_everything_no_mark_leaves_anything_out():
    assert rows.read({"messages": [user("a", train=True)]}, "sft", everything=True).columns[rows.ANSWER] == 0
    with pytest.raises(rows.Mistake, match=r"`train` false in message 1 .* all of that column is learned from"):
        rows.read({"messages": [user("a", train=False), CHAT[1]]}, "sft", everything=True)
