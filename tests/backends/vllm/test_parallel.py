"""Which ranks share an engine, and what vLLM is told of it. The engines themselves are judged by the contract of backends."""

from types import SimpleNamespace

import pytest

from rlflow.backends.vllm import parallel
from rlflow.backends.vllm.parallel import EngineRank
from rlflow.errors import PlanError

ORDERS = [  # (size, outer, the ranks of each engine of a pool of four)
    (1, False, [[0], [1], [2], [3]]), (2, False, [[0, 1], [2, 3]]), (2, True, [[0, 2], [1, 3]]), (4, False, [[0, 1, 2, 3]]),
    (4, True, [[0, 1, 2, 3]]),
]  # fmt: skip


@pytest.mark.parametrize(("size", "outer", "engines"), ORDERS)
def test_vllm_makes_its_groups_of_the_ranks_that_share_an_engine_and_only_meanwhile(monkeypatch, size, outer, engines):
    seen = []
    state = SimpleNamespace(init_model_parallel_group=lambda groups, *args, **known: seen.append((groups, args, known)))
    original = state.init_model_parallel_group
    monkeypatch.setattr(parallel, "_state", lambda: state)
    place = EngineRank(1, 4, size, outer, "run")
    assert place.engines == engines
    adjacent = [list(range(first, first + size)) for first in range(0, 4, size)]
    with place.grouping():
        state.init_model_parallel_group(adjacent, "gloo", name="tp")
    assert seen == [(engines, ("gloo",), {"name": "tp"})]
    assert state.init_model_parallel_group is original


@pytest.mark.parametrize(("size", "outer", "engines"), ORDERS)
def test_a_process_whose_engines_share_with_other_ranks_is_refused(monkeypatch, size, outer, engines):
    own = next(ranks for ranks in engines if 1 in ranks)
    found = SimpleNamespace(ranks=own)
    monkeypatch.setattr(parallel, "_state", lambda: SimpleNamespace(get_tp_group=lambda: found))
    place = EngineRank(1, 4, size, outer, "run")
    place.check_group()
    found.ranks = [1, 7]
    with pytest.raises(PlanError) as refused:
        place.check_group()
    [problem] = refused.value.problems
    assert (problem.code, problem.found, problem.expected) == ("rank-order", "one of ranks [1, 7]", f"ranks {own}")


def test_vllm_starts_no_processes_and_takes_its_place_from_the_environment_where_there_are_several_ranks():
    alone, among = EngineRank.taken(1), EngineRank(1, 2, 2, False, "run")
    assert (alone.rank, alone.ranks, alone.launcher, alone.variables("cpu")) == (0, 1, "uni", {})
    assert among.launcher == "external_launcher"
    assert among.variables("cpu") == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    assert EngineRank.taken(1).run != alone.run  # names memory that no other pool may have


def test_engines_have_to_fill_the_pool():
    with pytest.raises(PlanError) as refused:
        EngineRank.taken(2)
    assert refused.value.problems[0].found == "--tensor_parallel 2"
