"""The chain of empty stages: all stages run, and only their time is measured."""

import pytest

from rlflow.benchmarks.peers.chain import System


@pytest.mark.long
def test_every_stage_runs_on_the_pool_and_is_timed(tmp_path):
    system = System()
    try:
        flags = {"workers": 2, "stages": 3, "calls": 2, "iterations": 2}
        assert system.prepare({"flags": flags}, str(tmp_path), 0) == {"iterations": 2}
        first, last = system.iterate(1), system.iterate(9)
        assert [row["iteration"] for row in (*first["iterations"], *last["iterations"])] == [0, 1]
        assert all(row["wall"] > 0 for row in (*first["iterations"], *last["iterations"]))
        assert (first["ended"], last["ended"]) == (False, True)
        system.flags = {**flags, "stages": 4}
        with pytest.raises(RuntimeError, match="wrong number of stages ran: 3"):
            system.chain()
    finally:
        system.close()
