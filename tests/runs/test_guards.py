"""The numbers of an iteration that end a run or cause a warning."""

import pytest

from rlflow.author.figures import Cause, Figure, Of
from rlflow.config.options import Options
from rlflow.errors import RemoteFailure, StageError
from rlflow.execution.summary import IterationSummary
from rlflow.runs.guards import Guard, loss_warnings

NONE, NAN = Cause("none", "f"), Cause("nan", "f")


def missing(count, cause, node="reward"):
    return {Figure(Of.MISSING, cause.name, node, node, cause.reward): float(count)}


def rate(share):
    return {Figure(Of.SCORES, "missing_rate"): share}


def test_each_cause_of_missing_rewards_is_reported_once():
    asked = []
    guard = Guard(
        Options(max_missing=0.5), lambda: asked.append(1) or {NONE: "f.py:1: None", NAN: "x" * 1000}
    )
    some = missing(2, NONE) | missing(1, NONE, "reward#2") | rate(0.25)
    (said,) = guard.missing_warnings(some)
    assert said.startswith("3 rewards are missing, and their rows are skipped: f/none: f.py:1: None")
    assert list(guard.missing_warnings(some)) == []
    assert list(guard.missing_warnings(missing(0, NAN) | rate(0.0))) == []
    assert list(guard.missing_warnings(missing(6, NAN) | rate(0.75))) == []
    assert asked == [1]
    (said,) = guard.missing_warnings(some | missing(1, NAN))
    assert "x" * 300 in said
    assert len(said) < 500


@pytest.mark.parametrize(
    "figure",
    [
        Figure(Of.STAGE, "missing_calls", "tools"),
        Figure(Of.LOGGED, "missing_calls"),
        Figure(Of.LOGGED, "missing_calls", "reward", "reward", "f"),
        Figure(Of.STATE, "missing_none"),
    ],
)
def test_other_metrics_do_not_count_as_missing_rewards(figure):
    assert list(Guard(Options(), dict).missing_warnings({figure: 3.0} | rate(0.0))) == []


def test_updates_without_a_step_end_the_run():
    guard, stuck = Guard(Options(max_bad=2), dict), {Figure(Of.UPDATE, "steps", "actor.update", "actor"): 0.0}
    others = {
        Figure(Of.STAGE, "steps", "tools"): 0.0,
        Figure(Of.LOGGED, "steps"): 0.0,
        Figure(Of.STATE, "steps"): 0.0,
    }
    for iteration in range(5):
        guard.check(iteration, others, IterationSummary())
    guard.check(5, stuck, IterationSummary())
    with pytest.raises(StageError, match="no finite optimizer step for 2 iterations"):
        guard.check(6, stuck, IterationSummary())


def test_updates_without_rows_do_not_end_the_run():
    def figures(**values):
        return {Figure(Of.UPDATE, name, "actor.update", "actor"): value for name, value in values.items()}

    guard = Guard(Options(max_bad=1), dict)
    guard.check(0, figures(steps=0.0, rows=0.0, left_out=0.0), IterationSummary())
    with pytest.raises(StageError, match="no finite optimizer step for 1 iterations"):
        guard.check(1, figures(steps=0.0, rows=0.0, left_out=3.0), IterationSummary())


def test_only_scores_count_missing_rewards():
    guard = Guard(Options(max_missing=0.5), lambda: {Cause("raised", "f"): "no"})
    guard.check(
        0,
        {Figure(Of.STAGE, "reward/missing_rate", "tools"): 1.0, Figure(Of.LOGGED, "missing_rate"): 1.0},
        IterationSummary(),
    )
    with pytest.raises(StageError, match=r"75% of the rewards are missing.*f/raised: no.*rewards.txt"):
        guard.check(1, rate(0.75), IterationSummary())


def test_the_error_of_missing_rewards_keeps_the_traceback_of_the_reward():
    record = RemoteFailure(
        "KeyError", "'x'", notes=("in a worker:\nTraceback",), place="/r.py:2", hint="--flag"
    )
    guard = Guard(Options(max_missing=0.5), lambda: {Cause("raised", "f"): record})
    with pytest.raises(StageError, match=r"f/raised: /r\.py:2: KeyError: 'x' \(--flag\)") as caught:
        guard.check(0, rate(0.75), IterationSummary())
    assert caught.value.__notes__ == ["in a worker:\nTraceback"]


@pytest.mark.parametrize(
    ("summary", "says"),
    [
        (IterationSummary(broken=["3.0"]), "position.sample: 3.0"),
        (IterationSummary(largest=("scores", 9.0)), "none; the gradient is not"),
        (
            IterationSummary(largest=("scores", 1e38)),
            "gradient is too large for float32, because 'scores' has numbers of 1e",
        ),
    ],
)
def test_a_run_without_a_finite_step_names_the_non_finite_value(summary, says):
    with pytest.raises(StageError, match=says):
        Guard(Options(max_bad=1), dict).check(
            2, {Figure(Of.UPDATE, "steps", "critic.update", "critic"): 0.0}, summary
        )


def test_a_non_finite_loss_with_a_finite_gradient_is_reported():
    def figure(name):
        return Figure(Of.UPDATE, name, "actor.update", "actor")

    assert list(loss_warnings({figure("loss"): 1.0, figure("grad_norm"): float("inf")})) == []
    (warning,) = loss_warnings({figure("loss"): float("inf")})
    assert "actor.update: the loss is inf, so its metric is null. Its gradient is finite" in warning


def test_adapters_lost_to_rounding_are_reported_once():
    guard = Guard(Options(), dict)
    figures = {
        Figure(Of.UPDATE, "merge_rounding", f"{role}.update", role): share
        for role, share in (("actor", 0.84), ("critic", 0.5))
    }
    (warning,) = guard.merge_warnings(figures)
    assert (
        "actor.update: rows are sampled with adapters merged into weights of fewer bits. The rounding is 84%"
        in warning
    )
    assert list(guard.merge_warnings(figures)) == []
