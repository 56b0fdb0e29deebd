"""Calls of workers: what one that is not sent would have told a worker, the next one tells it; what any
answer brings along is heard."""

from types import SimpleNamespace

from rlflow.cluster.calls import Calls, ShardLedger
from rlflow.cluster.rpc.message import Answer
from rlflow.cluster.rpc.pool import Pool
from rlflow.cluster.rpc.thread_pool import ThreadTransport
from rlflow.cluster.sharding.route import Transfer


class Near(Pool):
    """Ranks that share memory with this process."""

    def __init__(self):
        super().__init__("all", [None], ThreadTransport())

    def near(self, rank):
        return True


class Busy(Near):
    """Ranks without a free connection."""

    def short_call(self, what, frames, seconds):
        return None


def test_keys_to_forget_stay_noted_where_rows_cannot_be_asked_for_by_a_short_call():
    pool = Busy()
    ledger = ShardLedger([pool])
    ledger.mark_unused(pool.at(0), 7)
    rows = [Transfer(pool.at(0), 1, ("x",), None)]
    assert list(Calls({"all": pool}, ledger, 0)._sliced("all", {pool.at(0): rows}, 1.0)) == []
    assert ledger.take_unused(pool.at(0)) == [7]


class Printing(Near):
    """A rank whose rewards have printed a line when it is asked for rows."""

    def short_call(self, what, frames, seconds):
        return SimpleNamespace(
            result=lambda: [Answer(value=("parcel",), printed=b"judging\n") for _ in frames]
        )


def test_what_rewards_printed_is_heard_with_rows_that_another_worker_gets():
    pool = Printing()
    ledger, heard = ShardLedger([pool]), []
    ledger.hear = heard.append
    rows = [Transfer(pool.at(0), 1, ("x",), None)]
    assert list(Calls({"all": pool}, ledger, 0)._sliced("all", {pool.at(0): rows}, 1.0)) == [
        (pool.at(0), ("parcel",))
    ]
    assert heard == [b"judging\n"]
