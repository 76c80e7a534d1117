"""Maps the shapes of rows that people publish onto TRL's columns, and finds the mistakes in a row.

Reads no file and needs no library. row_files.py gives the rows their places.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
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
LISTS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected", "tools")
TYPES: dict[str, tuple[Any, str]] = {  # of columns that hold no text
    "label": (bool, "true or false"),
    "margin": ((int, float), "a number"),
    "tools": ((list, type(None)), "a list of objects"),
}
ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
ROLES |= {role: role for role in ("system", "user", "assistant", "tool")}
# Columns of zero-train. PLACE: the row's file and line. ANSWER: the index in `messages` of the only answer to learn, if
# that is the last message, and otherwise 0. It is negative where marks leave other answers out.
PLACE, ANSWER = "_place", "_answer"


class Mistake(ValueError):
    """A row has a mistake. The message is the end of a sentence that begins with the row's place."""


@dataclass(frozen=True)
class Row:
    """A row without a mistake."""

    kind: tuple[str, ...]  # TRL's columns
    columns: dict[str, Any]  # these, further ones that TRL reads with messages, and zero-train's
    remarks: tuple[str, ...] = ()  # which columns were read as others, and which are not read

    @property
    def of_messages(self) -> bool:
        """Returns whether the columns hold lists of messages, not texts."""
        return isinstance(self.columns[self.kind[0]], list)

    @property
    def shape(self) -> str:
        """Returns the settings that all rows of a run share, for people."""
        return f"{_listed(self.kind)} ({'lists of messages' if self.of_messages else 'strings'})"


def read(found: object, task: str, everything: bool = False) -> Row:
    """Checks an object from a file and returns it as a row for `task`, a key of KINDS. Null columns count as absent.

    Raises:
        Mistake: it is not a row for this task.
    """
    if not isinstance(found, Mapping):
        raise Mistake(f"is {_told(found)}; write one object with {_needed(task)}")
    try:
        json.dumps(found, ensure_ascii=False, default=repr).encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, or a byte of a file in another encoding
        raise Mistake(
            f"has {error.object[error.start]!r}, which is no character; save the file as UTF-8, or remove it"
        ) from None
    given = {name: _parsed(name, value) for name, value in found.items() if value is not None}
    row, used = _renamed(given) if task == "sft" else (_without_text(given), [])
    kind = _kind(row, task)
    lists = [name for name in kind if isinstance(row[name], list)]
    if text := next((name for name in kind if lists and name not in (*lists, "label")), None):
        raise Mistake(f"has a list in `{lists[0]}` and {_told(row[text])} in `{text}`; write two lists or two strings")
    kind = (*kind, "margin") if task == "reward" and "margin" in row else kind
    columns = {name: row[name] for name in kind}
    for name in (name for name in kind if name not in TYPES):
        columns[name] = (_messages if lists or name == "messages" else _text)(row[name], f"`{name}`")
    if lists and task != "grpo":
        columns[ANSWER] = _answer(columns, everything)
        columns |= {"tools": row.get("tools") or None, "chat_template_kwargs": row.get("chat_template_kwargs") or {}}
    if task == "dpo" and lists and "prompt" not in columns and columns["chosen"][0] != columns["rejected"][0]:
        raise Mistake("has no `prompt`, and `chosen` and `rejected` begin with different messages; write a `prompt`")
    for name in TYPES.keys() & columns.keys():
        type_, what = TYPES[name]
        if not isinstance(columns[name], type_):
            raise Mistake(f"has {_told(columns[name])} in `{name}`, which must be {what}")
    if columns.get("tools"):
        columns["tools"] = json.dumps(columns["tools"], ensure_ascii=False)  # TRL decodes it
    others = [name for name in given if name not in columns and name not in used]
    if images := [name for name in others if name in ("image", "images", "videos", "audios")]:
        raise Mistake(f"has `{images[0]}`, and zero-train trains text models only; delete the column or the row")
    if task == "grpo":  # TRL gives all other columns to the reward function
        return Row((*kind, *sorted(set(found) - set(kind))), {**found, **columns})
    remarks = [f"{_listed(used)} read as {_listed(kind)}"] if used else []
    return Row(kind, columns, (*remarks, *([f"columns that are not read: {_listed(others)}"] if others else [])))


