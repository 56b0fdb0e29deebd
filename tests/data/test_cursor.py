"""The cursor resumes exactly, and held-out questions never train."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow import PlanError
from rlflow.author.figures import Figure, Of
from rlflow.data import Prompts, open_data
from rlflow.data.dataset import Dataset
from rlflow.data.encode import ByteEncoder
from rlflow.data.fields import Record
from rlflow.data.mixed import mixed, prompts_of
from rlflow.errors import Place


def numbered(count: int) -> Dataset:
    return Dataset("numbers", [Record(f"question {n}", str(n)) for n in range(count)], ByteEncoder())


def answers(batch) -> list[int]:
    return [int(answer) for answer in batch["answer"]]


def test_each_epoch_serves_every_record_once_in_a_new_order():
    cursor = prompts_of(numbered(20), seed=3)
    first, second = answers(cursor.take(20)), answers(cursor.take(20))
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert answers(prompts_of(numbered(20), seed=4).take(20)) != first


def test_the_order_is_the_same_on_every_machine():
    assert answers(prompts_of(numbered(8), seed=1).take(10)) == [2, 4, 7, 5, 0, 6, 3, 1, 5, 6]


def test_a_question_of_a_later_epoch_has_another_position():
    batch = prompts_of(numbered(2)).take(5)
    assert batch.axis.keys[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert answers(batch)[0] in answers(batch)[2:4]


@given(st.integers(1, 7), st.lists(st.integers(0, 9), max_size=6), st.lists(st.integers(0, 9), max_size=6))
@settings(max_examples=60, deadline=None)
def test_a_resumed_cursor_continues_as_if_never_stopped(count, before, after):
    data = numbered(count)
    straight, stopped = prompts_of(data, seed=5), prompts_of(data, seed=5)
    for size in before:
        assert answers(straight.take(size)) == answers(stopped.take(size))
    resumed = Prompts(data, seed=5)
    resumed.load(json.loads(json.dumps(stopped.state())))
    for size in after:
        one, other = straight.take(size), resumed.take(size)
        assert answers(one) == answers(other)
        assert one.axis.keys.tolist() == other.axis.keys.tolist()


def test_resuming_on_other_data_or_another_seed_is_refused():
    state = prompts_of(numbered(5), seed=1).state()
    with pytest.raises(PlanError, match="digest"):
        prompts_of(numbered(6), seed=1).load(state)
    with pytest.raises(PlanError, match="seed"):
        prompts_of(numbered(5), seed=2).load(state)


# -- unusable records
# --------------------------------------------------------------------------------------------------------------


def holed(count: int, bad: set[int]) -> Dataset:
    """Return records, some without a question."""
    return Dataset(
        "holed",
        [
            Record("" if n in bad else f"question {n}", str(n), place=Place("d.jsonl", n + 1))
            for n in range(count)
        ],
        ByteEncoder(),
    )


@st.composite
def holes(draw):
    count = draw(st.integers(2, 8))
    return count, draw(st.sets(st.integers(0, count - 1), max_size=count - 1))


@given(
    holes(),
    st.lists(st.integers(0, 9), max_size=6),
    st.lists(st.integers(0, 9), max_size=6),
    st.sampled_from([-1.0, 9.0]),
)
@settings(max_examples=100, deadline=None)
def test_bad_records_are_skipped_alike_before_and_after_a_cut(case, before, after, seconds):
    count, bad = case
    data = holed(count, bad)
    straight, stopped = prompts_of(data, seed=5), prompts_of(data, seed=5)
    straight.check(seconds)
    for size in before:
        assert answers(straight.take(size)) == answers(stopped.take(size))
    resumed = Prompts(holed(count, bad), seed=5)
    resumed.load(json.loads(json.dumps(stopped.state())))
    for size in after:
        since = [json.loads(json.dumps(cursor.state())) for cursor in (straight, resumed)]
        one, other = straight.take(size), resumed.take(size)
        assert len(one) == size
        assert answers(one) == answers(other)
        assert bad.isdisjoint(answers(one))
        assert one.axis.keys.tolist() == other.axis.keys.tolist()
        assert straight.left_out(since[0]) == resumed.left_out(since[1])


@given(holes())
@settings(max_examples=60, deadline=None)
def test_each_epoch_serves_every_good_record_once_in_order(case):
    count, bad = case
    whole, cursor = prompts_of(holed(count, set()), seed=2), prompts_of(holed(count, bad), seed=2)
    order = answers(whole.take(2 * count))
    batch = cursor.take(2 * (count - len(bad)))
    assert list(zip(batch.axis.keys[:, 0].tolist(), answers(batch), strict=True)) == [
        (position, record) for position, record in enumerate(order) if record not in bad
    ]


def test_a_skipped_record_is_reported_once_and_counted_each_time():
    cursor = prompts_of(holed(4, {1, 3}))
    start = cursor.state()
    cursor.take(4)  # both good records, twice
    assert sorted(str(fault) for fault in cursor.untold()) == [
        f"d.jsonl:{line} is skipped: its prompt is empty" for line in (2, 4)
    ]
    skipped = cursor.position - 4
    assert cursor.left_out(start) == {Figure(Of.LEFT_OUT, "empty"): float(skipped)}
    assert skipped in (2, 3, 4)
    assert cursor.left_out(cursor.state()) == {}
    cursor.take(4)
    assert list(cursor.untold()) == []


def test_a_check_stops_at_its_time_limit_and_draws_nothing():
    cursor = prompts_of(holed(2000, {3, 1500}))
    assert cursor.check(-1.0) == 0
    assert cursor.check(60.0) == 2000
    assert {record: fault.place.line for record, fault in cursor.faults.items()} == {3: 4, 1500: 1501}
    assert (cursor.position, list(cursor.untold())) == (0, [])


def test_data_without_a_usable_record_are_an_error():
    with pytest.raises(PlanError, match=r"3 of 3 records of holed cannot be used"):
        prompts_of(holed(3, {0, 1, 2})).take(1)


def test_pairs_are_counted_in_records():
    pairs = Dataset("pairs", [Record(f"q{n}", None, ("good", "bad")) for n in range(3)], ByteEncoder())
    batch = prompts_of(pairs).take(4)
    assert len(batch) == 8
    assert batch["group"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_an_empty_data_set_is_an_error():
    with pytest.raises(PlanError, match="no records"):
        prompts_of(numbered(0))


@given(
    st.lists(st.integers(0, 30), min_size=12, max_size=60),
    st.sampled_from([0.1, 0.3, 1, 4]),
    st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_held_out_questions_never_train_even_if_repeated(numbers, share, seed):
    numbers = [*numbers, *range(100, 106)]
    spaced = [Record(f"question{' ' * (1 + index % 3)}{n}\n", str(n)) for index, n in enumerate(numbers)]
    train, others = Dataset("numbers", spaced, ByteEncoder()).split(share, seed)
    assert {record.answer for record in train.records}.isdisjoint(record.answer for record in others.records)
    assert len(train) + len(others) == len(numbers)
    assert len(others) >= (share if isinstance(share, int) else 1)


def test_a_count_of_distinct_questions_is_met_exactly():
    assert [len(side) for side in numbered(50).split(7)] == [43, 7]
    assert [len(side) for side in numbered(50).split(0)] == [50, 0]
    for bad in (50, 51, 1.0, -1):
        with pytest.raises(PlanError, match="nothing"):
            numbered(50).split(bad)


def test_a_share_splits_questions_alike_for_every_seed():
    small = {"size": 400, "min_terms": 2, "max_terms": 2, "max_digits": 1}
    one, other = (open_data("chain_sum", task=small, seed=seed) for seed in (1, 2))
    assert {r.question for r in one.records} & {r.question for r in other.records}
    train, others = one.split(0.2)[0], other.split(0.2)[1]
    assert len(others) > 10
    assert {r.question for r in train.records}.isdisjoint(r.question for r in others.records)


def test_adding_data_moves_no_question_across_the_split():
    small, large = numbered(60).split(0.25)[1], numbered(120).split(0.25)[1]
    assert {r.question for r in small.records} == {r.question for r in large.records} & {
        f"question {n}" for n in range(60)
    }


# -- prompt_id
# ------------------------------------------------------------------------------------------------------------


def test_a_row_names_its_record_in_the_file_despite_skipped_records(tmp_path):
    file = tmp_path / "d.jsonl"
    lines = [
        json.dumps({"prompt": "long " * (9 if n == 4 else 1) + str(n), "answer": str(n)}) for n in range(30)
    ]
    file.write_text("\n\n".join([*lines[:7], "no record", "3", '{"answer": "no prompt"}', *lines[10:]]))
    data = replace(open_data(file, bad="skip", max_prompt=20), numbered=True)
    training, held_out = data.split(5, seed=1)
    whole = held_out.batch(range(len(held_out)))
    seen = dict(zip(whole["prompt_id"].tolist(), whole["answer"], strict=True))
    cursor = prompts_of(training, seed=2)
    for _ in range(3):  # more than two epochs
        batch = cursor.take(20)
        seen |= dict(zip(batch["prompt_id"].tolist(), batch["answer"], strict=True))
    assert seen == {n: str(n) for n in range(30) if n not in (4, 7, 8, 9)}
    assert "prompt_id" not in open_data(file, bad="skip").batch([0]).columns


def test_pairs_of_several_sources_are_numbered_per_source():
    def part(name, count):
        return Dataset(
            name, [Record(f"{name}{n}", None, ("good", "bad"), number=n) for n in range(count)], ByteEncoder()
        )

    data = replace(mixed({"a": part("a", 3), "b": part("b", 2)}), numbered=True)
    batch = data.batch(range(5))
    assert batch["prompt_id"].tolist() == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1]
    assert str(batch.columns["prompt_id"]) == "row int64"
    assert data.batch([])["prompt_id"].tolist() == []
