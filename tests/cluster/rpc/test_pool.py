"""Calls of a pool: which ranks get which items, the order of answers, and the rank named in errors."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from members import pool_of

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data
from rlflow.author.columns import row
from rlflow.cluster.rpc import thread_pool
from rlflow.cluster.rpc.pool import Pool
from rlflow.cluster.rpc.row_messages import RowMailbox
from rlflow.errors import PlanError, RemoteError


class Rank:
    """An object of a rank."""

    def __init__(self, number=0, lost=()):
        self.number, self.lost, self.asked = number, lost, []

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


def ranks_of(count, **options):
    return pool_of(*(Rank(number, **options) for number in range(count)))


def calls_of(pool):
    return [member.host.instance.asked for member in pool.actors]


def numbered(count, samples=1):
    axis = Axis.fresh(count).repeat(samples) if samples > 1 else Axis.fresh(count)
    return Batch(axis, {"x": Data(row("float32"), torch.arange(float(len(axis))))})


def test_a_call_reaches_every_rank_and_answers_are_in_rank_order():
    with ranks_of(3) as pool:
        assert (
            pool.call("named", "it").result()
            == pool.call(Rank.named, "it").result()
            == ["it on 0", "it on 1", "it on 2"]
        )
        assert repr(pool) == "Pool(all, 3 ranks)"


def test_errors_name_their_rank():
    with ranks_of(3) as pool:
        with pytest.raises(RemoteError, match=r"LookupError: not here \(rank 1 of pool 'all'\)"):
            pool.call("failing", 1).result()
        with pytest.raises(PlanError, match="no room"):
            pool.call("refused").result()


class Large:
    def __init__(self, too):
        if too:
            raise MemoryError("too large")


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_a_pool_is_ready_when_all_its_objects_are(bad):
    with ranks_of(2) as pool:
        thread_pool.make(pool, Large, [(rank == bad,) for rank in range(2)])
        if bad is None:
            assert pool.made(60.0).result() == [None, None]
        else:
            with pytest.raises(RemoteError, match=rf"MemoryError: too large \(rank {bad} of pool 'all'\)"):
                pool.made(60.0).result()


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(0, 11))
def test_items_are_spread_over_ranks_and_results_keep_their_order(ranks, count):
    taken, under_way = 0, []

    def items():
        for item in range(count):
            under_way.append(item - taken)
            yield item

    with ranks_of(ranks) as pool:
        for result in pool.map("named", items()):
            assert result == f"{taken} on {taken % ranks}"
            taken += 1
        assert taken == count
        assert max(under_way, default=0) == min(max(count - 1, 0), 2 * ranks - 1)
        assert list(map(sorted, calls_of(pool))) == [
            list(range(first, count, ranks)) for first in range(ranks)
        ]


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(0, 9), st.integers(1, 3), st.booleans())
def test_every_row_is_on_one_rank_and_comes_back_in_its_place(ranks, count, samples, by_group):
    batch = numbered(count, samples)
    with ranks_of(ranks) as pool:
        found = pool.call_batch("doubled", batch, by_group=by_group and samples > 1).result()
        asked = calls_of(pool)
    assert found["x"].tolist() == [2.0 * number for number in range(len(batch))]
    assert torch.equal(found.axis.keys, batch.axis.keys)
    assert sum(map(sum, asked)) == len(batch)
    assert [numbers for numbers in asked if numbers] == (
        [[0]] if not len(batch) else [numbers for numbers in asked if sum(numbers)]
    )
    if by_group and samples > 1:
        assert all(number % samples == 0 for numbers in asked for number in numbers)


def test_a_result_read_again_has_the_same_rows():
    mailbox = RowMailbox()

    with ranks_of(1) as pool:

        def doubled(rank, row_message, shared):
            [rows] = mailbox.opened([row_message])
            answer = Batch(rows.axis, {"x": Data(row("float32"), 2 * rows["x"])})
            # in shared memory, which the next answer also uses
            return pool.transport.keep(mailbox.message(answer, shared=True))

        batch = numbered(9000)
        future = pool.spread("doubled", batch, doubled)
        once = future.result()
        other = pool.spread("doubled", Batch(batch.axis, {"x": Data(row("float32"), -batch["x"])}), doubled)
        assert other.result()["x"][-1] == -2.0 * 8999
        assert future.result()["x"][-1] == once["x"][-1] == 2.0 * 8999


def test_a_rank_with_a_wrong_row_count_is_named_with_both_counts():
    with ranks_of(3, lost=(1,)) as pool, pytest.raises(ValueError, match=r"rank 1"):
        pool.call_batch(Rank.doubled, numbered(9)).result()


def test_a_restarted_pool_is_the_same_object():
    with ranks_of(2) as old, ranks_of(2) as new:
        old.generation, old.watcher, closed = 3, SimpleNamespace(verdict=None), []
        for member in old.actors:
            member.host.enter(3)
        old.sockets.close = lambda: closed.append(True)
        assert old.call("named", "it").result() == ["it on 0", "it on 1"]
        new.making, before = ["a reference"], old.actors
        Pool.take_over(old, new)
        assert (old.actors, old.making, old.generation, old.watcher, old.sockets) == (
            new.actors,
            new.making,
            0,
            None,
            new.sockets,
        )
        assert closed == [True]
        assert old.call("named", "again").result() == ["again on 0", "again on 1"]
        assert calls_of(new) == [["again"], ["again"]]
        old.actors = before  # these are closed under their own name
