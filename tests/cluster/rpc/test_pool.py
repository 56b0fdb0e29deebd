"""Calls of a pool, whose ranks are objects of this process here: who is asked what, in which order answers come, and who is named."""

from types import SimpleNamespace

import pytest
import torch
from here import PoolHere, Reference
from hypothesis import given
from hypothesis import strategies as st

from rlflow.axis import Axis
from rlflow.batch import Batch, Data
from rlflow.cluster.rpc.parcels import Post, opened, packed
from rlflow.cluster.rpc.pool import Pool
from rlflow.columns import row
from rlflow.errors import PlanError, RemoteError


class Rank:
    """An object of a rank, and in the place of the actor around it."""

    def __init__(self, number=0, lost=()):
        self.number, self.lost, self.asked = number, lost, []
        self.do_batch = self

    def remote(self, method, payload, shared):
        assert shared
        return Reference.to(lambda: packed(getattr(self, method)(opened(payload))))

    def named(self, item):
        self.asked.append(item)
        return f"{item} on {self.number}"

    def refused(self):
        raise PlanError.of("no-room", "no room")

    def failing(self, bad):
        if self.number == bad:
            raise LookupError("not here")
        return self.number

    def doubled(self, batch):
        self.asked.append(len(batch))
        kept = batch.rows(range(len(batch) - 1)) if self.number in self.lost else batch
        return Batch(kept.axis, {"x": Data(row("float32"), 2 * kept["x"])})


def pool_of(ranks, **options):
    return PoolHere("all", [Rank(number, **options) for number in range(ranks)])


def numbered(count, samples=1):
    axis = Axis.fresh(count).repeat(samples) if samples > 1 else Axis.fresh(count)
    return Batch(axis, {"x": Data(row("float32"), torch.arange(float(len(axis))))})


def test_a_call_goes_to_every_rank_and_answers_come_in_their_order():
    pool = pool_of(3)
    assert pool.call("named", "it").result() == pool.call(Rank.named, "it").result() == ["it on 0", "it on 1", "it on 2"]
    assert repr(pool) == "Pool(all, 3 ranks)"


def test_of_errors_the_rank_is_named_but_for_those_that_say_themselves_where():
    pool = pool_of(3)
    with pytest.raises(RemoteError, match=r"LookupError: not here \(rank 1 of pool 'all'\)"):
        pool.call("failing", 1).result()
    with pytest.raises(PlanError, match="no room"):
        pool.call("refused").result()


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_a_pool_is_made_when_all_of_its_objects_are(bad):
    pool = pool_of(2)
    pool.making = [Reference(error=None if rank != bad else MemoryError("too large")) for rank in range(2)]
    if bad is None:
        assert pool.made(5.0).result() == [None, None]
    else:
        with pytest.raises(RemoteError, match=rf"MemoryError: too large \(rank {bad} of pool 'all'\)"):
            pool.made(5.0).result()


@given(st.integers(1, 4), st.integers(0, 11))
def test_items_go_round_the_ranks_two_at_a_time_and_results_keep_their_order(ranks, count):
    pool, taken = pool_of(ranks), 0
    under_way = []

    def items():
        for item in range(count):
            under_way.append(item - taken)
            yield item

    for result in pool.map("named", items()):
        assert result == f"{taken} on {taken % ranks}"
        taken += 1
    assert taken == count
    assert max(under_way, default=0) == min(max(count - 1, 0), 2 * ranks - 1)
    assert [rank.asked for rank in pool.actors] == [list(range(first, count, ranks)) for first in range(ranks)]


@given(st.integers(1, 4), st.integers(0, 9), st.integers(1, 3), st.booleans())
def test_every_row_of_a_batch_is_on_one_rank_and_comes_back_in_its_place(ranks, count, samples, by_group):
    pool, batch = pool_of(ranks), numbered(count, samples)
    found = pool.call_batch("doubled", batch, by_group=by_group and samples > 1).result()
    assert found["x"].tolist() == [2.0 * number for number in range(len(batch))]
    assert torch.equal(found.axis.keys, batch.axis.keys)
    asked = [rank.asked for rank in pool.actors]
    assert sum(map(sum, asked)) == len(batch)
    assert [numbers for numbers in asked if numbers] == ([[0]] if not len(batch) else [numbers for numbers in asked if sum(numbers)])
    if by_group and samples > 1:
        assert all(number % samples == 0 for numbers in asked for number in numbers)


def test_a_result_that_is_asked_for_again_is_the_same_rows_whatever_the_rank_has_sent_since():
    post = Post()

    def doubled(rank, parcel, shared):
        [rows] = post.opened([parcel])
        return Reference(post.parcel(Batch(rows.axis, {"x": Data(row("float32"), 2 * rows["x"])}), shared=shared))

    pool, batch = pool_of(1), numbered(9000)
    future = pool.spread("doubled", batch, doubled)
    once = future.result()
    other = pool.spread("doubled", Batch(batch.axis, {"x": Data(row("float32"), -batch["x"])}), doubled)  # lies where the first lay
    assert other.result()["x"][-1] == -2.0 * 8999
    assert future.result()["x"][-1] == once["x"][-1] == 2.0 * 8999


def test_a_rank_that_gives_another_number_of_rows_is_named_with_both():
    with pytest.raises(ValueError, match=r"rank 1"):
        pool_of(3, lost=(1,)).call_batch(Rank.doubled, numbered(9)).result()


def test_a_pool_whose_workers_were_started_anew_stays_the_same_object_with_nothing_of_theirs():
    old, new = pool_of(2), pool_of(2)
    old.era, old.watcher, closed = 3, SimpleNamespace(verdict=None), []
    old.sockets.close = lambda: closed.append(True)
    assert old.call("named", "it").result() == ["it on 0", "it on 1"]
    new.making = ["a reference"]
    Pool.take_over(old, new)
    assert (old.actors, old.making, old.era, old.watcher, old.sockets) == (new.actors, new.making, 0, None, new.sockets)
    assert closed == [True]
    assert old.call("named", "again").result() == ["again on 0", "again on 1"]
    assert [rank.asked for rank in new.actors] == [["again"], ["again"]]
