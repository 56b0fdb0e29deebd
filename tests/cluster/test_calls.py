"""Calls of workers: what one that is not sent would have told a worker, the next one tells it."""

from here import PoolHere

from rlflow.cluster.calls import Calls, ShardLedger
from rlflow.cluster.sharding.route import Transfer


class Busy(PoolHere):
    """Ranks without a free connection."""

    def short_call(self, what, frames, seconds):
        return None


def test_keys_to_forget_stay_noted_where_rows_cannot_be_asked_for_by_a_short_call():
    pool = Busy("all", [None])
    ledger = ShardLedger([pool])
    ledger.gone(pool.at(0), 7)
    rows = [Transfer(pool.at(0), 1, ("x",), None)]
    assert list(Calls({"all": pool}, ledger, 0)._sliced("all", {pool.at(0): rows}, 1.0)) == []
    assert ledger.forgotten(pool.at(0)) == [7]
