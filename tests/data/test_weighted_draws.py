"""Draws by weight are in proportion to the weights, without replacement, and resume exactly."""

import itertools
import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow import PlanError
from rlflow.author.figures import Figure, Of
from rlflow.data import Prompts
from rlflow.data.dataset import Dataset
from rlflow.data.encode import ByteEncoder
from rlflow.data.fields import Record
from rlflow.data.prompts import by_weight
from rlflow.errors import Place, SkipIteration

WEIGHTS = st.lists(
    st.sampled_from([0.0, math.nan, 5e-324, 1e-3, 1.0, 1e300]) | st.floats(0, 9), min_size=1, max_size=9
)


def records(count: int, bad: set[int] = frozenset()) -> Dataset:
    """Return records, of which ``bad`` have no question. Their numbers in the file are odd."""
    return Dataset(
        "numbers",
        [
            Record(
                "" if n in bad else f"question {n}", str(n), place=Place("d.jsonl", n + 1), number=2 * n + 1
            )
            for n in range(count)
        ],
        ByteEncoder(),
    )


def cursor(count: int, bad: set[int] = frozenset(), seed: int = 3) -> Prompts:
    return Prompts(replace(records(count, bad), numbered=True), seed)


def drawn(prompts: Prompts, count: int, iteration: int, weights) -> list[tuple[int, int]]:
    """Return the position and the record of each row."""
    batch = prompts.draw(count, iteration, lambda numbers: np.array(weights, dtype=np.float64), "t.w")
    assert batch["prompt_id"].tolist() == [2 * int(answer) + 1 for answer in batch["answer"]]
    return list(zip(batch.axis.keys[:, 0].tolist(), map(int, batch["answer"]), strict=True))


@given(WEIGHTS, st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 9))
def test_exactly_the_records_with_a_weight_are_drawn_once(weights, seed, position, count):
    order = by_weight(np.array(weights), seed, position).tolist()
    assert sorted(order) == [i for i, weight in enumerate(weights) if weight > 0]
    first = by_weight(np.array(weights), seed, position, count).tolist()
    assert first == order[: len(first)]
    assert len(first) >= min(count, len(order))


def test_equal_weights_give_every_order_alike():
    counts = Counter(tuple(by_weight(np.ones(3), 0, position)) for position in range(6000))
    assert set(counts) == set(itertools.permutations(range(3)))
    # 5 standard deviations of a count with probability 1/6
    assert all(abs(count - 1000) < 5 * math.sqrt(6000 * 5 / 36) for count in counts.values())


def test_the_draw_is_the_same_on_every_machine():
    assert by_weight(np.ones(8), 1, 0).tolist() == [0, 6, 4, 2, 1, 7, 5, 3]


def test_records_are_drawn_as_often_as_successive_draws_say():
    """The chance of each pair, in order, is w1 / sum · w2 / (sum - w1)."""
    weights, draws = np.array([1.0, 2.0, 5.0, 0.5]), 20_000
    counts = Counter(tuple(by_weight(weights, seed, 7)[:2].tolist()) for seed in range(draws))
    for first, second in itertools.permutations(range(4), 2):
        chance = weights[first] / weights.sum() * weights[second] / (weights.sum() - weights[first])
        deviation = math.sqrt(chance * (1 - chance) * draws)
        assert abs(counts[first, second] - chance * draws) < 5 * deviation


@given(
    st.integers(1, 7),
    st.sets(st.integers(0, 6)),
    st.lists(st.lists(st.integers(1, 4), max_size=3), max_size=4),
    st.data(),
)
def test_a_resumed_cursor_draws_as_if_never_stopped(count, bad, iterations, data):
    """An iteration takes prompts in several draws. A cursor that is loaded before it draws the same ones."""
    straight = cursor(count, bad)
    for iteration, sizes in enumerate(iterations):
        weights = data.draw(st.lists(st.sampled_from([0.0, 1.0, 3.0]), min_size=count, max_size=count))
        usable = {i for i in range(count) if weights[i] and i not in bad}
        resumed, start = cursor(count, bad), json.loads(json.dumps(straight.state()))
        resumed.load(start)
        if not usable and sizes:
            with pytest.raises((SkipIteration, PlanError)):
                drawn(straight, sizes[0], iteration, weights)
            assert straight.state() == start
            continue
        rows = []
        for size in sizes:
            own = drawn(straight, size, iteration, weights)
            assert own == drawn(resumed, size, iteration, weights)
            assert len(own) == min(size, len(usable) - len(rows))
            rows += own
        assert straight.left_out(start) == resumed.left_out(start)
        skipped = sum(straight.left_out(start).values())
        assert straight.position - (start["epoch"] * count + start["cursor"]) == len(rows) + skipped
        assert [position for position, _ in rows] == sorted({position for position, _ in rows})
        assert len({record for _, record in rows} & usable) == len(rows)


def test_records_that_cannot_be_used_leave_their_positions_empty():
    prompts = cursor(4, {1, 3})
    start = prompts.state()
    assert len(drawn(prompts, 4, 0, [1, 1, 1, 1])) == 2
    assert prompts.left_out(start) == {Figure(Of.LEFT_OUT, "empty"): 2.0}
    assert prompts.epoch == 1
    assert len(list(prompts.untold())) == 2


def test_records_of_a_draw_that_failed_are_not_counted():
    prompts = cursor(2, {0})
    start = prompts.state()
    with pytest.raises(SkipIteration):
        drawn(prompts, 1, 0, [1, 0])
    assert drawn(prompts, 1, 1, [0, 1]) == [(0, 1)]
    assert prompts.left_out(start) == {}


def test_a_short_draw_is_reported_once():
    prompts = cursor(5)
    assert len(drawn(prompts, 4, 0, [0, 1, math.nan, 1, 0])) == 2
    assert "takes 4 prompts, but only 2" in prompts.short()
    assert drawn(prompts, 3, 1, [1, 0, 0, 0, 0]) == [(2, 0)]
    assert prompts.short() == ""


def test_an_iteration_without_any_weight_is_skipped():
    prompts = cursor(3, {2})
    with pytest.raises(SkipIteration, match=r"no record has a weight above 0 .--prompts-by t\.w"):
        drawn(prompts, 2, 0, [0, math.nan, 0])
    with pytest.raises(SkipIteration, match="no record that can be used has a weight above 0"):
        drawn(prompts, 2, 1, [0, 0, 1])
    assert prompts.position == 0
    with pytest.raises(PlanError, match="2 of 2 records of numbers cannot be used"):
        drawn(cursor(2, {0, 1}), 1, 0, [1, 1])


def test_only_the_first_draw_of_an_iteration_asks_for_weights():
    asked, prompts = [], cursor(3)

    def weigh(numbers):
        asked.append(numbers.tolist())
        return np.ones(3)

    for count, iteration in ((0, 0), (1, 0), (2, 0), (2, 0), (1, 1)):
        prompts.draw(count, iteration, weigh, "t.w")
    assert asked == [[1, 3, 5]] * 2
