"""Has TRL learn from answers alone, and counts what data.sequence_length cuts off, which TRL does without a word.

TRL finds answers by a template's {% generation %}, by its own template for a known family, or as the completion of a
prompt. Where none of these serves, a run is refused: never are all tokens learned. Needs the extra `finetune`.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zero_train import row_files, rows
from zero_train.errors import ConfigError
from zero_train.row_sets import Rows
from zero_train.schema import Config

_REFUSED = "the chat template refuses {}: {}; correct the row, or name another template with data.chat_template=FILE"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NOT_LEARNED = -100  # the label of a token that does not count, to torch's cross entropy


def take_template(tokenizer: Any, given: str) -> None:
    """Gives the tokenizer the Jinja chat template of a file.

    Raises:
        ConfigError: there is no such file, or it is no template of messages.
    """
    import jinja2

    path, key = Path(given).expanduser(), f"data.chat_template={given}"
    if not path.exists():
        raise row_files.missing("data.chat_template", given)
    try:
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key} cannot be read: {error}; name a file of UTF-8") from error
    told = set()
    for text in ("one", "other"):
        try:
            told.add(tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"{key} is no Jinja template: {error}, in line {error.lineno}; correct it") from error
        except jinja2.TemplateError:  # it refuses such a conversation, which may be right
            return
    if len(told) == 1:
        raise ConfigError(
            f"{key} does not read `messages`, so every conversation would be the same text; write a template like the "
            "tokenizer's own chat_template.jinja"
        )


def mapped(read: Rows, tokenizer: Any, folder: Path, config: Config) -> Rows:
    """Returns rows of which TRL's SFTTrainer learns the answers alone, unless task.loss_on=everything.

    Where TRL's marks leave out the token that ends an answer, a remark says so.

    Raises:
        ConfigError: TRL would not find the answers of these rows.
    """
    if read.kind != ("messages",) or config.task.loss_on == "everything":
        return read
    parts = [part for part in (read.training, read.validation) if part is not None]
    single = all(min(part.with_format("numpy")[rows.ANSWER][:]) > 0 for part in parts)
    skips = next((row[rows.PLACE] for part in parts if any(part[rows.SKIPS]) for row in part if row[rows.SKIPS]), None)
    template = _marking(tokenizer)
    if template is not None and skips is None:
        return read.mapped(lambda part: part, remarks=(*read.remarks, *_unlearned_end(tokenizer, template)))
    if single:
        features = read.training.features.copy()
        features |= {"prompt": features["messages"], "completion": features.pop("messages")}
        cut = {"function": _cut, "features": features, "remove_columns": ["messages"]}
        return read.mapped(lambda part: part.map(**cut), kind=("prompt", "completion"))
    several = next(row[rows.PLACE] for part in parts for row in part if not row[rows.ANSWER])
    if skips:
        why = f"a mark in {skips} leaves an answer out, and {several} has several to learn; write a row for each"
    else:
        why = (
            f"the chat template of model.path={folder} has no {{% generation %}}, TRL knows none for it that has, and "
            f"{several} has more than one answer to learn; name a template that has it with data.chat_template=FILE, "
            "write a row for each answer, which it ends, or set task.loss_on=everything"
        )
    raise ConfigError(f"task.loss_on=answers: {why}")


def _cut(row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": row["messages"][: row[rows.ANSWER]], "completion": row["messages"][row[rows.ANSWER] :]}


def _marking(tokenizer: Any) -> str | None:
    """Returns the template with which TRL marks answers, or None."""
    from trl.chat_template_utils import get_training_chat_template

    own = tokenizer.chat_template
    if isinstance(own, str) and _GENERATION.search(own):
        return own
    try:
        return get_training_chat_template(tokenizer)
    except ValueError:
        return None


def _unlearned_end(tokenizer: Any, template: str) -> list[str]:
    from trl import chat_template_utils

    trained = getattr(chat_template_utils, "is_chat_template_stop_token_trained", None)  # no early TRL has it, or warns
    if trained is None or trained(tokenizer, chat_template=template):
        return []
    return [
        "as TRL sees it, the chat template has the token that ends an answer outside of {% generation %}, so that the "
        "model may not learn to stop; put it inside with data.chat_template=FILE, or set task.loss_on=everything"
    ]


def fitted(prepare: Any, dataset: Any, tokenizer: Any, args: Any, *given: Any) -> tuple[Any, str, dict[str, int]]:
    """Has TRL prepare rows, and counts those that it cuts.

    Args:
        prepare: a trainer's `_prepare_dataset`, which `given` are the other arguments of. The last names the part.

    Returns:
        The rows, a sentence or "", and the counts by name.

    Raises:
        ConfigError: nothing that can be learned from is left of any row, or the chat template refuses one.
    """
    limit, part = args.max_length, {"train": "to train on", "eval": "held out"}[given[-1]]
    keeps_end = getattr(args, "truncation_mode", "") == "keep_end"
    kept = slice(-limit, None) if keeps_end else slice(limit)
    packs = len(given) > 1 and given[0]
    whole = _uncut(prepare, dataset, tokenizer, args, given, part)
    lengths, bare = [], 0
    for batch in whole.iter(batch_size=1000):
        lengths += _lengths(batch)
        bare += sum(all(label == _NOT_LEARNED for label in row[kept]) for row in batch.get("labels", ()))
    longer, longest, total = sum(length > limit for length in lengths), max(lengths), len(whole)
    labelled, scored = "labels" in whole.column_names, "prompt_ids" not in whole.column_names
    left = whole  # TRL goes on from tokens where it can, and else reads the rows once more
    if labelled or longer:
        left = prepare(whole if scored else dataset, tokenizer, args, *given)
    if not len(left) or (packs and longer and not any(map(_learned, left))):
        late = f"has what is to be learned after token {limit}, so nothing would be"
        late = late if labelled or not scored else f"has more than {limit} tokens, so none would be learned from"
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
        reason = "what is to be learned comes after it" if labelled or not scored else "a score is that of a whole text"
        why = f", {dropped:,} are left out, as {reason}"
    elif bare:
        why = f", and of {bare:,} nothing is learned, as what is to be learned comes after it"
    end, after = ("beginning", "before") if keeps_end else ("end", "after")
    said = (
        f"{longer:,} of {total:,} rows {part} are longer than data.sequence_length={limit}: {longer - dropped:,} lose "
        f"their {end}{why}; {lost:,} of {sum(lengths):,} tokens come {after} it; data.sequence_length={longest} would "
        "keep all"
    )
    return left, said, counts


def _uncut(prepare: Any, dataset: Any, tokenizer: Any, args: Any, given: tuple[Any, ...], part: str) -> Any:
    """Returns the rows as TRL prepares them, neither cut nor packed. part: which, for errors."""
    import jinja2

    uncut = copy.copy(args)
    uncut.max_length = None
    try:
        return prepare(dataset, tokenizer, uncut, *([False, *given[1:]] if len(given) > 1 else given))
    except jinja2.TemplateError as error:
        accepted(dataset, tokenizer)
        raise ConfigError(_REFUSED.format("a row", error)) from error
    except RuntimeError as error:  # of TRL, where {% generation %} of a template leaves a row without any answer
        place = _first(dataset, lambda row: _unmarked(row, tokenizer)) or f"at least one of the rows {part}"
        raise ConfigError(
            f"task.loss_on=answers: the chat template's {{% generation %}} marks no answer in {place}; correct it with "
            "data.chat_template=FILE, or set task.loss_on=everything"
        ) from error


def accepted(dataset: Any, tokenizer: Any) -> None:
    """Raises ConfigError, with its place, for the first row of messages that the chat template refuses."""
    import jinja2

    found: dict[str, jinja2.TemplateError] = {}

    def refused(row: dict[str, Any]) -> bool:
        pairs = [name for name in ("completion", "chosen", "rejected") if name in row]
        try:
            for messages in [row.get("prompt", []) + row[name] for name in pairs] if pairs else [row["messages"]]:
                tokenizer.apply_chat_template(messages, tools=_tools(row), tokenize=False)
        except jinja2.TemplateError as error:
            found[row[rows.PLACE]] = error
        return row[rows.PLACE] in found

    if place := _first(dataset, refused):
        raise ConfigError(_REFUSED.format(place, found[place])) from found[place]


def _unmarked(row: dict[str, Any], tokenizer: Any) -> bool:
    how = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    return 1 not in tokenizer.apply_chat_template(row["messages"], tools=_tools(row), **how)["assistant_masks"]


def _first(dataset: Any, wrong: Callable[[dict[str, Any]], bool]) -> str | None:
    """Returns the place of the first row that is `wrong`."""
    return min((row[rows.PLACE] for row in dataset if wrong(row)), key=_order, default=None)


def _order(place: str) -> tuple[str, int]:
    """Sorts places as files have them, as rows may be shuffled."""
    name, _, number = place.rpartition(" ")
    return name, int(number) if number.isdigit() else 0


def _tools(row: dict[str, Any]) -> Any:
    return json.loads(row["tools"]) if isinstance(row.get("tools"), str) else None


def _lengths(batch: dict[str, list[Any]]) -> list[int]:
    if "input_ids" in batch:
        return [len(ids) for ids in batch["input_ids"]]
    names = [name for name in ("completion_ids", "chosen_ids", "rejected_ids") if name in batch]
    ends = [max(map(len, each)) for each in zip(*(batch[name] for name in names), strict=True)]
    prompts = batch.get("prompt_ids", [[]] * len(ends))
    return [len(prompt) + end for prompt, end in zip(prompts, ends, strict=True)]


def _learned(row: dict[str, Any]) -> bool:
    return any(label != _NOT_LEARNED for label in row["labels"])
