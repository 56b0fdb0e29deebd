import json
import math
from pathlib import Path

import pytest
from keyed import keyed

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch
from rlflow.author.figures import Figure, Of
from rlflow.author.load import load
from rlflow.execution import row_figures as measured
from rlflow.execution.row_figures import NO_REWARDS, ScoredRecords


def health(found, judged=NO_REWARDS):
    """Return the measured values by name."""
    return keyed(measured.health(found, judged))


def records(**columns):
    """Return one batch with groups of two, like the record of an iteration."""
    batch = Batch.of(columns)
    axis = Axis.fresh(len(batch) // 2).repeat(2)
    return {name: Batch(axis, {name: data}) for name, data in batch.data.items()}


MASK = [[True, True], [True], [True, False], [True]]


def tokens(*values):
    return [list(row) for row in values]


def test_equal_weights_have_no_divergence_and_no_mismatch():
    same = tokens([-1.0, -2.0], [-0.5], [-1.0, -9.0], [-3.0])
    found = health(records(mask=MASK, logprobs=same, sampled_logprobs=same, ref_logprobs=same))
    assert (found["policy/kl_reference"], found["policy/kl_sampler"], found["policy/mismatch_max"]) == (
        0.0,
        0.0,
        0.0,
    )
    # the masked-out token does not count
    assert found["policy/entropy"] == pytest.approx((1 + 2 + 0.5 + 1 + 3) / 5)


def test_a_mismatch_is_the_largest_of_a_masked_token():
    found = health(
        records(
            mask=MASK,
            logprobs=tokens([-1.0, -2.0], [-0.5], [-1.0, 0.0], [-3.0]),
            sampled_logprobs=tokens([-1.0, -2.5], [-0.5], [-1.0, 99.0], [-3.0]),
        )
    )
    assert found["policy/mismatch_max"] == pytest.approx(0.5)
    assert found["policy/mismatch_mean"] == pytest.approx(0.5 / 5)
    assert found["policy/mismatch_factor"] == pytest.approx((math.exp(0.5) + 4) / 5)
    assert found["policy/kl_sampler"] == pytest.approx((math.exp(-0.5) - 1 + 0.5) / 5)


def test_tokens_that_no_model_sampled_have_no_mismatch_and_no_entropy():
    given = tokens([-1.0, -2.0], [-0.5], [-1.0, -9.0], [-3.0])
    filled = tokens([-1.0, -2.0], [0.0], [-1.0, -9.0], [0.0])  # the second and last row were encoded
    versions = [[4, 4], [-1], [4, -1], [-1]]
    found = health(
        records(mask=MASK, logprobs=given, sampled_logprobs=filled, policy_version=versions, scores=[1.0] * 4)
    )
    assert found["policy/mismatch_max"] == 0.0
    assert found["policy/entropy"] == pytest.approx((1 + 2 + 1) / 3)
    found = health(records(mask=MASK, logprobs=given, policy_version=[[-1] * len(row) for row in MASK]))
    assert not any(name.startswith("policy/") for name in found)


def test_a_critic_equal_to_the_returns_explains_all_variance():
    returns = tokens([1.0, 2.0], [3.0], [4.0, 0.0], [5.0])
    assert health(records(mask=MASK, values=returns, returns=returns))["critic/explained_variance"] == 1.0
    flat = tokens([1.0, 1.0], [1.0], [1.0, 0.0], [1.0])
    assert health(records(mask=MASK, values=flat, returns=returns))[
        "critic/explained_variance"
    ] == pytest.approx(0.0)


def test_groups_with_equal_scores_and_missing_scores_are_counted():
    found = health(records(scores=[1.0, 1.0, 0.0, 1.0, math.nan, 0.5, math.nan, math.nan]))
    assert found["reward/missing_rate"] == pytest.approx(3 / 8)
    # a group with at most one score has no comparison
    assert found["reward/flat_groups"] == pytest.approx(3 / 4)
    assert (found["reward/lowest"], found["reward/highest"]) == (0.0, 1.0)


def test_groups_with_close_scores_are_even():
    found = health(records(scores=[1.0, 0.98, 0.0, 0.05, 0.0, 1.0, 0.5, 0.52]))
    assert found["reward/flat_groups"] == 0
    assert (found["reward/even_groups"], found["reward/even_lowest"], found["reward/even_highest"]) == (
        3 / 4,
        1 / 4,
        1 / 4,
    )
    assert found["reward/uneven_mean"] == 0.5
    alike = health(records(scores=[0.5] * 8))
    assert (alike["reward/even_groups"], "reward/uneven_mean" in alike) == (1.0, False)


def test_the_funnel_counts_scores_then_mixed_groups_then_ended_rows():
    found = health(
        records(
            scores=[1.0, 1.0, 0.0, 1.0, math.nan, 0.5, 1.0, 0.0],
            finish=["length", "stop", "stop", "length", "stop", "stop", "stop", "stop"],
        )
    )
    assert [found[f"funnel/rows_{name}"] for name in ("scored", "mixed", "untruncated")] == [7, 4, 3]


TWO = ScoredRecords({"task": "scores of task", "style": "scores of style"})


@pytest.mark.parametrize(
    "names", [("scores of task", "scores of style"), ("scores of style", "scores of task")]
)
def test_each_of_several_rewards_has_its_figures(names):
    task, style = [1.0, 1.0, 0.0, 1.0, math.nan, 0.5, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 3.0]
    columns = dict(zip(names, (task, style) if names[0].endswith("task") else (style, task), strict=True))
    found = health(records(scores=[*columns.values()][-1], **columns), TWO)
    # the first group, and the one with a single score
    assert (found["reward/flat_groups"], found["reward/even_groups"]) == (2 / 4, 2 / 4)
    assert (found["reward/missing_rate"], found["task/missing_rate"], found["style/missing_rate"]) == (
        1 / 8,
        1 / 8,
        0.0,
    )
    assert (found["task/lowest"], found["task/highest"], found["style/lowest"], found["style/highest"]) == (
        0.0,
        1.0,
        2.0,
        3.0,
    )
    assert "reward/lowest" not in found
    assert (found["funnel/rows_scored"], found["funnel/rows_mixed"]) == (7, 4)


@pytest.mark.parametrize(
    ("advantages", "flat"),
    [
        ([[0.0, 0.0], [0.0], [1.0, 9.0], [1.0]], 1.0),
        ([[0.0, 0.0], [0.0], [1.0, 9.0], [2.0]], 0.5),
        ([[0.0, 0.5], [0.0], [1.0, 1.0], [1.0]], 0.5),
        ([[3.0, 3.0], [3.0 + 1e-9], [1.0, 1.0], [1.0]], 1.0),
    ],
)
def test_a_group_is_flat_if_the_columns_of_its_update_are_equal(advantages, flat):
    read = ScoredRecords(learned=("learned 0",))
    found = health(records(scores=[0.0, 1.0, 0.0, 0.0], mask=MASK, **{"learned 0": advantages}), read)
    assert found["reward/flat_groups"] == flat  # whatever the scores are
    assert found["funnel/rows_mixed"] == 4 * (1 - flat)


def test_lengths_and_truncation_are_measured():
    found = health(records(tokens=[[1, 2], [3], [4, 5], [6]], finish=["stop", "length", "stop", "stop"]))
    assert (found["response/length"], found["response/truncated"]) == (1.5, 0.25)


def test_empty_records_have_no_metrics_and_no_division_by_zero():
    assert health({}) == {}
    empty = {
        name: Batch(Axis.fresh(0).repeat(2), {name: data})
        for name, data in Batch.of(scores=[], finish=[]).data.items()
    }
    assert health(empty) == {}


def test_each_of_several_trained_roles_has_its_own_figures(world):
    lineage = load(Path(__file__).parent / "lineage.py")
    outcome = world(lineage.critique).compiled(6)
    health, records = keyed(outcome.summary.health), outcome.policies
    assert {name.partition("/")[0] for name in health} == {"solver", "verifier"} == records.keys()
    for role, longest in (("solver", 5), ("verifier", 4)):
        lengths = records[role]["tokens"].data["tokens"].lengths
        assert health[f"{role}/response/length"] == pytest.approx(float(lengths.double().mean()))
        assert 1 <= health[f"{role}/response/length"] <= longest
        assert {
            f"{role}/policy/entropy",
            f"{role}/policy/mismatch_max",
            f"{role}/reward/missing_rate",
        } <= health.keys()
    assert len(records["verifier"]["tokens"]) == 2 * len(records["solver"]["tokens"])


def test_logs_of_an_environment_keep_their_own_names():
    turns = json.dumps(
        {
            "turns": [
                {"log": {"turns": 9.0, "reward/missing_rate": 1.0, "failed": 4.0}},
                {"log": {"turns": 7.0}},
            ]
        }
    )
    found = measured.health(records(episode=[turns, turns], turns=[2, 2], failed=["", ""]))
    assert found == {
        Figure(Of.ROWS, "env/turns"): 2.0,
        Figure(Of.ROWS, "env/failed"): 0.0,
        Figure(Of.LOGGED, "turns"): 8.0,
        Figure(Of.LOGGED, "reward/missing_rate"): 1.0,
        Figure(Of.LOGGED, "failed"): 4.0,
    }