def _told(value: object) -> str:
    """Returns a value as JSON writes it, or its beginning."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _listed(names: Collection[str]) -> str:
    return ", ".join(f"`{name}`" for name in list(names)[:10]) + (", …" if len(names) > 10 else "")


def _needed(task: str) -> str:
    return ", or ".join(" and ".join(f"`{name}`" for name in kind) for kind in KINDS[task])


# -- the table: other names of columns ---------------------------------------------------------------------------------


def _renamed(row: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the row with TRL's columns in place of ShareGPT's and Alpaca's, and the names of the replaced ones."""
    if "conversations" in row and "messages" not in row:
        return _with_system({**row, "messages": row["conversations"]}, ["conversations"])
    if not {"instruction", "output"} <= set(row) or {"messages", "prompt", "completion", "text"} & set(row):
        return _with_system(row, [])
    asked = [_text(row[name], f"`{name}`") for name in ("instruction", "input") if row.get(name)]
    pairs = row.get("history") or []
    if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
        raise Mistake("has no list of pairs in `history`; write [[question, answer], …]")
    texts = [text for pair in pairs for text in pair] + ["\n\n".join(asked), row["output"]]
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    used = [name for name in row if name in ("instruction", "input", "output", "history")]
    row, used = _with_system({**row, "messages": messages}, used)
    messages = row.pop("messages")
    return {**row, "prompt": messages[:-1], "completion": messages[-1:]}, used


