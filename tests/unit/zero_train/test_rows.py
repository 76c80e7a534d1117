"""A row is put into the shape of TRL's trainers, or refused by what is wrong with it."""

import json

import pytest

from zero_train import rows


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


CHAT = [user("hello"), assistant("hi")]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f"}}]}


def columns(row):
    """The columns with their messages parsed."""
    return {
        name: [json.loads(text) for text in value] if isinstance(value, list) else value
        for name, value in row.columns.items()
    }


@pytest.mark.parametrize(
    ("found", "task", "kind", "expected"),
    [
        ({"messages": CHAT}, "sft", "messages", {"messages": CHAT, "tools": None}),
        ({"messages": CHAT, "prompt": None}, "sft", "messages", {"messages": CHAT, "tools": None}),
        ({"prompt": "a", "completion": "b"}, "sft", "prompt-completion", {"prompt": "a", "completion": "b"}),
        (
            {"prompt": CHAT[:1], "completion": CHAT[1:], "tools": []},
            "sft",
            "prompt-completion",
            {"prompt": CHAT[:1], "completion": CHAT[1:], "tools": "[]"},
        ),
        ({"text": "a"}, "sft", "text", {"text": "a"}),
        ({"text": "a"}, "pretrain", "text", {"text": "a"}),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            "dpo",
            "preference",
            {"prompt": "a", "chosen": "b", "rejected": "c"},
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            "reward",
            "preference",
            {"prompt": "a", "chosen": "b", "rejected": "c"},
        ),
        ({"chosen": "b", "rejected": "c"}, "reward", "pair", {"chosen": "b", "rejected": "c"}),
        (  # the same conversation begun in two ways
            {"chosen": CHAT, "rejected": [user("b"), assistant("c")]},
            "reward",
            "pair",
            {"chosen": CHAT, "rejected": [user("b"), assistant("c")], "tools": None},
        ),
        (
            {"messages": [user("2+2?"), CALL, {"role": "tool", "content": "4"}, assistant("4")], "tools": '[{"a": 1}]'},
            "sft",
            "messages",
            {
                "messages": [user("2+2?"), CALL, {"role": "tool", "content": "4"}, assistant("4")],
                "tools": '[{"a": 1}]',
            },
        ),
        (  # parquet has a null for what a message lacks
            {"messages": [{**user("a"), "tool_calls": None}, {**assistant("b"), "name": "c"}]},
            "sft",
            "messages",
            {"messages": [user("a"), {**assistant("b"), "name": "c"}], "tools": None},
        ),
    ],
)
def test_a_row_keeps_its_values(found, task, kind, expected):
    """Fails if a message gains a key, such as a null `tool_calls`, for which chat templates ask."""
    row = rows.read(found, task)
    assert row.kind == kind and columns(row) == expected
    assert not row.dropped and not row.remarks


