"""Maps the shapes of rows that people publish onto TRL's columns, and says what is wrong with a row.

Reads no file and needs no library. row_files.py gives the rows their places.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KINDS = {  # of each task: the columns of its rows, the first that a row has all of
    "sft": (("messages",), ("prompt", "completion"), ("text",)),
    "pretrain": (("text",),),
    "dpo": (("prompt", "chosen", "rejected"), ("chosen", "rejected")),
    "reward": (("prompt", "chosen", "rejected"), ("chosen", "rejected")),
    "kto": (("prompt", "completion", "label"),),
    "grpo": (("prompt",),),
}
OF_MESSAGES = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
ROLES |= {role: role for role in ("system", "user", "assistant", "tool")}
# Columns of ours: a row's place; its only answer to learn, if that ends it, else 0; whether marks leave out others.
PLACE, ANSWER, SKIPS = "_place", "_answer", "_skips"


class Mistake(ValueError):
    """What is wrong with a row, as the end of a sentence that begins with the row's place."""


@dataclass(frozen=True)
class Row:
    """A row without a mistake."""

    kind: tuple[str, ...]  # of KINDS
    columns: dict[str, Any]  # as TRL reads them, and ours
    of_messages: bool  # whether the columns hold lists of messages, not texts
    unread: tuple[str, ...]  # names of columns that no trainer reads
    remark: str  # how other names were read, or ""

    @property
    def shape(self) -> tuple[object, ...]:
        """Returns what is the same for all rows of a run."""
        return self.kind, self.of_messages, set(self.columns)


def read(found: object, task: str, everything: bool = False) -> Row:
    """Returns the row for `task`, a key of KINDS, in what a reader found. A column that is null counts as absent.

    Raises:
        Mistake: it is not a row for this task.
    """
    if not isinstance(found, Mapping):
        raise Mistake(f"is {described(found)}; write one object with {_needed(task)}")
    given = {name: _parsed(name, value) for name, value in found.items() if value is not None}
    row, remark = _renamed(given) if task == "sft" else (given, "")
    kind = _kind(row, task)
    columns = {name: row[name] for name in kind}
    if "chosen" in kind and isinstance(row["chosen"], list) and isinstance(row["rejected"], list):
        kind, columns, remark = _implicit_prompt(task, row)
    lists = [name for name in kind if name != "label" and isinstance(columns[name], list)]
    if lists and len(lists) < len(kind) - ("label" in kind):
        text = next(name for name in kind if name not in lists)
        raise Mistake(f"has a list in `{lists[0]}` and {described(columns[text])} in `{text}`; write both alike")
    for name in kind:
        if name == "label":
            columns[name] = _truth(columns[name])
        else:
            columns[name] = (_messages if lists or name == "messages" else _text)(columns[name], f"`{name}`")
    if lists and task != "grpo":
        columns[ANSWER], columns[SKIPS] = _answers(columns, kind, everything)
        columns["tools"] = _tools(row.get("tools"))
        columns["chat_template_kwargs"] = row.get("chat_template_kwargs") or {}
    if task == "reward" and "margin" in row:
        kind, columns["margin"] = (*kind, "margin"), _number(row["margin"])
    others = {name: value for name, value in given.items() if name not in columns and name not in row.get("_read", ())}
    if images := [name for name in others if name in ("image", "images", "videos", "audios")]:
        raise Mistake(f"has `{images[0]}`, and models of texts are trained here; delete the column or the row")
    if task == "grpo":  # TRL gives all other columns to the reward function
        return Row(kind, {**dict(found), **columns}, bool(lists), (), remark)
    return Row(kind, columns, bool(lists), tuple(others), remark)


def described(value: object) -> str:
    """Returns what a value is, in the words of JSON, with its beginning."""
    names = {dict: "an object", list: "a list", str: "a text", int: "a number", float: "a number"}
    if value is None or isinstance(value, bool) or type(value) not in names:
        return json.dumps(value, default=lambda found: f"a {type(found).__name__}")
    return f"{names[type(value)]} ({reprlib.repr(value)})"


def _needed(task: str) -> str:
    return ", or ".join(" and ".join(f"`{name}`" for name in kind) for kind in KINDS[task])


# -- the table: ShareGPT's and Alpaca's columns ------------------------------------------------------------------------