def _with_system(row: dict[str, Any], used: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Returns the row with the text in `system` as the first message."""
    messages = row.get("messages")
    if not row.get("system") or not isinstance(messages, list) or not messages:
        return row, used
    if isinstance(messages[0], Mapping) and "system" in (messages[0].get("role"), messages[0].get("from")):
        raise Mistake("has a system message and a column `system`; delete one of them")
    return {**row, "messages": [{"role": "system", "content": row["system"]}, *messages]}, [*used, "system"]


def _without_text(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a pair of conversations without `prompt`, a text that both begin with: TRL makes a prompt of that."""
    prompt, chosen, rejected = (row.get(name) for name in ("prompt", "chosen", "rejected"))
    if not isinstance(prompt, str) or not isinstance(chosen, list) or not isinstance(rejected, list):
        return row
    if not any(one == other and one.get("content") == prompt for one, other in zip(chosen, rejected, strict=False)):
        raise Mistake("has a `prompt` that is not in `chosen` and `rejected`; write it as the first message of both")
    return {name: value for name, value in row.items() if name != "prompt"}


def _called(value: object, place: str) -> list[dict[str, Any]]:
    """Returns the `tool_calls` in ShareGPT's text of a function_call."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        found = None
    calls = found if isinstance(found, list) else [found]
    if not all(isinstance(call, Mapping) and {"name", "arguments"} <= set(call) for call in calls):
        raise Mistake(f"has {_told(value)} as the function_call in {place}; write JSON with `name` and `arguments`")
    return [{"type": "function", "function": call} for call in calls]


# -- the validator -----------------------------------------------------------------------------------------------------


def _parsed(name: str, value: Any) -> Any:
    """Decodes the JSON in a text of a column in LISTS or TYPES, such as a CSV cell. Returns other values as given."""
    if isinstance(value, str) and (name in TYPES or (name in LISTS and value.lstrip()[:1] == "[")):
        try:
            found = json.loads(value.lower() if name == "label" else value)
        except ValueError:
            return value
        if name in TYPES or all(isinstance(each, dict) for each in found):
            return found
    return value


def _kind(row: Mapping[str, Any], task: str) -> tuple[str, ...]:
    if task == "sft" and {"completion", "label"} <= set(row):
        raise Mistake("has `label`, and task=sft learns every completion; choose task=kto, or delete `label`")
    for kind in KINDS[task]:
        if set(kind) <= set(row):
            return kind
    other = next((t for t in KINDS for kind in KINDS[t] if set(kind) <= set(row)), "")
    hint = f"; add the missing columns, or choose task={other}" if other else ""
    raise Mistake(f"has {_listed(row) or 'no columns'}, and task={task} needs {_needed(task)}{hint}")


def _messages(value: object, place: str) -> list[dict[str, Any]]:
    """Returns messages with `role` and `content`, without other keys that are null."""
    if not isinstance(value, list) or not value:
        raise Mistake(f"has {_told(value)} in {place}, which must be a list of one or more messages")
    return [_message(message, f"message {number} of {place}") for number, message in enumerate(value, 1)]


def _message(value: object, place: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise Mistake(f"has {_told(value)} as {place}, which must be an object with `role` and `content`")
    message = {key: item for key, item in value.items() if item is not None or key == "content"}
    if "role" not in message and "from" in message:
        given, content = message.pop("from"), message.pop("value", None)
        message = {"role": given, "content": content, **message}
        if given == "function_call":
            message |= {"content": "", "tool_calls": _called(content, place)}
    role, calls = message.get("role"), message.get("tool_calls")
    if not isinstance(role, str) or role not in ROLES:
        raise Mistake(f"has {_told(role)} as `role` of {place}; roles are system, user, assistant and tool")
    if calls and not isinstance(calls, list):
        raise Mistake(f"has {_told(calls)} as `tool_calls` of {place}, which must be a list")
    if not (calls and ROLES[role] == "assistant" and message.get("content") in (None, "")):
        _text(message.get("content"), f"`content` of {place}")
    return {**message, "role": ROLES[role]}


def _answer(columns: Mapping[str, Any], everything: bool) -> int:
    """Returns the value of the column ANSWER for a row of messages.

    Raises:
        Mistake: there is nothing to learn, or a mark on a message asks for a choice that TRL's trainers do not have.
    """
    learned, left_out = [], ""
    for name in (name for name in columns if isinstance(columns[name], list)):
        chooses = name == "messages" and not everything  # whether its answers alone are learned from
        answers = [message["role"] == "assistant" for message in columns[name]]
        if not any(answers) and (chooses or name not in ("messages", "prompt")):
            more = ", or set task.loss_on=everything" if chooses else ""
            raise Mistake(f"has no assistant message in `{name}`, so there is nothing to learn from; add one{more}")
        for number, message in enumerate(columns[name]):
            counts = everything or (answers[number] if chooses else name != "prompt")
            for mark in ("train", "weight"):
                value = message.get(mark, counts)
                said = f"`{mark}` {_told(value)} in message {number + 1} of `{name}`"
                if isinstance(value, (str, list, dict)) or value not in (0, 1):
                    raise Mistake(f"has {said}, which must be the number 0 or 1, or false or true")
                if value and not counts:
                    raise Mistake(f"has {said}, but only answers are trained on; delete `{mark}` from this message")
                if counts and not value and not chooses:
                    raise Mistake(f"has {said}, but this task trains on all of `{name}`; delete `{mark}` or the row")
                counts, left_out = bool(value), said if counts and not value else left_out
            if counts:
                learned.append(number)
    if "messages" not in columns or everything:
        return 0
    if not learned:
        raise Mistake(f"has {left_out}, and no other answer to learn from; delete the row")
    only = learned[0] if learned == [len(columns["messages"]) - 1] else 0
    if left_out and not only:
        raise Mistake(f"has {left_out}; then a row trains its last message only; write a row that ends at each answer")
    return -only if left_out else only


def _text(value: object, place: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise Mistake(f"has {_told(value)} in {place}, which must be one string that is not blank")
    return value
