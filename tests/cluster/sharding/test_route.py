"""Routing by driver and workers, without Ray: the instructions of a rank, the rows that others send, and the
resulting rows."""

from unittest.mock import patch

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow import Batch
from rlflow.cluster.rpc import row_messages
from rlflow.cluster.sharding.route import Routes
from rlflow.cluster.sharding.shard_map import RemoteColumn, Shard, ShardMap, WorkerId
from rlflow.cluster.sharding.shard_store import ShardStore

FEW = settings(deadline=None, max_examples=60)
RANKS = st.integers(1, 8)


def shuffled(count, seed):
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def random_split(count, ranks, seed):
    """Return a random split: each row on one rank, in any order; ranks may be without rows."""
    chosen = torch.randint(0, ranks, (count,), generator=torch.Generator().manual_seed(seed))
    order = shuffled(count, seed)
    return [order[chosen[order] == rank] for rank in range(ranks)]


def batch_of(count):
    lengths = [number % 4 for number in range(count)]
    return Batch.of(
        tokens=[list(range(number, number + length)) for number, length in enumerate(lengths)],
        scores=[float(number) for number in range(count)],
        completion=[f"row {number}" for number in range(count)],
    )


class Workers:
    """The stores of workers, and a batch whose rows are on them."""

    def __init__(self, whole):
        self.whole, self.keys, self.shelves = whole, 0, {}

    def placed(self, split, parts, axis=None):
        """Return the batch as the driver knows it when ``parts`` are on the ranks of a new pool."""
        pool, shards, used = f"pool-{self.keys}", [], []
        for rank, (rows, part) in enumerate(zip(split, parts, strict=True)):
            if len(rows):
                self.keys += 1
                shards.append(Shard(WorkerId(pool, rank), self.keys, len(rows), lambda *_: None))
                self.shelves.setdefault(shards[-1].at, ShardStore()).put(self.keys, part)
                used.append(rows)
        layout = ShardMap.of(shards, used, len(self.whole), axis)
        columns = {
            name: RemoteColumn(data.kind, layout, data.lengths, name, data.nbytes)
            for name, data in self.whole.data.items()
        }
        return Batch(self.whole.axis, columns)

    def fetched(self, batch, rows, at, keep=None):
        """Return the rows ``rows`` that the worker ``at`` reads, and the number of rows that others sent.
        keep: the iteration for which the worker keeps received rows."""
        asked = Routes(batch).to(rows, at, keep or 0, self.key if keep is not None else None)
        # rows go through shared memory on request, even if they are few
        with patch.object(row_messages, "SMALL", 0):
            sent = [
                self.shelves[each.at].slice(each.key, each.names, each.rows, shared=each.key % 5 == 0)
                for each in asked.transfers
            ]
        found = self.shelves.setdefault(at, ShardStore()).batch(asked.inputs, sent, keep or 0)
        asked.note(at, keep or 0, lambda at, key: self.shelves[at].forget([key]))
        return found, asked

    def key(self):
        self.keys += 1
        return self.keys


def same(one, other):
    return (
        torch.equal(one["tokens"], other["tokens"])
        and torch.equal(one["scores"], other["scores"])
        and one["completion"] == other["completion"]
        and torch.equal(one.axis.keys, other.axis.keys)
    )


