"""Tables of numbers that a flow keeps across iterations."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow.author.memory import REDUCERS, Reducer, table
from rlflow.compiler.graph.model import MemorySlot
from rlflow.errors import PlanError
from rlflow.execution.local_engine import LocalEngine
from rlflow.execution.memory.saved import empty, restored, saved
from rlflow.execution.memory.tables import KeptTable

ENGINE = LocalEngine({}, {}, 0, lambda count: None)
SPEC = table(key="key", total=0.0, best=-1.0, mean=0.5, latest=0.0)
RULES = {
    "total": REDUCERS["add"],
    "best": REDUCERS["max"],
    "mean": Reducer("ema", 0.75),
    "latest": REDUCERS["last"],
}
NUMBERS = st.floats(-4, 4, width=32) | st.just(math.nan)
# a row: its place in the data, its sample number, its key, and the number that it writes
ROWS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(-2, 3), NUMBERS), max_size=12)


class Oracle:
    """The same table as a dict of Python numbers."""

    def __init__(self):
        self.numbers = {}

    def write(self, rows):
        by_key = {}
        for _, _, key, number in sorted(rows, key=lambda row: row[:2]):
            if not math.isnan(number):
                by_key.setdefault(key, []).append(number)
        for key, found in by_key.items():
            total, best, mean, _ = self.numbers.get(key, (0.0, -1.0, 0.5, 0.0))
            new = (total + sum(found), max(best, *found), 0.75 * mean + 0.25 * np.mean(found), found[-1])
            self.numbers[key] = tuple(float(np.float32(number)) for number in new)

    def read(self, keys):
        return [number for key in keys for number in self.numbers.get(key, (0.0, -1.0, 0.5, 0.0))]


def after(kept, iteration, rows):
    places, samples, keys, numbers = (
        (list(column) for column in zip(*rows, strict=True)) if rows else [[]] * 4
    )
    paths = torch.stack(
        [torch.tensor(places, dtype=torch.int64), torch.tensor(samples, dtype=torch.int64)], 1
    )
    columns = dict.fromkeys(RULES, torch.tensor(numbers, dtype=torch.float32))
    return kept.written(iteration, torch.tensor(keys, dtype=torch.int64), columns, RULES, paths)


def numbers(kept, keys):
    columns = kept.read(torch.tensor(keys))
    return torch.stack([columns[name] for name, _ in SPEC.columns], 1).flatten().tolist()


KEYS = list(range(-3, 5))


@given(iterations=st.lists(ROWS, max_size=6), lag=st.integers(0, 2), order=st.randoms())
def test_a_table_holds_what_was_written_in_any_order_of_rows(iterations, lag, order):
    """It equals a dict, whatever the order in which ranks return rows, at each iteration within the lag, and
    after a save at any time.
    """
    kept, oracle, earlier = KeptTable(SPEC, lag), Oracle(), []
    for number, rows in enumerate(iterations):
        earlier.append(oracle.read(KEYS))
        oracle.write(rows)
        distinct = len({row[:2] for row in rows}) == len(rows)  # otherwise, their order on the axis counts
        kept = after(kept, number, order.sample(rows, len(rows)) if distinct else rows)
        assert len(kept) == len(oracle.numbers)
        state, files = saved({"seen": kept}, ENGINE)
        kept = restored({"seen": kept}, state, files, ENGINE)["seen"]
        assert numbers(kept, KEYS) == pytest.approx(oracle.read(KEYS), rel=1e-6)
        for back in range(lag + 1):
            if number >= back:
                assert numbers(kept.before(number - back), KEYS) == pytest.approx(
                    earlier[number - back], rel=1e-6
                )


def test_old_parts_are_merged_and_young_ones_stay():
    kept = KeptTable(SPEC, lag=1)
    for number in range(20):
        kept = after(kept, number, [(0, 0, 7, 1.0), (1, 0, number % 2, 2.0)])
    assert numbers(kept, [7])[0] == 20.0
    assert len(kept.parts) < 6
    assert [part.first for part in kept.parts[-2:]] == [18, 19]


def test_a_table_of_many_keys_has_few_parts_and_its_large_ones_stay():
    """So a checkpoint has few files, and most of its bytes are those of the one before it."""
    kept, sizes, stayed = KeptTable(SPEC, lag=1), [], []
    for number in range(200):
        before = kept.parts
        kept = after(kept, number, [(0, 0, 4 * number + i, 1.0) for i in range(4)])
        sizes.append(len(kept.parts))
        stayed.append(sum(len(part.keys) for part in kept.parts if part in before) / len(kept))
    assert len(kept) == 800
    assert max(sizes) <= 8 + 2  # the logarithm of 200, and the two young ones
    assert sum(stayed) / 200 > 0.8


def test_rows_of_one_key_must_agree_on_the_number_to_set():
    one = KeptTable(table(key="key", level=0.0))
    keys, paths = torch.tensor([3, 3]), torch.tensor([[0, 0], [0, 1]])
    rules = {"level": REDUCERS["set"]}
    same = one.written(0, keys, {"level": torch.tensor([2.0, 2.0])}, rules, paths)
    assert same.read(torch.tensor([3]))["level"].tolist() == [2.0]
    with pytest.raises(
        ValueError, match=r"'level' is set to 5 and to 6 for key 3|set to 6 and to 5 for key 3"
    ):
        one.written(0, keys, {"level": torch.tensor([5.0, 6.0])}, rules, paths)


def test_a_number_that_float32_cannot_hold_is_refused():
    one = KeptTable(table(key="key", total=3e38))
    keys, paths = torch.tensor([3]), torch.tensor([[0, 0]])
    for number in (3e38, float("inf")):
        with pytest.raises(ValueError, match="'total' of key 3 would become inf"):
            one.written(0, keys, {"total": torch.tensor([number])}, {"total": REDUCERS["add"]}, paths)


def test_only_new_parts_get_new_files():
    kept = after(KeptTable(SPEC), 0, [(0, 0, 1, 1.0), (1, 0, 2, 1.0), (2, 0, 3, 1.0)])
    _, first = saved({"seen": kept}, ENGINE)
    _, second = saved({"seen": after(kept, 1, [(0, 0, 1, 2.0)])}, ENGINE)
    assert {name: second[name] for name in first} == first
    assert len(second) == len(first) + 1


def test_a_table_that_a_fork_adds_starts_empty():
    kept = empty([MemorySlot("seen", SPEC)], 1)
    added = restored(kept, {}, {}, ENGINE)["seen"]
    assert (len(added), added.lag) == (0, 1)


def test_another_table_than_the_saved_one_is_refused():
    kept = empty([MemorySlot("seen", SPEC)], 0)
    state, files = saved(kept, ENGINE)
    other = empty([MemorySlot("seen", table(key="key", other=0.0))], 0)
    with pytest.raises(PlanError, match="the table 'seen' in the checkpoint has other columns"):
        restored(other, state, files, ENGINE)