def _renamed(row: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns the row with TRL's names, and `_read`: the columns that went into them."""
    if "conversations" in row and "messages" not in row:
        said = "`conversations` is read as `messages`, its `from` and `value` as `role` and `content`"
        return _with_system({**row, "messages": row["conversations"], "_read": ["conversations"]}), said
    if {"instruction", "output"} <= set(row) and not {"messages", "prompt", "completion", "text"} & set(row):
        asked = _text(row["instruction"], "`instruction`")
        if row.get("input"):
            asked += "\n\n" + _text(row["input"], "`input`")
        pairs = row.get("history") or []
        if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
            raise Mistake("has no list of pairs in `history`; write [[question, answer], …]")
        texts = [text for pair in pairs for text in pair] + [asked, row["output"]]
        messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
        made = _with_system({**row, "messages": messages, "_read": ["instruction", "input", "output", "history"]})
        messages = made.pop("messages")
        columns = {"prompt": messages[:-1], "completion": messages[-1:]}
        return {**made, **columns}, "`instruction` and `input` are read as the user's message, `output` as the answer"
    return _with_system(row), ""


def _with_system(row: dict[str, Any]) -> dict[str, Any]:
    """Puts what is beside the messages in `system` before them."""
    if not row.get("system") or not isinstance(messages := row.get("messages"), list) or not messages:
        return {**row, "_read": [*row.get("_read", ()), *(["system"] if row.get("system") == "" else [])]}
    if isinstance(messages[0], Mapping) and "system" in (messages[0].get("role"), messages[0].get("from")):
        raise Mistake("has a system message, and `system` beside it; delete one of them")
    first = {"role": "system", "content": _text(row["system"], "`system`")}
    return {**row, "messages": [first, *messages], "_read": [*row.get("_read", ()), "system"]}


def _called(value: object, place: str) -> list[dict[str, Any]]:
    """Returns the `tool_calls` in ShareGPT's text of a function_call."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        found = None
    calls = found if isinstance(found, list) else [found]
    if not all(isinstance(call, Mapping) and {"name", "arguments"} <= set(call) for call in calls):
        raise Mistake(f"has {described(value)} in {place}, a function_call; write JSON with `name` and `arguments`")
    return [{"type": "function", "function": call} for call in calls]


# -- the validator -----------------------------------------------------------------------------------------------------


def _parsed(name: str, value: Any) -> Any:
    """Returns the list that a text holds as JSON, in a column of messages, as a cell of CSV does; else the value."""
    if name in OF_MESSAGES and isinstance(value, str) and value.lstrip()[:2] in ("[{", "[\n", "[ "):
        try:
            found = json.loads(value)
        except ValueError:
            return value
        return found if isinstance(found, list) and all(isinstance(each, dict) for each in found) else value
    return value


def _kind(row: Mapping[str, Any], task: str) -> tuple[str, ...]:
    for kind in KINDS[task]:
        if all(name in row for name in kind):
            if task == "sft" and "completion" in kind and "label" in row:
                raise Mistake(
                    "has `label` beside `completion`, and task=sft learns every completion; choose task=kto, or delete "
                    "`label`"
                )
            return kind
    names = ", ".join(f"`{name}`" for name in list(row)[:6] if name != "_read") + (", …" if len(row) > 6 else "")
    other = next((t for t in KINDS for kind in KINDS[t] if all(name in row for name in kind)), "")
    hint = f"; such rows are for task={other}" if other else ""
    raise Mistake(f"has {names or 'no columns'}, and task={task} needs {_needed(task)}{hint}")


def _messages(value: object, name: str) -> list[dict[str, Any]]:
    """Returns messages with `role` and `content`, without other keys that are null."""
    if not isinstance(value, list):
        raise Mistake(f"has {described(value)} in {name}, which must be a list of messages")
    if not value:
        raise Mistake(f"has an empty list in {name}")
    return [_message(message, f"message {number} of {name}") for number, message in enumerate(value, 1)]


def _message(value: object, place: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise Mistake(f"has {described(value)} as {place}, which must be an object with `role` and `content`")
    message = {key: item for key, item in value.items() if item is not None or key == "content"}
    if "role" not in message and "from" in message:
        given, content = message.pop("from"), message.pop("value", None)
        message = {"role": given, "content": content, **message}
        if given == "function_call":
            message |= {"content": "", "tool_calls": _called(content, place)}
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise Mistake(f"has {described(role)} as `role` of {place}; roles are system, user, assistant and tool")
    message["role"] = ROLES[role]
    if message["role"] == "assistant" and message.get("tool_calls"):
        if not isinstance(message["tool_calls"], list):
            raise Mistake(f"has {described(message['tool_calls'])} as `tool_calls` of {place}, which must be a list")
        if message.get("content") in (None, ""):
            return message
    if isinstance(message.get("content"), list):
        raise Mistake(f"has a list as `content` of {place}, and models of texts are trained here; write it as one text")
    _text(message.get("content"), f"`content` of {place}")
    return message


def _answers(columns: Mapping[str, Any], kind: tuple[str, ...], everything: bool) -> tuple[int, bool]:
    """Returns the number of the only answer to learn, if it ends `messages`, or 0; and whether marks leave out others.

    Raises:
        Mistake: there is nothing to learn, or a mark on a message asks for what TRL's trainers do not do.
    """
    learned, left_out = [], ""
    for name in (name for name in kind if name != "label"):
        chooses = name == "messages" and not everything  # whether its answers alone are learned from
        if name != "prompt" and (chooses or name != "messages"):
            if not any(message["role"] == "assistant" for message in columns[name]):
                more = ", or set task.loss_on=everything" if chooses else ""
                raise Mistake(f"has no assistant message in `{name}`, so there is nothing to learn from; add one{more}")
        for number, message in enumerate(columns[name]):
            counts = everything or (message["role"] == "assistant" if chooses else name != "prompt")
            for mark in (mark for mark in ("train", "weight") if mark in message):
                counts, said = _mark(mark, message[mark], f"message {number + 1} of `{name}`", counts, chooses)
                left_out = left_out or said
            if counts:
                learned.append(number)
    if kind != ("messages",) or everything:
        return 0, False
    if not learned:
        raise Mistake(f"has {left_out}, and no other answer to learn from; delete the row")
    only = learned[0] if learned == [len(columns["messages"]) - 1] else 0
    if left_out and not only:
        raise Mistake(f"has {left_out}, and does not end with its only answer to learn; write a row for each answer")
    return only, bool(left_out)


def _mark(mark: str, value: object, place: str, counts: bool, chooses: bool) -> tuple[bool, str]:
    """Returns whether a message counts that counts without its mark, and what leaves it out. chooses: if marks may."""
    said = f"`{mark}` {json.dumps(value, default=str)} in {place}"
    if not (isinstance(value, bool) if mark == "train" else type(value) in (int, float) and value in (0, 1)):
        raise Mistake(f"has {said}, which must be {'true or false' if mark == 'train' else 'the number 0 or 1'}")
    if value and not counts:
        raise Mistake(f"has {said}, which is not learned from; delete `{mark}` there")
    if not value and counts and not chooses:
        raise Mistake(f"has {said}, and all of that column is learned from; delete `{mark}` there, or the row")
    return counts and bool(value), said if counts and not value else ""


def _implicit_prompt(task: str, row: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, Any], str]:
    """Takes the messages that `chosen` and `rejected` share as the prompt, if there is no list of messages for it."""
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    whole = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    if isinstance(prompt, list):
        return tuple(whole), whole, ""
    if prompt is None and task == "reward":
        return ("chosen", "rejected"), {"chosen": chosen, "rejected": rejected}, ""
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    if not shared:
        raise Mistake("has no list of messages in `prompt`, and `chosen` and `rejected` begin with different messages")
    texts = [message.get("content") for message in chosen[:shared] if isinstance(message, Mapping)]
    if prompt is not None and prompt not in texts:
        raise Mistake("has a text in `prompt` that is none of the messages with which `chosen` and `rejected` begin")
    made = {"prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}
    return tuple(made), made, "the messages with which `chosen` and `rejected` begin alike are read as `prompt`"


def _tools(value: object) -> str | None:
    """Returns the functions that a model may call as JSON text, which TRL's trainers parse."""
    try:
        tools = json.loads(value) if isinstance(value, str) and value else value or None
    except ValueError:
        raise Mistake(f"has {described(value)} in `tools`, which is not JSON") from None
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise Mistake(f"has {described(tools)} in `tools`, which must be a list of objects")
    return json.dumps(tools, ensure_ascii=False)


def _truth(value: object) -> bool:
    found = {"true": True, "false": False}.get(value.strip().lower()) if isinstance(value, str) else value
    if not isinstance(found, bool):
        raise Mistake(f"has {described(value)} in `label`, which must be true or false")
    return found


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise Mistake(f"has {described(value)} in `margin`, which must be a number") from None


def _text(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise Mistake(f"has {described(value)} in {place}, which must be a text")
    if not value.strip():
        raise Mistake(f"has nothing but spaces in {place}" if value else f"has an empty text in {place}")
    return value
