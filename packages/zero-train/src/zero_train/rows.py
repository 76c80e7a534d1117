"""Checks one row of the data of fine-tuning and puts it into the shape that TRL's trainers read.

Owns no file and needs no library. row_files.py reads the rows, conversations.py writes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

ROLES = ("system", "user", "assistant", "tool")
COLUMNS = {  # of each kind
    "messages": ("messages",),
    "prompt-completion": ("prompt", "completion"),
    "text": ("text",),
    "preference": ("prompt", "chosen", "rejected"),
    "pair": ("chosen", "rejected"),
}
KINDS = {
    "sft": ("messages", "prompt-completion", "text"),
    "pretrain": ("text",),
    "dpo": ("preference",),
    "reward": ("pair",),  # or a preference, where there is a prompt
}
SYNONYMS = ("conversations", "instruction", "input", "output")
KNOWN = {"tools", *SYNONYMS, *(column for columns in COLUMNS.values() for column in columns)}
# The remark of rows with a message whose `train` is false or whose `weight` is not 1.
UNLEARNED = "messages that are no answers are marked as not to be learned from, as task.loss_on=answers has it"
_ENCODER = json.JSONEncoder(ensure_ascii=False)
_SHAREGPT = {"human": "user", "gpt": "assistant"}
_NEEDED = {
    "sft": "`messages`, or `prompt` and `completion`, or `text`",
    "pretrain": "`text`",
    "dpo": "`prompt`, `chosen` and `rejected`",
    "reward": "`chosen` and `rejected`, with or without `prompt`",
}


class Mistake(ValueError):
    """What is wrong with a row, as the end of a sentence that begins with the row's place."""


@dataclass(frozen=True)
class Row:
    """A row without a mistake."""

    kind: str  # a key of COLUMNS
    columns: dict[str, str | list[str] | None]  # a message is one JSON text, because messages have different keys
    content: bytes  # differs for any two rows with different columns
    dropped: tuple[str, ...]  # names of columns that no trainer reads
    remarks: tuple[str, ...]  # how synonyms were read

    @property
    def of_messages(self) -> bool:
        """Returns whether the columns hold lists of messages, not texts."""
        return "tools" in self.columns


def read(found: object, task: str) -> Row:
    """Returns the row for `task` (a key of KINDS) in what a reader found. A column that is null counts as absent.

    Raises:
        Mistake: it is not a row for this task. The first reason is given, with the name of the key and its value.
    """
    if not isinstance(found, Mapping):
        raise Mistake(f"is {described(found)}; write one object with {_NEEDED[task]}")
    given = {name: value for name, value in found.items() if value is not None}
    row, used, remarks = _without_synonyms(given) if task == "sft" else (given, set(), [])
    kind = _kind(row, task)
    columns: dict[str, Any] = {name: row.get(name) for name in COLUMNS[kind]}
    if kind == "preference":
        remarks += _implicit_prompt(columns)
    lists = [name for name, value in columns.items() if isinstance(value, list)]
    if kind == "messages" or len(lists) == len(columns):
        columns = {name: _messages(value, name) for name, value in columns.items()}
        _learnable(columns)
        remarks += _marks(columns)
        columns = {name: [_dumped(message) for message in value] for name, value in columns.items()}
        columns["tools"] = _tools(row.get("tools"))
    elif lists and len(lists) < len(columns):
        texts = next(name for name in columns if name not in lists)
        raise Mistake(f"has a list in `{lists[0]}` and {described(columns[texts])} in `{texts}`; write both alike")
    else:
        for name, value in columns.items():
            _text(value, f"`{name}`")
    dropped = tuple(name for name in given if name not in columns and name not in used)
    return Row(kind, columns, _content(columns), dropped, tuple(remarks))


