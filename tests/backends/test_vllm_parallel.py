"""Ranks that share an engine, and vLLM's options for them. The contract of backends checks the engines
themselves.
"""

from types import SimpleNamespace

import pytest

from rlflow.backends.vllm import internals
from rlflow.backends.vllm.parallel import EngineRank
from rlflow.errors import PlanError


@pytest.mark.parametrize(("size", "own"), [(1, [1]), (2, [0, 1]), (4, [0, 1, 2, 3])])
def test_a_process_that_shares_engines_with_other_ranks_is_refused(monkeypatch, size, own):
    found = SimpleNamespace(ranks=own)
    monkeypatch.setattr(internals, "engine_group", lambda: found)
    place = EngineRank(1, 4, size, "run")
    place.check_group()
    found.ranks = [1, 7]
    with pytest.raises(PlanError) as refused:
        place.check_group()
    [problem] = refused.value.problems
    assert (problem.code, problem.found, problem.expected) == (
        "rank-order",
        "one of ranks [1, 7]",
        f"ranks {own}",
    )


def test_vllm_reads_its_rank_from_the_environment():
    alone, among = EngineRank.of_pool(1), EngineRank(1, 2, 2, "run")
    assert (alone.rank, alone.ranks, alone.launcher, alone.variables("cpu")) == (0, 1, "uni", {})
    assert among.launcher == "external_launcher"
    assert among.variables("cpu") == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    assert EngineRank.of_pool(1).run != alone.run  # names memory that no other pool may use


def test_engines_must_fill_the_pool():
    with pytest.raises(PlanError) as refused:
        EngineRank.of_pool(2)
    assert refused.value.problems[0].found == "--tensor_parallel 2"
