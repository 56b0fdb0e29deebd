"""How an environment process handles invalid answers and raising tools."""

import urllib.request

import pytest

from rlflow import Turn
from rlflow.rewards.environments.environment_worker import LONGEST, Refused, checked, is_service_error


def nobody_there():
    try:
        urllib.request.urlopen("http://127.0.0.1:1/", timeout=5)
    except OSError as error:
        return error
    raise AssertionError


def wrapped(hidden):
    try:
        try:
            raise ConnectionResetError
        except ConnectionError as error:
            raise LookupError("no passage") from (None if hidden else error)
    except LookupError as error:
        return error


@pytest.mark.parametrize(
    ("error", "service"),
    [
        (ConnectionRefusedError(), True),
        (nobody_there(), True),
        (wrapped(hidden=False), True),
        (wrapped(hidden=True), False),
        (ValueError("no such place"), False),
    ],
)
def test_a_silent_service_is_recognised_in_library_errors(error, service):
    assert is_service_error(error) == service


@pytest.mark.parametrize(
    ("answer", "words"), [(None, "a method without a return"), (Turn(done="no"), "Turn.done: found 'no'")]
)
def test_a_step_without_an_answer_does_not_end_the_episode(answer, words):
    with pytest.raises(Refused, match=words) as error:
        checked(["step", 0, "said"], answer)
    assert error.value.cause == "type"


def test_a_truthy_number_ends_an_episode():
    assert checked(["step", 0, "said"], Turn(done=1))["done"] is True
    assert checked(["open", 0, {}, 0], None) == {"says": ""}


@pytest.mark.parametrize("shape", [str, lambda text: [{"role": "user", "content": text}]])
def test_truncated_text_is_not_read(shape):
    """A text of many megabytes costs only as much as its kept part."""
    answer = checked(("step", 0, ""), Turn(says=shape("a" * LONGEST + "\ud800" * 9)))
    kept = answer["says"] if isinstance(answer["says"], str) else answer["says"][0]["content"]
    assert set(kept) == {"a"}
    assert LONGEST - 50 < len(kept) <= LONGEST
    assert {name: answer.get(name) for name in ("cut", "replaced")} == {"cut": 1.0, "replaced": None}
