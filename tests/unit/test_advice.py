"""What our messages name exists, and a new advice comes with a test that follows it. See tests/advice.py."""

import ast

import pytest

from tests import advice

TEXTS = advice.texts()


@pytest.mark.promise("messages-name-what-exists")
@pytest.mark.parametrize("package", advice.PACKAGES)
def test_every_setting_function_and_command_that_a_message_names_exists(package: str) -> None:
    wrong = {
        f"{text.module}:{text.line}: {' '.join(text.text.split())}": names
        for text in TEXTS
        if text.package == package and (names := advice.unknown(text))
    }
    assert not wrong


@pytest.mark.promise("messages-name-what-exists")
@pytest.mark.parametrize(
    ("package", "text", "name"),
    [
        ("zero_core", "call zero_core.shards before the step", "zero_core.shards"),
        ("zero_core", "give zero_core.shard a max_gradient_norm= instead of this", "max_gradient_norm="),
        ("zero_offload", "call store.hibernate() before the step", "store.hibernate()"),
        ("zero_train", "set offload.rowz to 4 or lower run.micro_batch", "offload.rowz"),
        ("zero_train", "choose another place with offload=floppy instead", "offload=floppy"),
        ("zero_hf", "make one with zero-hf transmogrify FOLDER, then load it", "zero-hf transmogrify"),
        (
            "zero_hf",
            "it is missing: pip install 'zero-train[everything]' first",
            "pip install 'zero-train[everything]'",
        ),
        ("zero_hf", "set ZERO_HF_SETTINGS to the path of a file", "ZERO_HF_SETTINGS"),
    ],
)
def test_a_name_that_does_not_exist_is_found(package: str, text: str, name: str) -> None:
    assert advice.unknown(advice.Text(package, "module.py", 1, text)) == [name]


@pytest.mark.parametrize(
    ("text", "advises"),
    [
        ("call gc.disable() in the script", True),
        ("{} does not exist; change data.path", True),
        ("norms are computed when they are read. Read it before", True),
        ("step() inside AveragedModel.swapped_in has updated the averages", False),
        ("run.resume: cannot load {}: {}", False),
        ("update of each rank: {}", False),
        ("wrote {} KiB and read them back", False),
        ("{}, read by the tokenizer of {}", False),
        ("gradients are flattened and split after {} elements", False),
    ],
)
def test_an_advice_is_told_from_a_fact(text: str, advises: bool) -> None:
    assert advice.Text("zero_core", "module.py", 1, text).advises is advises


def test_a_test_quotes_what_a_message_says_to_do_and_not_the_fact_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    text = advice.Text("zero_core", "module.py", 1, "the file is cut short: copy it anew from where it was")
    for quote, quoted in {"the file is cut": False, "cut short: copy it": True, "from where it was": True}.items():
        monkeypatch.setattr(advice, "_quotes", lambda quote=quote: {quote})
        assert text.quoted is quoted, quote


def test_the_help_of_an_option_is_no_advice() -> None:
    assert not advice.Text("zero_hf", "module.py", 1, "write safetensors, and no states", help=True).advises
    assert any(text.help for text in TEXTS)


def test_a_text_is_read_with_its_values_and_constants() -> None:
    tree = ast.parse('OUT = "use one"\ndef f(x):\n    "Docstring of four words."\n    raise E(f"{x} is bad: " + OUT)\n')
    assert list(advice._texts(tree, advice._constants(tree))) == [(1, "use one"), (4, "{} is bad: use one")]


def test_what_tests_are_marked_with_is_in_a_message() -> None:
    gone = [part for part in (*advice.marked(), *advice.EXEMPT) if not any(part in text.text for text in TEXTS)]
    assert not gone


@pytest.mark.promise("messages-name-what-exists")
def test_a_new_advice_is_followed_by_a_test() -> None:
    """Follow it in a test that quotes it or is marked with it, or say in EXEMPT of tests/advice.py why nobody can."""
    left = [f"{text.module}:{text.line}: {' '.join(text.text.split())}" for text in advice.unfollowed()]
    assert not left, "no test follows the advices of\n" + "\n".join(left)