def test_sharegpt_and_alpaca_are_read_as_such():
    shared = rows.read({"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]}, "sft")
    assert columns(shared)["messages"] == CHAT and "human is user" in shared.remarks[0] and not shared.dropped
    alpaca = rows.read({"instruction": "add", "input": "2 and 2", "output": "4", "source": "x"}, "sft")
    assert columns(alpaca)["prompt"] == [user("add\n\n2 and 2")] and columns(alpaca)["completion"] == [assistant("4")]
    assert "`instruction`" in alpaca.remarks[0] and alpaca.dropped == ("source",)
    assert columns(rows.read({"instruction": "add", "input": "", "output": "4"}, "sft"))["prompt"] == [user("add")]


@pytest.mark.parametrize("prompt", [None, "a"])
def test_what_chosen_and_rejected_share_is_the_prompt(prompt):
    chosen, rejected = [user("a"), assistant("good")], [user("a"), assistant("bad")]
    row = rows.read({"prompt": prompt, "chosen": chosen, "rejected": rejected, "score": 1}, "dpo")
    assert columns(row) == {"prompt": chosen[:1], "chosen": chosen[1:], "rejected": rejected[1:], "tools": None}
    assert "begin alike" in row.remarks[0] and row.dropped == ("score",)
    alike = rows.read({"chosen": chosen, "rejected": chosen}, "dpo")
    assert columns(alike)["chosen"] == columns(alike)["rejected"] == chosen[1:]


@pytest.mark.parametrize(
    ("found", "task", "words"),
    [
        ([1], "sft", "is a list; write one object with `messages`"),
        ({}, "sft", "has no columns, and task=sft needs"),
        ({"question": "a", "id": 3}, "sft", "has only `question`, `id`, and task=sft needs"),
        ({"prompt": "a"}, "sft", "has `prompt` but no `completion`"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "sft", "such rows are for task=dpo"),
        ({"messages": CHAT}, "pretrain", "such rows are for task=sft"),
        ({"prompt": "a", "chosen": "b"}, "dpo", "has `prompt` but no `rejected`"),
        ({"chosen": "b", "rejected": "c"}, "dpo", "has `chosen` but no `prompt`"),
        ({"prompt": "a", "chosen": "b"}, "reward", "has `chosen` but no `rejected`"),
        ({"prompt": "a", "completion": "b"}, "reward", "such rows are for task=sft"),
        ({"chosen": CHAT, "rejected": CHAT[:1]}, "reward", "has no assistant message in `rejected`"),
        ({"prompt": "x", "chosen": CHAT, "rejected": CHAT}, "reward", "none of the messages with which"),
        ({"messages": "hello"}, "sft", "has a text ('hello') in `messages`, which must be a list of messages"),
        ({"messages": []}, "sft", "has an empty list in `messages`"),
        ({"messages": ["hello"]}, "sft", "has a text ('hello') as message 1 of `messages`, which must be an object"),
        ({"messages": [{"content": "a"}]}, "sft", "has no `role` in message 1 of `messages`; roles are system, user"),
        ({"messages": [{"role": "asistant", "content": "a"}]}, "sft", "('asistant') as `role` of message 1 of "),
        ({"messages": [{"role": "asistant", "content": "a"}]}, "sft", "did you mean assistant?"),
        ({"messages": [{"role": 3, "content": "a"}]}, "sft", "has a number (3) as `role`"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "sft", "has a list as `role`"),
        ({"conversations": [{"from": "bing", "value": "a"}]}, "sft", "has a text ('bing') as `role`"),
        ({"conversations": [{"from": "human"}]}, "sft", "has null in `content` of message 1"),
        ({"messages": [*CHAT, {"role": "user"}]}, "sft", "has no `content` in message 3"),
        ({"messages": [user(None)]}, "sft", "has null in `content` of message 1 of `messages`, which must be a text"),
        ({"messages": [user([{"type": "text"}])]}, "sft", "has a list in `content` of message 1"),
        ({"messages": [user("a"), assistant("")]}, "sft", "has an empty text in `content` of message 2"),
        ({"messages": [user(" \n"), assistant("a")]}, "sft", "has nothing but spaces in `content` of message 1"),
        ({"messages": [user("a"), {**assistant("b"), "weight": 0}]}, "sft", "has `weight` 0 in message 2"),
        ({"messages": [user("a"), {**assistant("b"), "weight": 0.5}]}, "sft", "has `weight` 0.5 in message 2"),
        ({"messages": [user("a"), {**assistant("b"), "weight": "0"}]}, "sft", "has `weight` a text ('0') in message 2"),
        ({"messages": [user("a"), {**assistant("b"), "train": False}]}, "sft", "has `train` false in message 2"),
        ({"conversations": [*CHAT, user("c"), {"from": "gpt", "value": "d", "train": False}]}, "sft", "in message 4"),
        ({"prompt": CHAT[:1], "completion": [{**CHAT[1], "train": False}]}, "sft", "1 of `completion`, but every"),
        ({"messages": [user("a"), {**assistant("b"), "tool_calls": 1}]}, "sft", "has a number (1) as `tool_calls`"),
        ({"messages": [user("a")]}, "sft", "has no assistant message in `messages`, so there is nothing to learn from"),
        ({"messages": CHAT, "tools": "{"}, "sft", "in `tools`, which is not JSON"),
        ({"messages": CHAT, "tools": "{}"}, "sft", "has an object in `tools`, which must be a list of objects"),
        ({"prompt": CHAT[:1], "completion": "a"}, "sft", "has a list in `prompt` and a text ('a') in `completion`"),
        ({"prompt": CHAT[:1], "completion": CHAT[:1]}, "sft", "has no assistant message in `completion`"),
        ({"prompt": [{"role": "system", "content": "a"}], "completion": CHAT[1:]}, "sft", "end with a system message"),
        ({"prompt": 1.5, "completion": "a"}, "sft", "has a number (1.5) in `prompt`, which must be a text"),
        ({"text": "x" * 40, "prompt": {}}, "pretrain", None),
        ({"text": True}, "pretrain", "has true in `text`"),
        ({"text": "a \ud83d b"}, "pretrain", r"has \ud83d, half of a surrogate pair"),
        ({"instruction": "a", "output": 4}, "sft", "has a number (4) in `output`"),
        ({"prompt": "x", "chosen": CHAT, "rejected": CHAT}, "dpo", "none of the messages with which"),
        ({"chosen": CHAT, "rejected": [user("b"), assistant("c")]}, "dpo", "begin with different messages"),
        ({"messages": [{**user("a"), "when": {1, 2}}, assistant("b")]}, "sft", "has a value that JSON cannot hold"),
    ],
)
def test_a_mistake_names_the_key_and_what_was_there(found, task, words):
    if words is None:
        assert rows.read(found, task).dropped == ("prompt",)
        return
    with pytest.raises(rows.Mistake) as caught:
        rows.read(found, task)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("found", "remarks"),
    [
        ({"messages": [{**user("a"), "train": True}, {**assistant("b"), "train": True, "weight": 1}]}, ()),
        ({"messages": [{**user("a"), "weight": None}, {**assistant("b"), "weight": None, "train": None}]}, ()),
        ({"messages": [{**user("a"), "weight": 0}, {**assistant("b"), "weight": 1}]}, (rows.UNLEARNED,)),
        ({"messages": [{**user("a"), "train": False}, assistant("b")]}, (rows.UNLEARNED,)),
        ({"prompt": [*CHAT[:1], {**CHAT[1], "weight": 0}, user("c")], "completion": CHAT[1:]}, (rows.UNLEARNED,)),
    ],
)
def test_marks_that_say_what_is_learned_from_anyway_are_read(found, remarks):
    """As SlimOrca has them: what is no answer, or is in a prompt, is not learned from."""
    assert rows.read(found, "sft").remarks == remarks


def test_different_rows_have_different_contents():
    """Fails if moving text from one column or message to another does not change a row's hash."""
    given = [
        {"prompt": "a", "completion": "b"},
        {"prompt": "ab", "completion": "c"},
        {"prompt": "a", "completion": "bc"},
        {"prompt": [user("a")], "completion": [assistant("b")]},
        {"prompt": [user("a")], "completion": [assistant("b")], "tools": [{}]},
        {"prompt": [user("a"), assistant("b")], "completion": [assistant("b")]},
        {"prompt": [user("a")], "completion": [assistant("b"), assistant("b")]},
    ]
    assert len({rows.read(found, "sft").content for found in given}) == len(given)
