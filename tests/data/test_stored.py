"""Records in a file give the same data set as records in memory."""

import gc
import json

import pytest

from rlflow.author.messages import Packed, packed
from rlflow.config.roles.opened_data import split_records
from rlflow.data import open_data, prompts_of
from rlflow.data import stored as module
from rlflow.data.fields import Record
from rlflow.data.json_fields import Wanted
from rlflow.data.mixed import mixed
from rlflow.data.stored import StoredRecords, picked, stored

CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1]}}}],
}
ROWS = [{"prompt": f"{n} + 1 =", "answer": n + 1, "level": n, "tests": {"in": [n]}} for n in range(30)] + [
    {"prompt": [{"role": "user", "content": f"é {n}"}, CALL], "answer": 2**70, "level": None, "tests": 0.5}
    for n in range(10)
]


@pytest.fixture
def both(jsonl, monkeypatch):
    """Open data with records in memory, and with records in a file."""

    def call(*rows, **options):
        path = jsonl(*map(json.dumps, rows))
        in_memory = open_data(path, **options)
        monkeypatch.setattr(module, "LIMIT", 50)
        in_file = open_data(path, **options)
        assert isinstance(in_memory.records, list)
        assert isinstance(in_file.records, StoredRecords)
        return in_memory, in_file

    return call


def same(first, second):
    assert list(first.records) == list(second.records)
    assert [(str(each.place), each.number) for each in first.records] == [
        (str(each.place), each.number) for each in second.records
    ]
    assert first.digest == second.digest


def test_records_in_a_file_are_equal(both):
    first, second = both(*ROWS, wanted=Wanted({"level": False, "tests": True}))
    same(first, second)
    assert second.records[-1] == first.records[-1]
    assert second.records[3:7] == first.records[3:7]
    gc.collect()
    assert second.records[0].prompt == "0 + 1 =", "a closed file still has its records"


def test_splits_orders_and_limits_are_the_same(both):
    first, second = both(*ROWS, max_prompt=40)
    same(first, second)
    for one, other in zip(split_records(first, 8), split_records(second, 8), strict=True):
        same(one, other)
    assert isinstance(split_records(second, 8)[0].records, StoredRecords)
    batches = [prompts_of(split_records(data, 8)[0], 3).take(16) for data in (first, second)]
    assert batches[0]["prompt"] == batches[1]["prompt"]


def test_pairs_and_sources_are_the_same(both):
    rows = [{"prompt": f"q{n}", "chosen": f"a{n}", "rejected": "b"} for n in range(12)]
    first, second = both(*rows)
    same(mixed({"x": first, "y": first}), mixed({"x": second, "y": second}))


def test_packed_messages_stay_packed(monkeypatch):
    monkeypatch.setattr(module, "LIMIT", 0)
    more = {"talk": packed([{"role": "user", "content": "a"}]), "text": "a", "number": 2.5}
    (record,) = stored([Record("q", more=more)])
    assert record.more == more
    assert [type(value) for value in record.more.values()] == [Packed, str, float]


def test_a_selection_keeps_the_file_and_its_order(both):
    _, second = both(*ROWS)
    chosen = picked(picked(second.records, [5, 3, 20]), [2, 0])
    assert [record.number for record in chosen] == [20, 5]
    assert isinstance(chosen, StoredRecords)
    assert picked([], ()) == []
    assert list(stored(iter(second.records))) == list(second.records)
