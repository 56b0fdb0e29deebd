"""Several sources as one data set: exact shares, a cursor for each source, and exact resumption."""

import json
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow import PlanError
from rlflow.author.columns import SOURCE, row, text
from rlflow.data.dataset import Dataset
from rlflow.data.encode import ByteEncoder
from rlflow.data.fields import Record
from rlflow.data.mixed import fifths, mixed, prompts_of


def part(name: str, count: int, bad: set[int] = frozenset(), **more) -> Dataset:
    """Return ``count`` records, some without a question."""
    records = [Record("" if n in bad else f"{name} {n}", f"{name}{n}", (), more) for n in range(count)]
    return Dataset(name, records, ByteEncoder(), declared=dict.fromkeys(more, text))


def draws(batch) -> list[tuple]:
    return list(zip(batch.axis.keys[:, 0].tolist(), batch[SOURCE], batch["prompt"], strict=True))


@st.composite
def sources(draw):
    """Draw sources with some unusable records, and their weights or None."""
    parts = {}
    for name in "abc"[: draw(st.integers(2, 3))]:
        count = draw(st.integers(1, 6))
        parts[name] = part(name, count, draw(st.sets(st.integers(0, count - 1), max_size=count - 1)))
    weights = draw(
        st.none() | st.fixed_dictionaries(dict.fromkeys(parts, st.fractions("1/10", 10, max_denominator=10)))
    )
    return parts, weights


@given(
    sources(), st.lists(st.integers(0, 9), max_size=5), st.lists(st.integers(0, 9), max_size=5), st.booleans()
)
@settings(max_examples=80, deadline=None)
def test_a_resumed_cursor_continues_as_if_never_stopped(case, before, after, checked):
    data = mixed(*case)
    straight, stopped, resumed = (prompts_of(data, seed=5) for _ in range(3))
    if checked:
        straight.check(9.0)
    for size in before:
        assert draws(straight.take(size)) == draws(stopped.take(size))
    resumed.load(json.loads(json.dumps(stopped.state())))
    for size in after:
        since = [json.loads(json.dumps(cursor.state())) for cursor in (straight, resumed)]
        assert draws(straight.take(size)) == draws(resumed.take(size))
        assert straight.left_out(since[0]) == resumed.left_out(since[1])
        assert straight.epoch == resumed.epoch


@given(sources(), st.lists(st.integers(1, 9), min_size=1, max_size=8))
@settings(max_examples=80, deadline=None)
def test_weights_share_usable_rows_and_each_source_has_epochs(case, sizes):
    parts, weights = case
    cursor = prompts_of(mixed(parts, weights), seed=1)
    rows = [row for size in sizes for row in draws(cursor.take(size))]
    shares = weights or {name: Fraction(len(own)) for name, own in parts.items()}
    counts = Counter(source for _, source, _ in rows)
    assert [position for position, _, _ in rows] == list(range(sum(sizes)))
    assert all(abs(shares[name] / sum(shares.values()) * len(rows) - counts[name]) < 1 for name in parts)
    for name, own in parts.items():
        good = {record.prompt for record in own.records} - {""}
        asked = [prompt for _, source, prompt in rows if source == name]
        for start in range(0, len(asked), len(good)):
            epoch = asked[start : start + len(good)]
            assert len(set(epoch)) == len(epoch)
            assert set(epoch) <= good


def test_the_order_of_a_source_ignores_the_other_sources():
    alone = [
        prompt
        for _, source, prompt in draws(prompts_of(mixed({"a": part("a", 9), "b": part("b", 9)}), 3).take(40))
        if source == "a"
    ]
    other = [
        prompt
        for _, source, prompt in draws(prompts_of(mixed({"c": part("c", 2), "a": part("a", 9)}), 3).take(40))
        if source == "a"
    ]
    assert alone[:9] == other[:9]
    twin = [
        prompt
        for _, source, prompt in draws(prompts_of(mixed({"a": part("a", 9), "b": part("b", 9)}), 3).take(40))
        if source == "b"
    ]
    assert [prompt[2:] for prompt in alone[:9]] != [prompt[2:] for prompt in twin[:9]]


