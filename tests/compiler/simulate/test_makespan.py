"""Shipped algorithms in virtual time. If a schedule exceeds the bound by 5 %, it exceeds the shortest
schedule by at most 5 %.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import ROOT

from rlflow.compiler.graph.model import Op
from rlflow.compiler.passes.rank import rank
from rlflow.compiler.simulate import simulate

pytestmark = pytest.mark.slow  # runs models or processes: each test is short, but all together are not

ALGORITHMS = sorted(path.stem for path in (ROOT / "algorithms").glob("[a-z]*.py"))
PLACEMENTS = ("one pool", "rollout beside train", "actor beside others")
TIMES = {  # seconds by kind of node
    "sampling is slow": {
        Op.GENERATE: 60,
        Op.REPEAT: 90,
        Op.LOGPROBS: 8,
        Op.VALUES: 8,
        Op.UPDATE: 30,
        Op.REWARD: 5,
        Op.STAGE: 0.1,
    },
    "training is slow": {
        Op.GENERATE: 20,
        Op.REPEAT: 30,
        Op.LOGPROBS: 15,
        Op.VALUES: 12,
        Op.UPDATE: 80,
        Op.REWARD: 2,
        Op.STAGE: 0.1,
    },
    "rewards are slow": {
        Op.GENERATE: 10,
        Op.REPEAT: 60,
        Op.LOGPROBS: 4,
        Op.VALUES: 4,
        Op.UPDATE: 12,
        Op.REWARD: 45,
        Op.STAGE: 0.5,
    },
    "all take the same": dict.fromkeys(
        (Op.GENERATE, Op.REPEAT, Op.LOGPROBS, Op.VALUES, Op.UPDATE, Op.REWARD, Op.STAGE), 1
    ),
}


def near_the_bound(plan, seconds, room, optimum, worst=1.0):
    """Check the makespan. ``worst``: the allowed excess over the optimum if the bound is not reached."""
    simulation = simulate(rank(plan, seconds, room), seconds, room)
    assert simulation.makespan >= simulation.bound - 1e-9
    return (
        simulation.makespan <= 1.05 * simulation.bound
        or simulation.makespan <= worst * optimum(plan, seconds, room) + 1e-9
    )


def test_algorithms_are_found():
    assert {"ppo", "dapo", "remax", "dpo"} <= set(ALGORITHMS)
    assert len(ALGORITHMS) >= 15


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_usual_node_times_give_near_optimal_schedules(placed, room, optimum, placement):
    for algorithm in ALGORITHMS:
        plan = placed(algorithm, placement)
        for name, times in TIMES.items():
            seconds = {i: float(times.get(plan.graph.nodes[i].op, 0.0)) for i in plan.live}
            assert near_the_bound(plan, seconds, room, optimum, worst=1.05), (algorithm, name)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_any_node_times_give_near_optimal_schedules(placed, room, optimum, algorithm):
    for placement in PLACEMENTS:
        any_times(placed(algorithm, placement), room, optimum, placement)


def any_times(plan, room, optimum, placement):
    """Draw any duration for each node."""

    # no rule is always best, so a schedule may exceed the optimum by a half
    @settings(deadline=None, max_examples=10, derandomize=True)
    @given(
        st.fixed_dictionaries(
            {i: st.integers(1, 99) | st.sampled_from([0.1, 0.5, 10.5]) for i in plan.live if i}
        )
    )
    def near(times):
        assert near_the_bound(plan, {0: 0.0} | times, room, optimum, worst=1.5), placement

    near()
