"""Which tokens of a row of fine-tuning are learned from: marks answers, and counts what data.sequence_length cuts off.

TRL does both where it can: it marks the answers if the chat template says where they are, and cuts rows without a word.
Owns no row and no trainer. Needs the extra `finetune`.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zero_train import conversations, templates
from zero_train.errors import ConfigError
from zero_train.schema import DataConfig

_REFUSED = "the chat template refuses {}: {}; correct the row, or name another template with data.chat_template=FILE"
_NOT_LEARNED = -100  # the label of a token that does not count, to torch's cross entropy


class _Unmarked(Exception):
    """The template shows a conversation differently once it goes on. messages: the conversation."""

    def __init__(self, messages: Sequence[Any], reason: str) -> None:
        super().__init__(reason)
        self.messages = list(messages)


def marked(read: conversations.Rows, tokenizer: Any, folder: Path, data: DataConfig) -> conversations.Rows:
    """Returns rows of messages as they are if TRL finds their answers, else as tokens of which the answers are marked.

    Where TRL's marks leave out the token that ends an answer, a remark says so.

    An answer begins where the conversation before it, and the template's beginning of an answer, end. It ends where the
    conversation up to it does.

    Raises:
        ConfigError: the template shows what was said before differently once a conversation goes on.
    """
    import datasets
    from trl.chat_template_utils import get_training_chat_template

    if templates.marks_answers(tokenizer.chat_template):
        return _remarked(read, tokenizer, tokenizer.chat_template)
    try:
        return _remarked(read, tokenizer, get_training_chat_template(tokenizer))
    except ValueError:
        pass
    datasets.disable_progress_bars()
    try:
        parts = [
            part and part.map(_of_row, fn_kwargs={"tokenizer": tokenizer}, remove_columns=part.column_names)
            for part in (read.training, read.validation)
        ]
    except _Unmarked as error:
        raise ConfigError(
            f"task.loss_on=answers: the chat template of model.path={folder} cannot mark the answers of "
            f"{conversations.place_of([data], {'messages': error.messages}, 'sft')}: it has no {{% generation %}}, and "
            f"{error}; set task.loss_on=everything, name a template that has it with data.chat_template=FILE, or write "
            "each conversation as `prompt` and `completion`"
        ) from error
    return dataclasses.replace(read, kind="tokens", training=parts[0], validation=parts[1])


def _remarked(read: conversations.Rows, tokenizer: Any, template: str) -> conversations.Rows:
    from trl import chat_template_utils

    trained = getattr(chat_template_utils, "is_chat_template_stop_token_trained", None)  # no early TRL has it, or warns
    if trained is None or trained(tokenizer, chat_template=template):
        return read
    told = (
        "as TRL sees it, the chat template has the token that ends an answer outside of {% generation %}, so that the "
        "model may not learn to stop; put it inside with data.chat_template=FILE, or set task.loss_on=everything"
    )
    return dataclasses.replace(read, remarks=(*read.remarks, told))


def _of_row(row: dict[str, Any], tokenizer: Any) -> dict[str, list[int]]:
    import jinja2

    messages = row["messages"]
    tools = _tools(row)

    def read(count: int, answers: bool = False) -> list[int]:
        found = tokenizer.apply_chat_template(
            messages[:count], tools=tools, add_generation_prompt=answers, tokenize=True, return_dict=True
        )
        return list(found["input_ids"])

    try:
        whole = read(len(messages))
        labels = [_NOT_LEARNED] * len(whole)
        for at, message in enumerate(messages):
            if message["role"] == "assistant":
                before, after = read(at, answers=True), read(at + 1)
                if whole[: len(after)] != after:
                    raise _Unmarked(messages, f"shows message {at + 1} differently once the conversation goes on")
                pairs = enumerate(zip(before, after, strict=False))
                start = next((n for n, (one, other) in pairs if one != other), min(len(before), len(after)))
                labels[start : len(after)] = after[start:]
    except (jinja2.TemplateError, IndexError) as error:
        raise _Unmarked(messages, f"refuses a part of the conversation ({error})") from error
    return {"input_ids": whole, "labels": labels}


def fitted(
    prepare: Any,
    dataset: Any,
    tokenizer: Any,
    args: Any,
    *given: Any,
    configs: Sequence[DataConfig] = (),
    of: str = "",
) -> tuple[Any, str, dict[str, int]]:
    """Has TRL prepare rows, and counts those that it cuts.

    Args:
        prepare: a trainer's `_prepare_dataset`, which `given` are the other arguments of. The last names the part.
        configs: what names the files of the rows.
        of: where the rows come from, if there are several places.

    Returns:
        The rows, a sentence or "", and the counts by name.

    Raises:
        ConfigError: nothing that can be learned from is left of any row, or the chat template refuses one.
    """
    limit, part = args.max_length, {"train": "to train on", "eval": "held out"}[given[-1]] + of
    packs = len(given) > 1 and given[0]
    whole = _uncut(prepare, dataset, tokenizer, args, given, configs, part)
    pairs = "prompt_ids" in whole.column_names
    scored = not pairs and "chosen_ids" in whole.column_names  # TRL leaves out what is longer
    lengths, bare = [], 0
    for batch in whole.iter(batch_size=1000):
        lengths += _lengths(batch)
        bare += sum(all(label == _NOT_LEARNED for label in row[:limit]) for row in batch.get("labels", ()))
    longer, longest, total = sum(length > limit for length in lengths), max(lengths), len(whole)
    if pairs:  # TRL leaves these out, and cuts the others when it makes a batch
        left = whole.filter(lambda row: len(row["prompt_ids"]) < limit)
    else:
        left = prepare(whole, tokenizer, args, *given)
    if not len(left) or (packs and longer and not any(_learned(row) for row in left)):
        late = f"has what is to be learned after token {limit}, so nothing would be"
        late = f"has more than {limit} tokens, so none would be learned from" if scored else late
        raise ConfigError(
            f"data.sequence_length={limit}: each of the {total:,} rows {part} {late}; "
            f"raise data.sequence_length ({longest:,} would keep every row)"
        )
    dropped = 0 if packs else total - len(left)
    lost = sum(max(0, length - limit) for length in lengths)
    counts = {"rows": total, "cut": longer - dropped, "left_out": dropped, "longest": longest}
    counts |= {"tokens": sum(lengths), "tokens_after_the_end": lost}
    if not longer:
        return left, f"{bare:,} of {total:,} rows {part} have nothing to learn" if bare else "", counts
    why = ""
    if dropped:
        reason = "a score is that of a whole text" if scored else "what is to be learned comes after it"
        why = f", {dropped:,} are left out, as {reason}"
    elif bare:
        why = f", and of {bare:,} nothing is learned, as what is to be learned comes after it"
    said = (
        f"{longer:,} of {total:,} rows {part} are longer than data.sequence_length={limit}: {longer - dropped:,} lose "
        f"their end{why}; {lost:,} of {sum(lengths):,} tokens come after it; data.sequence_length={longest} would keep "
        "all"
    )
    return left, said, counts


def _uncut(
    prepare: Any,
    dataset: Any,
    tokenizer: Any,
    args: Any,
    given: Sequence[Any],
    configs: Sequence[DataConfig],
    part: str,
) -> Any:
    """The rows as TRL prepares them, neither cut nor packed. part: which, for errors; the rest is as in `fitted`."""
    import jinja2

    uncut = copy.copy(args)
    uncut.max_length = None
    try:
        return prepare(dataset, tokenizer, uncut, *([False, *given[1:]] if len(given) > 1 else given))
    except jinja2.TemplateError as error:
        accepted(dataset, tokenizer, configs)
        raise ConfigError(_REFUSED.format("a row", error)) from error
    except RuntimeError as error:  # of TRL, where {% generation %} of a template leaves a row without any answer
        place = _first(dataset, lambda row: _unmarked(row, tokenizer), configs) or f"at least one of the rows {part}"
        raise ConfigError(
            f"task.loss_on=answers: the chat template's {{% generation %}} marks no answer in {place}; correct it with "
            "data.chat_template=FILE, or set task.loss_on=everything"
        ) from error


def accepted(dataset: Any, tokenizer: Any, configs: Sequence[DataConfig]) -> None:
    """Raises ConfigError, with its place, for the first row of messages that the chat template refuses."""
    import jinja2

    found: list[jinja2.TemplateError] = []

    def refused(row: dict[str, Any]) -> bool:
        pairs = [name for name in ("completion", "chosen", "rejected") if name in row]
        try:
            for messages in [row.get("prompt", []) + row[name] for name in pairs] if pairs else [row["messages"]]:
                tokenizer.apply_chat_template(messages, tools=_tools(row), tokenize=False)
        except jinja2.TemplateError as error:
            found.append(error)
        return bool(found)

    if place := _first(dataset, refused, configs):
        raise ConfigError(_REFUSED.format(place, found[0])) from found[0]


def _unmarked(row: dict[str, Any], tokenizer: Any) -> bool:
    how = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    return 1 not in tokenizer.apply_chat_template(row["messages"], tools=_tools(row), **how)["assistant_masks"]


def _first(dataset: Any, wrong: Callable[[dict[str, Any]], bool], configs: Sequence[DataConfig]) -> str | None:
    """The place of the first row that is `wrong`."""
    for row in dataset:
        if wrong(row):
            task = "sft" if "chosen" not in row else "dpo" if "prompt" in row else "reward"
            return conversations.place_of(configs, row, task)
    return None


def _tools(row: dict[str, Any]) -> Any:
    return json.loads(row["tools"]) if isinstance(row.get("tools"), str) else row.get("tools")


def _lengths(batch: dict[str, list[Any]]) -> list[int]:
    if "chosen_ids" not in batch:
        return [len(ids) for ids in batch["input_ids"]]
    prompts = batch.get("prompt_ids", [[]] * len(batch["chosen_ids"]))
    columns = (prompts, batch["chosen_ids"], batch["rejected_ids"])
    return [len(prompt) + max(len(one), len(other)) for prompt, one, other in zip(*columns, strict=True)]


def _learned(row: dict[str, Any]) -> bool:
    return any(label != _NOT_LEARNED for label in row["labels"])
