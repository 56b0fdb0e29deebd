"""What a process of environments makes of answers that are none, and of a tool that raises."""

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
def test_a_service_that_does_not_answer_is_known_through_the_errors_of_libraries(error, service):
    assert is_service_error(error) == service


@pytest.mark.parametrize(
    ("answer", "words"), [(None, "a method without a return"), (Turn(done="no"), "Turn.done: found 'no'")]
)
def test_a_step_that_answers_nothing_is_no_end_of_an_episode(answer, words):
    with pytest.raises(Refused, match=words) as error:
        checked(["step", 0, "said"], answer)
    assert error.value.cause == "type"


def test_a_number_that_is_a_truth_ends_an_episode():
    assert checked(["step", 0, "said"], Turn(done=1))["done"] is True
    assert checked(["open", 0, {}, 0], None) == {"says": ""}


@pytest.mark.parametrize("shape", [str, lambda text: [{"role": "user", "content": text}]])
def test_what_is_cut_off_is_not_read(shape):
    """A text of many megabytes costs no more than what is kept of it."""
    answer = checked(("step", 0, ""), Turn(says=shape("a" * LONGEST + "\ud800" * 9)))
    kept = answer["says"] if isinstance(answer["says"], str) else answer["says"][0]["content"]
    assert set(kept) == {"a"}
    assert LONGEST - 50 < len(kept) <= LONGEST
    assert {name: answer.get(name) for name in ("cut", "replaced")} == {"cut": 1.0, "replaced": None}
