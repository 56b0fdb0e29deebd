"""Calls of workers: the next call carries what an unsent call would have carried, and every answer delivers
attached output."""

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


def test_keys_to_drop_stay_noted_if_no_short_call_is_possible():
    pool = Busy()
    ledger = ShardLedger([pool])
    ledger.mark_unused(pool.at(0), 7)
    rows = [Transfer(pool.at(0), 1, ("x",), None)]
    assert list(Calls({"all": pool}, ledger, 0)._sliced("all", {pool.at(0): rows}, 1.0)) == []
    assert ledger.take_unused(pool.at(0)) == [7]


class Printing(Near):
    """A rank whose rewards have printed a line when rows are requested."""

    def short_call(self, what, frames, seconds):
        return SimpleNamespace(
            result=lambda: [Answer(value=("parcel",), printed=b"judging\n") for _ in frames]
        )


def test_reward_output_arrives_with_rows_for_another_worker():
    pool = Printing()
    ledger, heard = ShardLedger([pool]), []
    ledger.on_output = heard.append
    rows = [Transfer(pool.at(0), 1, ("x",), None)]
    assert list(Calls({"all": pool}, ledger, 0)._sliced("all", {pool.at(0): rows}, 1.0)) == [
        (pool.at(0), ("parcel",))
    ]
    assert heard == [b"judging\n"]
