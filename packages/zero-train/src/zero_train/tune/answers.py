"""Has TRL learn from answers alone, and counts the tokens that data.sequence_length cuts off, as TRL cuts silently.

TRL finds answers by a template's {% generation %}, by its own template for a known family, or as the completion of a
prompt. Where none of these works, the run is refused. It never learns all tokens instead. Needs the extra `finetune`.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

from zero_train.data import rows
from zero_train.data.row_sets import Rows
from zero_train.errors import ConfigError, told
from zero_train.schema import Config

_NOT_LEARNED = -100  # torch's cross entropy ignores tokens with this label


def take_template(tokenizer: Any, given: str) -> None:
    """Gives the tokenizer the Jinja chat template of a file. Raises ConfigError if it cannot be read."""
    with told(f"data.chat_template={given} cannot be read: ", OSError, ValueError, way_out="; name a UTF-8 file"):
        tokenizer.chat_template = Path(given).expanduser().read_text(encoding="utf-8")


def mapped(read: Rows, tokenizer: Any, folder: Path, config: Config) -> Rows:
    """Returns rows from which TRL's SFTTrainer learns the answers alone, unless task.loss_on=everything.

    Raises:
        ConfigError: TRL would not find the answers of these rows.
    """
    if read.kind != ("messages",) or config.task.loss_on == "everything":
        return read
    parts = [part for part in (read.training, read.validation) if part is not None]
    found = [(part, number, only) for part in parts for number, only in enumerate(part[rows.ANSWER])]
    marked = next((part[number][rows.PLACE] for part, number, only in found if only < 0), None)
    several = next((part[number][rows.PLACE] for part, number, only in found if not only), None)
    if marked is None and _marking(tokenizer):
        return read
    if several is None:
        features = read.training.features.copy()
        features |= {"prompt": features["messages"], "completion": features.pop("messages")}
        cut = {"function": _cut, "features": features, "remove_columns": ["messages"]}
        return read.mapped(lambda part: part.map(**cut), kind=("prompt", "completion"))
    if marked:
        why = f"{marked} leaves an answer out, so all rows must end with their only answer; split {several} into rows"
    else:
        why = (
            f"{several} has several answers to learn, which neither the chat template of model.path={folder} nor TRL's "
            "own marks by {% generation %}; name a template that does with data.chat_template=FILE, write a row for "
            "each answer, with the answer at its end, or set task.loss_on=everything"
        )
    raise ConfigError(f"task.loss_on=answers: {why}")


def _cut(row: dict[str, Any]) -> dict[str, Any]:
    end = abs(row[rows.ANSWER])
    return {"prompt": row["messages"][:end], "completion": row["messages"][end:]}


def _marking(tokenizer: Any) -> str | None:
    """Returns the template with which TRL marks answers, or None."""
    from trl.chat_template_utils import get_training_chat_template

    own = tokenizer.chat_template
    if isinstance(own, str) and re.search(r"\{%-?\s*generation\s*-?%\}", own):
        return own
    try:
        return get_training_chat_template(tokenizer)
    except ValueError:
        return None


def fitted(prepare: Any, dataset: Any, tokenizer: Any, args: Any, *given: Any) -> tuple[Any, str, dict[str, int]]:
    """Has TRL prepare rows, and counts those that it cuts.

    Args:
        prepare: a trainer's `_prepare_dataset`.
        given: its other arguments. The last one names the part: "train" or "eval".

    Returns:
        The rows, a sentence or "", and the counts by name.

    Raises:
        ConfigError: no row has a token left to learn from, or the chat template refuses a row.
    """
    limit, packs = args.max_length, given[:-1] and given[0]
    part = {"train": "to train on", "eval": "held out"}[given[-1]]
    whole = _uncut(prepare, dataset, tokenizer, args, given)
    if packs and args.packing_strategy != "bfd":  # others split rows, and cut nothing off
        return prepare(whole, tokenizer, args, *given), "", {"rows": len(whole), "cut": 0, "left_out": 0}
    kept = slice(-limit, None) if getattr(args, "truncation_mode", "") == "keep_end" else slice(limit)
    lengths, bare = [], 0
    for batch in whole.iter(batch_size=1000):
        lengths += _lengths(batch)
        bare += sum(all(label == _NOT_LEARNED for label in row[kept]) for row in batch.get("labels", ()))
    longer, longest, total = sum(length > limit for length in lengths), max(lengths), len(whole)
    # TRL continues from the tokens where it can. Otherwise it reads the rows again.
    left = prepare(whole, tokenizer, args, *given) if longer or "labels" in whole.column_names else whole
    if not len(left) or bare == total:
        raise ConfigError(
            f"data.sequence_length={limit}: each of the {total:,} rows {part} is longer, so that nothing would be "
            f"learned; raise data.sequence_length ({longest:,} would keep every row)"
        )
    dropped = 0 if packs else total - len(left)
    tokens, lost = sum(lengths), sum(max(0, length - limit) for length in lengths)
    counts = {"rows": total, "cut": longer - dropped, "left_out": dropped, "longest": longest}
    counts |= {"tokens": tokens, "tokens_after_the_end": lost}
    if not longer:
        return left, f"{bare:,} of {total:,} rows {part} have nothing to learn" if bare else "", counts
    why = f", {dropped:,} are left out" if dropped else f", and of {bare:,} nothing is learned" if bare else ""
    return (
        left,
        f"{longer:,} of {total:,} rows {part} are longer than data.sequence_length={limit}: {longer - dropped:,} are "
        f"cut{why}; {lost:,} of {tokens:,} tokens are beyond it; data.sequence_length={longest} would keep all",
        counts,
    )


def _uncut(prepare: Any, dataset: Any, tokenizer: Any, args: Any, given: tuple[Any, ...]) -> Any:
    """Returns the rows as TRL prepares them, neither cut nor packed nor shuffled."""
    import jinja2

    uncut = copy.copy(args)
    uncut.max_length, uncut.shuffle_dataset = None, False
    try:
        return prepare(dataset, tokenizer, uncut, *([False, *given[1:]] if len(given) > 1 else given))
    except (jinja2.TemplateError, RuntimeError):  # RuntimeError: of TRL, where a template marks no answer in a row
        if rows.ANSWER in dataset.column_names:
            accepted(dataset, tokenizer, getattr(args, "assistant_only_loss", False))
        raise


def accepted(dataset: Any, tokenizer: Any, marks: bool = False) -> None:
    """Checks that the chat template takes each row of messages and, if it `marks`, marks an answer in it.

    Raises:
        ConfigError: names the first row that it refuses, or in which it marks none.
    """
    how: dict[str, Any] = {"tokenize": marks, "return_dict": marks, "return_assistant_tokens_mask": marks}
    how |= {"chat_template": _marking(tokenizer)} if marks else {}
    for row in dataset:
        pairs = [row.get("prompt", []) + row[name] for name in ("completion", "chosen", "rejected") if name in row]
        more = {"tools": row["tools"] and json.loads(row["tools"]), **row["chat_template_kwargs"], **how}
        texts = [_rendered(row, messages, tokenizer, **more) for messages in pairs or [row["messages"]]]
        if marks and any(1 not in text["assistant_masks"] for text in texts):
            raise ConfigError(
                f"task.loss_on=answers: the chat template's {{% generation %}} marks no answer in {row[rows.PLACE]}; "
                "correct it with data.chat_template=FILE, or set task.loss_on=everything"
            )


def roomy(read: Rows, tokenizer: Any, args: Any, config: Config) -> None:
    """Raises ConfigError if a prompt of task=grpo with its completion may exceed data.sequence_length."""
    longest = 0
    for row in read.training:
        how = {"add_generation_prompt": True, "return_dict": True}
        prompt = row["prompt"]
        ids = tokenizer(prompt) if isinstance(prompt, str) else _rendered(row, prompt, tokenizer, **how)
        longest = max(longest, len(ids["input_ids"]))
    if longest + args.max_completion_length > config.data.sequence_length:
        raise ConfigError(
            f"data.sequence_length={config.data.sequence_length}: a prompt has {longest:,} tokens, and up to "
            f"{args.max_completion_length:,} are generated after it; set data.sequence_length="
            f"{longest + args.max_completion_length}, or lower trl.max_completion_length"
        )


def _rendered(row: dict[str, Any], messages: list[Any], tokenizer: Any, **how: Any) -> Any:
    """Applies the chat template. Raises ConfigError, with the place of the row, if it refuses the messages."""
    import jinja2

    way_out = "; correct the row or the template, or name another one with data.chat_template=FILE"
    with told(f"the chat template fails for {row[rows.PLACE]}: ", jinja2.TemplateError, way_out=way_out):
        return tokenizer.apply_chat_template(messages, **how)


def _lengths(batch: dict[str, list[Any]]) -> list[int]:
    if "input_ids" in batch:
        return [len(ids) for ids in batch["input_ids"]]
    names = [name for name in ("completion_ids", "chosen_ids", "rejected_ids") if name in batch]
    ends = [max(map(len, each)) for each in zip(*(batch[name] for name in names), strict=True)]
    prompts = batch.get("prompt_ids", [[]] * len(ends))
    return [len(prompt) + end for prompt, end in zip(prompts, ends, strict=True)]