def test_new_weights_restart_the_shares_and_keep_the_cursors():
    parts = {"a": part("a", 40), "b": part("b", 40)}
    old, new = (prompts_of(mixed(parts, {"a": Fraction(share), "b": Fraction(1)})) for share in (3, 1))
    first = old.take(20)
    new.load(old.state())
    rest = new.take(20)
    assert Counter(rest[SOURCE]) == {"a": 10, "b": 10}
    assert not set(first["prompt"]) & set(rest["prompt"])
    assert rest.axis.keys[0, 0] == 20


def test_other_records_or_another_seed_are_refused():
    data = mixed({"a": part("a", 3), "b": part("b", 3)})
    state = prompts_of(data, 1).state()
    with pytest.raises(PlanError, match="seed"):
        prompts_of(data, 2).load(state)
    with pytest.raises(PlanError, match="digest"):
        prompts_of(mixed({"a": part("a", 3), "c": part("b", 3)}), 1).load(state)


def test_a_source_without_a_usable_record_is_an_error():
    data = mixed({"a": part("a", 3), "b": part("b", 2, {0, 1})})
    with pytest.raises(PlanError, match="2 of 2 records of b cannot be used"):
        prompts_of(data).take(9)


def test_missing_texts_are_empty_and_missing_numbers_are_refused():
    one, other = part("a", 2, level="hard"), part("b", 2)
    data = mixed({"a": one, "b": other})
    assert data.columns["level"] == text
    assert data.batch(range(4))["level"] == ["hard", "hard", "", ""]
    assert "level" not in data.sources["b"].columns
    numbers = Dataset(
        "n", [Record("q", "1", (), {"weight": 1.0})], ByteEncoder(), declared={"weight": row("float32")}
    )
    with pytest.raises(PlanError, match="the source 'b' has no 'weight'"):
        mixed({"n": numbers, "b": other})


def test_sources_of_different_shapes_are_refused():
    pairs = Dataset("pairs", [Record("q", None, ("good", "bad"))], ByteEncoder())
    with pytest.raises(PlanError, match="different shapes") as error:
        mixed({"a": part("a", 1), "p": pairs})
    assert error.value.problems[0].found == "a: prompts, p: pairs"
    with pytest.raises(PlanError, match="the source 'e' has no records"):
        mixed({"a": part("a", 1), "e": part("e", 0)})


def test_answers_of_one_source_become_a_column_of_all():
    none = Dataset("none", [Record("open question")], ByteEncoder())
    batch = mixed({"none": none, "a": part("a", 1)}).batch([0, 1])
    assert batch["answer"] == ["", "a0"]


def test_each_source_holds_out_its_share_without_overlap():
    shared = [Record(f"both {n}", "1") for n in range(20)]
    parts = {name: Dataset(name, [*part(name, 80).records, *shared], ByteEncoder()) for name in "ab"}
    data = mixed(parts, {"a": Fraction(3), "b": Fraction(1)})
    counts = fifths(data, 16)
    assert counts == {"a": 12, "b": 4}
    training, held_out = data.split(counts)
    assert not {record.question for record in training.records} & {
        record.question for record in held_out.records
    }
    assert len(training) + len(held_out) == len(data)
    found = Counter(record.more[SOURCE] for record in held_out.records)
    assert found["a"] >= 12
    assert found["b"] >= 4
    assert fifths(data, 1000) == {"a": 20, "b": 20}


def test_holding_out_a_complete_source_is_an_error_with_its_name():
    same = [Record("both", "1")]
    data = mixed(
        {
            "a": Dataset("a", [*part("a", 40).records, *same], ByteEncoder()),
            "b": Dataset("b", same, ByteEncoder()),
        }
    )
    with pytest.raises(PlanError, match="the source 'b' has no records left"):
        prompts_of(data.split({"a": 40, "b": 0})[0])