def described(value: object) -> str:
    """Returns what a value is, in the words of JSON, with its beginning."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names: list[tuple[type | tuple[type, ...], str]] = [
        (str, "a text"),
        ((int, float), "a number"),
        (list, "a list"),
        (Mapping, "an object"),
    ]
    name = next((name for types, name in names if isinstance(value, types)), f"of type {type(value).__name__}")
    shown = repr(value) if isinstance(value, (str, int, float)) else ""
    return f"{name} ({shown if len(shown) <= 30 else shown[:30] + '…'})" if shown else name


def _without_synonyms(row: dict[str, Any]) -> tuple[dict[str, Any], set[str], list[str]]:
    """Renames what ShareGPT and Alpaca call their columns. Returns the row, the columns read and remarks."""
    if "conversations" in row and "messages" not in row:
        remark = (
            "`conversations` is read as `messages`; where a message has `from` and `value`, as `role` (human is user, "
            "gpt is assistant) and `content`"
        )
        return {**row, "messages": row["conversations"]}, {"conversations"}, [remark]
    if {"instruction", "output"} <= set(row) and not {"messages", "prompt", "completion", "text"} & set(row):
        asked = _text(row["instruction"], "`instruction`")
        if more := row.get("input"):
            asked = f"{asked}\n\n{_text(more, '`input`')}"
        columns = {
            "prompt": [{"role": "user", "content": asked}],
            "completion": [{"role": "assistant", "content": _text(row["output"], "`output`")}],
        }
        remark = "`instruction` and `input` are read as a user's message, `output` as the assistant's answer"
        return {**row, **columns}, {"instruction", "input", "output"}, [remark]
    return row, set(), []


def _kind(row: Mapping[str, Any], task: str) -> str:
    """Returns the first kind of this task whose columns the row has; of a preference, `prompt` may be implicit."""
    needed = {kind: [name for name in COLUMNS[kind] if (kind, name) != ("preference", "prompt")] for kind in COLUMNS}
    for kind in KINDS[task]:
        if all(name in row for name in needed[kind]):
            return "preference" if kind == "pair" and "prompt" in row else kind
    for kind in KINDS[task]:
        there = [name for name in COLUMNS[kind] if name in row]
        missing = [name for name in needed[kind] if name not in row]
        if there and (set(there) - {"prompt"} or not {"chosen", "rejected"} <= set(row)):
            raise Mistake(f"has `{there[0]}` but no `{missing[0]}`")
    names = ", ".join(f"`{name}`" for name in list(row)[:6]) + (", …" if len(row) > 6 else "")
    other = next((t for t in KINDS for kind in KINDS[t] if all(name in row for name in needed[kind])), "")
    hint = f"; such rows are for task={other}" if other else ""
    raise Mistake(f"has {f'only {names}' if names else 'no columns'}, and task={task} needs {_NEEDED[task]}{hint}")


def _messages(value: object, name: str) -> list[dict[str, Any]]:
    """Returns the messages of a column without keys that are null, except for a `content`."""
    if not isinstance(value, list):
        raise Mistake(f"has {described(value)} in `{name}`, which must be a list of messages")
    if not value:
        raise Mistake(f"has an empty list in `{name}`")
    return [_message(message, f"message {number} of `{name}`") for number, message in enumerate(value, 1)]


def _message(value: object, place: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise Mistake(f"has {described(value)} as {place}, which must be an object with `role` and `content`")
    message = {key: item for key, item in value.items() if item is not None or key == "content"}
    if "from" in message and "role" not in message:
        role, content = message.pop("from"), message.pop("value", None)
        message = {"role": _SHAREGPT.get(role, role) if isinstance(role, str) else role, "content": content, **message}
    if "role" not in message:
        raise Mistake(f"has no `role` in {place}; roles are {', '.join(ROLES)}")
    role = message["role"]
    if role not in ROLES:
        near = get_close_matches(role, ROLES, n=1) if isinstance(role, str) else []
        hint = f"; did you mean {near[0]}?" if near else f"; roles are {', '.join(ROLES)}"
        raise Mistake(f"has {described(role)} as `role` of {place}{hint}")
    if role == "assistant" and message.get("tool_calls"):
        if not isinstance(message["tool_calls"], list):
            raise Mistake(f"has {described(message['tool_calls'])} as `tool_calls` of {place}, which must be a list")
        if message.get("content") in (None, ""):
            return message
    elif "content" not in message:
        raise Mistake(f"has no `content` in {place}")
    _text(message["content"], f"`content` of {place}")
    return message


def _learnable(columns: Mapping[str, list[dict[str, Any]]]) -> None:
    """Raises Mistake if there is nothing to learn, or nothing to answer."""
    for name, messages in columns.items():
        roles = [message["role"] for message in messages]
        if name == "prompt":
            if roles[-1] == "system":
                raise Mistake("has `prompt` end with a system message; end it with the user's")
        elif "assistant" not in roles:
            raise Mistake(f"has no assistant message in `{name}`, so there is nothing to learn from")


def _marks(columns: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    """Raises Mistake if an answer is marked as one not to be learned from. Returns a remark if another message is."""
    found = [
        (name, number, message, mark)
        for name, messages in columns.items()
        for number, message in enumerate(messages, 1)
        for mark in ("train", "weight")
        if message.get(mark, 1) != 1
    ]
    for name, number, message, mark in found:
        if message["role"] == "assistant" and name != "prompt":
            value = message[mark]
            shown = value if isinstance(value, (int, float)) and not isinstance(value, bool) else described(value)
            raise Mistake(
                f"has `{mark}` {shown} in message {number} of `{name}`, but every answer is learned from; end the "
                f"conversation before it, or remove `{mark}` to learn from it as from the others"
            )
    return [UNLEARNED] if found else []


def _implicit_prompt(columns: dict[str, Any]) -> list[str]:
    """Takes the messages that `chosen` and `rejected` share as the prompt, if there is no list of messages for it."""
    prompt, chosen, rejected = columns["prompt"], columns["chosen"], columns["rejected"]
    if isinstance(prompt, list) or not (isinstance(chosen, list) and isinstance(rejected, list)):
        if prompt is None:
            raise Mistake("has `chosen` but no `prompt`")
        return []
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    if not shared:
        raise Mistake("has no list of messages in `prompt`, and `chosen` and `rejected` begin with different messages")
    texts = [message.get("content") for message in chosen[:shared] if isinstance(message, Mapping)]
    if prompt is not None and prompt not in texts:
        raise Mistake("has a text in `prompt` that is none of the messages with which `chosen` and `rejected` begin")
    columns.update(prompt=chosen[:shared], chosen=chosen[shared:], rejected=rejected[shared:])
    return ["the messages with which `chosen` and `rejected` begin alike are read as `prompt`"]


def _tools(value: object) -> str | None:
    """Returns the functions that a model may call as JSON text, which TRL's trainers parse."""
    if value is None:
        return None
    tools = value
    if isinstance(value, str):
        try:
            tools = json.loads(value)
        except ValueError:
            raise Mistake(f"has {described(value)} in `tools`, which is not JSON") from None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise Mistake(f"has {described(tools)} in `tools`, which must be a list of objects")
    return _dumped(tools)


def _content(columns: Mapping[str, str | list[str] | None]) -> bytes:
    parts = []
    for value in columns.values():
        texts = value if isinstance(value, list) else [value or ""]
        parts += [f"{len(texts)}", *(f"{len(text)}:{text}" for text in texts)]
    try:
        return "\n".join(parts).encode()
    except UnicodeEncodeError as error:  # JSON may escape what UTF-8 cannot hold
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise Mistake(f"has {half}, half of a surrogate pair, which is no character; remove it") from None


def _text(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise Mistake(f"has {described(value)} in {place}, which must be a text")
    if not value.strip():
        raise Mistake(f"has nothing but spaces in {place}" if value else f"has an empty text in {place}")
    return value


def _dumped(value: object) -> str:
    try:
        return _ENCODER.encode(value)
    except (TypeError, ValueError) as error:  # a date in a parquet file, for example
        raise Mistake(f"has a value that JSON cannot hold: {error}") from None