@FEW
@given(st.integers(0, 97), st.lists(RANKS, min_size=1, max_size=4), st.integers(0, 999))
def test_rows_routed_through_several_splits_are_unchanged(count, ranks, seed):
    whole = batch_of(count)
    workers = Workers(whole)
    batch = workers.placed([torch.arange(count)], [whole])
    for step, each in enumerate(ranks):
        split = random_split(count, each, seed + step)
        parts = [
            workers.fetched(batch, rows, WorkerId(f"step {step}", rank))[0] for rank, rows in enumerate(split)
        ]
        assert all(same(part, whole.rows(rows)) for part, rows in zip(parts, split, strict=True) if len(rows))
        batch = workers.placed(split, parts)
    wanted = torch.cat([shuffled(count, seed)[: count // 2], shuffled(count, seed + 1)])  # some rows twice
    if len(wanted):
        assert same(workers.fetched(batch, wanted, WorkerId("last", 0))[0], whole.rows(wanted))


def test_an_equal_split_reads_one_complete_shard():
    whole, split = batch_of(5), [torch.tensor([4, 0]), torch.tensor([3, 1, 2])]
    workers = Workers(whole)
    batch = workers.placed(split, [whole.rows(rows) for rows in split])
    at = next(shard.at for shard in batch.data["tokens"].layout.shards if shard.at.rank == 1)
    own, asked = workers.fetched(batch, split[1], at)
    assert same(own, whole.rows(split[1]))
    assert asked.transfers == ()
    assert [(part.rows, source.order) for source in asked.inputs.sources for part in source.parts] == [
        (None, None)
    ]
    other, asked = workers.fetched(batch, torch.tensor([0, 2, 4]), at)
    assert same(other, whole.rows(torch.tensor([0, 2, 4])))
    assert [(each.at.rank, each.rows.tolist()) for each in asked.transfers] == [(0, [1, 0])]
    assert [
        part.rows.tolist() for source in asked.inputs.sources for part in source.parts if part.key is not None
    ] == [[2]]


def test_keys_are_sent_only_if_no_shard_matches_them():
    whole, split = batch_of(5), [torch.tensor([4, 0]), torch.tensor([3, 1, 2])]
    workers = Workers(whole)
    batch = workers.placed(split, [whole.rows(rows) for rows in split], axis=whole.axis)
    at = next(shard.at for shard in batch.data["tokens"].layout.shards if shard.at.rank == 1)
    own, asked = workers.fetched(batch, split[1], at)
    assert asked.inputs.keys is None
    assert same(own, whole.rows(split[1]))
    # part of a shard, the shard of another rank, several shards
    for rows in (torch.tensor([3, 1]), split[0], torch.arange(5)):
        found, asked = workers.fetched(batch, rows, at)
        assert asked.inputs.keys.tolist() == whole.axis.keys[rows].tolist()
        assert same(found, whole.rows(rows))
    renamed = Batch(batch_of(5).axis, batch.data)  # the same places, under keys that the shards do not have
    assert Routes(renamed).to(split[1], at).inputs.keys is not None


READS = st.tuples(
    st.sets(st.sampled_from(["tokens", "scores", "completion"]), min_size=1),
    st.integers(0, 3),
    st.integers(0, 2),
)


@FEW
@given(st.integers(1, 40), RANKS, st.lists(READS, min_size=2, max_size=6), st.integers(0, 999))
def test_a_worker_does_not_receive_rows_twice(count, ranks, calls, seed):
    whole, had = batch_of(count), set()
    workers = Workers(whole)
    split = random_split(count, ranks, seed)
    batch = workers.placed(split, [whole.rows(rows) for rows in split])
    for names, which, rank in calls:
        rows, at = shuffled(count, seed + which)[: max(count // 2, 1)], WorkerId("reader", rank)
        found, asked = workers.fetched(batch.select(*sorted(names)), rows, at, keep=3)
        assert all(
            torch.equal(found[name], whole.rows(rows)[name])
            if name != "completion"
            else found[name] == whole.rows(rows)[name]
            for name in names
        )
        assert {name for each in asked.transfers for name in each.names} <= names
        assert {(rank, which, name) for each in asked.transfers for name in each.names}.isdisjoint(had)
        had |= {(rank, which, name) for name in names}


def test_copies_belong_to_their_iteration_and_shard():
    whole = batch_of(6)
    workers = Workers(whole)
    batch, at, rows = workers.placed([torch.arange(6)], [whole]), WorkerId("reader", 0), torch.tensor([1, 4])
    assert len(workers.fetched(batch, rows, at, keep=3)[1].transfers) == 1
    again, asked = workers.fetched(batch, torch.tensor([4]), at, keep=3)  # part of the stored rows
    assert (asked.transfers, again["scores"].tolist()) == ((), [4.0])
    # some rows are missing
    assert len(workers.fetched(batch, torch.tensor([4, 5]), at, keep=3)[1].transfers) == 1
    # which the workers have dropped by then
    assert len(workers.fetched(batch, rows, at, keep=4)[1].transfers) == 1
    assert len(workers.shelves[at]) == 3
    del batch, asked
    assert len(workers.shelves[at]) == 0
