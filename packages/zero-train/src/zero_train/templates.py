"""Reads a chat template from a file of its own (data.chat_template). Tells its mistakes before torch is imported."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from zero_train import row_files
from zero_train.errors import ConfigError

__all__ = ["marks_answers", "read"]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def marks_answers(template: Any) -> bool:
    """Returns whether a template says by {% generation %} what the assistant wrote."""
    return isinstance(template, str) and _GENERATION.search(template) is not None


def read(given: str) -> str:
    """Returns the text of a Jinja template.

    Raises:
        ConfigError: there is no such file, it is not UTF-8, or no template of messages. It names the line.
    """
    path, key = Path(given).expanduser(), f"data.chat_template={given}"
    if not path.is_file():
        raise (
            row_files.missing("data.chat_template", given)
            if not path.exists()
            else ConfigError(f"{key} is a folder; name the file in it, such as {path / 'chat_template.jinja'}")
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key} is not UTF-8: {error.reason} at its byte {error.start}; save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{key} cannot be read: {error.strerror}; change data.chat_template") from error
    _check(key, text)
    return text


def _check(key: str, text: str) -> None:
    import jinja2  # torch needs it too
    from jinja2 import meta, nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        """What transformers adds to Jinja."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True))

    environment = jinja2.Environment(extensions=[Generation, "jinja2.ext.loopcontrols"])
    try:
        used = meta.find_undeclared_variables(environment.parse(text))
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        place = f", in line {line}" if line else ""
        raise ConfigError(f"{key} is no Jinja template: {error}{place}; correct it") from error
    if "messages" not in used:
        raise ConfigError(
            f"{key} does not read `messages`, so every conversation would be the same text; write a template like the "
            "tokenizer's own chat_template.jinja"
        )
