"""A chat template in a file: a mistake is told with its line, before anything is loaded."""

from __future__ import annotations

import jinja2
import pytest

from zero_train import templates
from zero_train.errors import ConfigError

GOOD = "{% for m in messages %}{{ m['content'] }}{% generation %}x{% endgeneration %}{% endfor %}"


def test_a_template_is_read_with_what_transformers_adds_to_jinja(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text(GOOD + "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{% endfor %}")
    assert templates.read(str(file)).startswith(GOOD) and templates.marks_answers(GOOD)
    assert not templates.marks_answers("{{ messages }}") and not templates.marks_answers(None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"{{ messages }}\n{% for m in messages %}\n", "in line 2"),
        (b"{{ messages }}\n{% generate %}", "generate"),
        (b"hello {{ message }}", "does not read `messages`"),
        (b"", "does not read `messages`"),
        (b"{{ messages }}\xff", "not UTF-8"),
    ],
)
def test_what_is_no_template_is_told(tmp_path, text, said):
    file = tmp_path / "chat.jinja"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=r"data\.chat_template=.*chat\.jinja") as error:
        templates.read(str(file))
    assert said in str(error.value)


def test_a_file_that_is_not_there_is_told_with_those_that_are(tmp_path):
    (tmp_path / "chat.jinja").write_text(GOOD)
    with pytest.raises(ConfigError, match=r"did you mean chat\.jinja"):
        templates.read(str(tmp_path / "chta.jinja"))
    with pytest.raises(ConfigError, match="is a folder"):
        templates.read(str(tmp_path))


def test_a_mistake_for_which_jinja_knows_no_line_names_none(tmp_path, monkeypatch):
    def refuse(*given):
        raise jinja2.TemplateError("it is wrong")

    file = tmp_path / "chat.jinja"
    file.write_text(GOOD)
    monkeypatch.setattr(jinja2.Environment, "parse", refuse)
    with pytest.raises(ConfigError, match="no Jinja template: it is wrong; correct it"):
        templates.read(str(file))
