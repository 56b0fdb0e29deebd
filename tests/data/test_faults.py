"""Unusable records are found with line and cause, one by one and together alike."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow import PlanError
from rlflow.author.columns import row
from rlflow.data import open_data
from rlflow.data.dataset import Dataset
from rlflow.data.encode import ByteEncoder, Wording
from rlflow.data.faults import CHARACTERS, Room, refused, spoken
from rlflow.data.fields import Record
from rlflow.errors import Place


def numbered_data(*prompts, room=Room(), encoder=None, responses=()):  # noqa: B008  (immutable)
    """Return a data set whose records are in lines of a file, counted from 1."""
    records = [
        Record(prompt, "1", responses, place=Place("d.jsonl", line)) for line, prompt in enumerate(prompts, 1)
    ]
    return Dataset("d.jsonl", records, encoder or ByteEncoder(), room=room)


def found(data, index=None):
    return {
        str(fault.place): fault.cause
        for fault in data.faulty(range(len(data)) if index is None else index).values()
    }


class Counting(ByteEncoder):
    """An encoder with at most two characters per token; it records the longest text that it got."""

    longest = 2

    def __init__(self):
        self.given = 0

    def prompts(self, worded):
        self.given = max([self.given, *map(len, worded)])
        return super().prompts(worded)

    def responses(self, texts, chat=True):
        self.given = max([self.given, *map(len, texts)])
        return super().responses(texts)


def test_each_cause_is_reported_with_its_line(tokenizer):
    data = numbered_data(
        "2+2=",
        "",
        " \n",
        ({"role": "tool", "content": "x"},),
        "y" * 60,
        encoder=open_encoder(tokenizer),
        room=Room(40),
    )
    data = Dataset(data.name, data.records, data.encoder, Wording(chat=True), room=data.room)
    assert found(data) == {
        "d.jsonl:2": "empty",
        "d.jsonl:3": "empty",
        "d.jsonl:4": "wording",
        "d.jsonl:5": "too_long",
    }
    faults = list(data.faulty(range(5)).values())
    assert [str(fault) for fault in faults] == [
        "d.jsonl:2 is skipped: its prompt is empty",
        "d.jsonl:3 is skipped: its prompt is empty",
        f"d.jsonl:4 is skipped: the chat template of {tokenizer} refuses a prompt: no tools here",
        "d.jsonl:5 is skipped: it is too long (78 tokens)",
    ]
    assert spoken(faults) == (
        "2 without a prompt (d.jsonl:2, :3); 1 refused by the tokenizer or its chat template (d.jsonl:4); "
        "1 too long, the longest of 78 tokens (d.jsonl:5)"
    )


def open_encoder(folder):
    from rlflow.data.encode import TokenizerEncoder

    return TokenizerEncoder(folder)


PROMPTS = st.lists(st.sampled_from(["", " ", "a", "abcd", "abcde", "abcdefghi", "é" * 3]), max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    PROMPTS,
    st.sampled_from([None, 4, 5]),
    st.sampled_from([None, 8, 10]),
    st.sampled_from([(), ("x",), ("x", "wxyz")]),
)
def test_records_have_the_same_faults_alone_and_together(prompts, prompt, whole, responses):
    data = numbered_data(*prompts, room=Room(prompt, whole), responses=responses)
    together = found(data)
    assert together == {place: cause for i in range(len(data)) for place, cause in found(data, [i]).items()}
    for line, text in enumerate(prompts, 1):
        tokens, reply = len(text.encode()), max((len(said) + 1 for said in responses), default=0)
        long = (prompt is not None and tokens > prompt) or (whole is not None and tokens + reply > whole)
        empty = not text.strip() if not responses else not text
        assert (f"d.jsonl:{line}" in together) == (long or empty)


def test_a_text_that_is_certainly_too_long_is_not_encoded():
    encoder = Counting()
    data = numbered_data("short", "x" * 5_000_000, "y" * 21, "z" * 20, room=Room(10), encoder=encoder)
    faults = data.faulty(range(4))
    assert {i: (fault.cause, fault.tokens) for i, fault in faults.items()} == {
        1: ("too_long", 2_500_000),
        2: ("too_long", 11),
        3: ("too_long", 20),
    }
    assert encoder.given == 20  # may be ten tokens, so it must be encoded


def test_a_response_that_is_certainly_too_long_is_not_encoded():
    encoder = Counting()
    long = numbered_data("abcd", room=Room(None, 10), encoder=encoder, responses=("x" * 17,))
    assert {i: (fault.cause, fault.tokens) for i, fault in long.faulty([0]).items()} == {0: ("too_long", 11)}
    assert encoder.given == 0
    assert numbered_data("abcd", room=Room(None, 10), encoder=encoder, responses=("x" * 5,)).faulty([0]) == {}
    assert encoder.given == 5


def test_the_error_of_long_rows_names_no_prompt_limit():
    data = numbered_data("abcd", room=Room(None, 10), responses=("x" * 17,))
    message = str(refused("d.jsonl", list(data.faulty([0]).values()), 1, data.room))
    assert "expected: at most 10 tokens of a prompt and its response" in message
    assert "max_prompt" not in message


def test_a_batch_to_encode_is_limited_by_its_text():
    encoder = Counting()
    sizes = []
    encode = encoder.prompts
    encoder.prompts = lambda worded: sizes.append(sum(map(len, worded))) or encode(worded)
    data = numbered_data(*["x" * (CHARACTERS // 3)] * 7, encoder=encoder)
    assert data.faulty(range(7)) == {}
    assert len(sizes) == 3
    assert max(sizes) <= CHARACTERS


def test_an_exception_of_the_tokenizer_is_a_fault_of_its_record(tokenizer):
    class Fussy:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def __call__(self, texts, **options):
            if any("boom" in text for text in texts):
                raise RuntimeError("cannot encode")
            return self.inner(texts, **options)

    encoder = open_encoder(tokenizer)
    encoder.tokenizer = Fussy(encoder.tokenizer)
    data = numbered_data("fine", "boom", "fine too", encoder=encoder)
    assert found(data) == {"d.jsonl:2": "wording"}
    assert "RuntimeError: cannot encode" in str(data.faulty([1])[1])


def test_the_error_shows_the_first_fault_of_each_kind_and_all_lines():
    data = numbered_data("", "abc", "", "abcdef", *[""] * 9, room=Room(4, None, " (256 positions)"))
    message = str(refused(data.name, list(data.faulty(range(13)).values()), 13, data.room))
    assert message == (
        "d.jsonl:1: its prompt is empty\n  found:    an empty text\n  expected: a question\nd.jsonl:4: it "
        "is too long (6 tokens)\n  found:    a text of 6 characters\n  expected: at most 4 tokens of a "
        "prompt (256 positions)\n12 of 13 records of d.jsonl cannot be used\n  found:    11 without a "
        "prompt (d.jsonl:1, :3, :5, :6, :7, :8, :9, :10, …); 1 too long, the longest of 6 tokens "
        "(d.jsonl:4)\n  expected: at most 4 tokens of a prompt (256 positions)\n  remedy:   correct them; "
        "or --bad-records skip drops and counts them, --data.max_prompt 4 drops longer prompts"
    )


# -- invalid lines
# -----------------------------------------------------------------------------------------------------------------

LINES = [
    '{"prompt": "a", "n": 1}',
    '{"prompt": "x"',
    '{"prompt": "b", "n": 2}',
    "[1]",
    '{"n": 3}',
    '{"prompt": "c", "n": 1e2}',
    '{"prompt": "d", "n": 99999999999999999999}',
    '{"prompt": "e", "n": 5}',
]


def test_bad_lines_are_an_error_or_are_skipped(jsonl):
    path = jsonl(*LINES)
    with pytest.raises(
        PlanError, match=r"5 of 8 records of .*\n  found:    5 unreadable \(.*:2, :4, :5, :6, :7\)"
    ) as caught:
        open_data(path, columns={"n": row("int64")})
    assert caught.value.problems[0].place.line == 2
    assert "--bad-records skip" in str(caught.value)
    data = open_data(path, columns={"n": row("int64")}, bad="skip")
    assert data.batch(range(3))["n"].tolist() == [1, 2, 5]
    assert [fault.place.line for fault in data.faults] == [2, 4, 5, 6, 7]
    assert "n' is int 99999999999999999999" in str(data.faults[-1])


def test_a_bad_first_line_is_skipped_like_others(jsonl):
    path = jsonl({"prompt": None, "answer": "1"}, "{", {"prompt": "a", "answer": "2"})
    data = open_data(path, bad="skip")
    assert (data.batch([0])["answer"], [fault.place.line for fault in data.faults]) == (["2"], [1, 2])
    with pytest.raises(PlanError, match="no field 'prompt'"):
        open_data(path)
    with pytest.raises(PlanError, match="2 of 2 records"):
        open_data(jsonl("{", "[]", name="nothing.jsonl"), bad="skip")


def test_the_limit_for_prompts_does_not_count_responses(jsonl):
    data = open_data(
        jsonl({"prompt": "abc", "completion": "x" * 50}, {"prompt": "abcdef", "completion": "y"}),
        max_prompt=5,
    )
    assert (len(data), data.dropped) == (1, 1)


def test_a_number_too_large_for_its_column_is_a_fault_of_its_line(jsonl):
    path = jsonl(json.dumps({"prompt": "a", "n": 0.5}), '{"prompt": "b", "n": 1' + "0" * 400 + "}")
    with pytest.raises(PlanError, match=r"data.jsonl:2: the field 'n' is int 1000"):
        open_data(path, columns={"n": row("float32")})
