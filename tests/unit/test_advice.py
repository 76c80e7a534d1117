"""What our messages name exists, and a new advice comes with a test that follows it. See tests/advice.py."""

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
        ("zero_hf", "first pip install 'zero-train[everything]'", "pip install 'zero-train[everything]'"),
        ("zero_hf", "set ZERO_HF_SETTINGS to the path of a file", "ZERO_HF_SETTINGS"),
    ],
)
def test_a_name_that_does_not_exist_is_found(package: str, text: str, name: str) -> None:
    assert advice.unknown(advice.Text(package, "module.py", 1, text)) == [name]


def test_what_tests_are_marked_with_is_in_a_message() -> None:
    gone = [part for part in (*advice.marked(), *advice.EXEMPT) if not any(part in text.text for text in TEXTS)]
    assert not gone


@pytest.mark.promise("messages-name-what-exists")
def test_a_new_advice_is_followed_by_a_test() -> None:
    """Follow it in a test that quotes it or is marked with it, or say in EXEMPT of tests/advice.py why nobody can."""
    left = [f"{text.module}:{text.line}: {' '.join(text.text.split())}" for text in advice.unfollowed()]
    assert len(advice.advices()) > 500, "what tells advice from fact overlooks many"
    assert not left, "no test follows the advices of\n" + "\n".join(left)
