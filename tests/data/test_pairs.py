"""Pairs with two responses of the same ids are found. Data with only such pairs are refused."""

import pytest

from rlflow.data import open_data
from rlflow.data.pairs import check_pairs, equal_pairs, told
from rlflow.errors import PlanError

SAYS = [
    {"role": "assistant", "content": "look"},
    {"role": "user", "content": "seen"},
    {"role": "assistant", "content": "so"},
]
PAIRS = [
    ("a", "a"),
    ("a", "b"),
    (SAYS, SAYS),
    (SAYS, [*SAYS[:2], {"role": "assistant", "content": "no"}]),
    ("", ""),
]


@pytest.fixture
def pairs(jsonl):
    return open_data(
        jsonl(*({"prompt": "p", "chosen": chosen, "rejected": rejected} for chosen, rejected in PAIRS))
    )


@pytest.mark.parametrize("seconds", [60, -1])
def test_pairs_with_equal_responses_are_found_with_their_lines(pairs, seconds):
    equal = equal_pairs(pairs, seconds)
    assert [record.number for record in equal] == [0, 2, 4]
    assert told(pairs, equal).startswith(
        "3 of 5 pairs have the same ids in both responses and teach nothing ("
    )
    assert told(pairs, equal).endswith("data.jsonl:1, :3, :5)")
    check_pairs(pairs, equal)


def test_texts_with_equal_ids_are_compared_within_the_time_limit(jsonl, pairs):
    class Alike(type(pairs.encoder)):
        def responses(self, texts, chat=True):
            return super().responses([text.lower() for text in texts], chat)

    data = open_data(jsonl({"prompt": "p", "chosen": "A", "rejected": "a"}), telling=lambda encoder: Alike())
    assert (len(equal_pairs(data)), len(equal_pairs(data, -1))) == (1, 0)


def test_an_unencodable_response_is_never_equal(pairs):
    class Broken(type(pairs.encoder)):
        def responses(self, texts, chat=True):
            if "b" in texts:
                raise PlanError.of("tokenizer", "no")
            return super().responses(texts, chat)

    object.__setattr__(pairs, "encoder", Broken())
    assert [record.number for record in equal_pairs(pairs)] == [0, 2, 4]


def test_data_with_only_equal_pairs_are_refused_with_their_fields(jsonl):
    path = jsonl(
        {"prompt": "p", "better": "a", "rejected": "a"}, {"prompt": "q", "better": "b", "rejected": "b"}
    )
    data = open_data(path, fields={"chosen": "better"})
    with pytest.raises(
        PlanError,
        match=r"jsonl:1: all 2 pairs of (.*) have the same ids in both responses\n(.*)'better' and "
        r"'rejected'",
    ):
        check_pairs(data, equal_pairs(data))
    check_pairs(data, equal_pairs(data)[:1])


def test_other_data_have_no_pairs(jsonl):
    data = open_data(jsonl({"prompt": "p", "completion": "a"}))
    assert (equal_pairs(data), told(data, [])) == ([], "")
    check_pairs(data, [])
