"""The funnel of rows is the account's, with what was measured of rows between."""

import json

import pytest

import rlflow
from rlflow.execution.account import Account, Count, End, Fate
from rlflow.runs.funnel import funnel_metrics, without_funnel

HEALTH = {"reward/mean": 0.5, "funnel/rows_scored": 30.0, "funnel/rows_mixed": 16.0, "funnel/rows_untruncated": 12.0}


def account(*ends, opened=0):
    """Ends: (source, fate, node, cause, rows)."""
    whole = Account()
    for source, fate, node, cause, rows in ends:
        whole.sample(source, Count(0, rows, rows))
        whole.end(source, End(fate, node, cause), Count(0, rows, rows))
    if opened:
        whole.open("actor.generate", Count(0, opened, opened))
    return whole


def test_sampled_and_used_are_of_the_account():
    found = funnel_metrics(account(("actor.generate", Fate.TRAINED, "actor.update", "", 28),
                                   ("actor.generate", Fate.LEFT_OUT, "actor.update", "scores is not finite", 4)), HEALTH)
    assert found == {"funnel/rows_sampled": 32, "funnel/rows_scored": 30, "funnel/rows_mixed": 16, "funnel/rows_untruncated": 12,
                     "funnel/rows_used": 28}
    assert list(found) == [f"funnel/rows_{name}" for name in ("sampled", "scored", "mixed", "untruncated", "used")]
    assert without_funnel(HEALTH) == {"reward/mean": 0.5}


@pytest.mark.parametrize(("fate", "cause"), [(Fate.LEFT_OUT, "not kept"), (Fate.LEFT_OUT, "not chosen"), (Fate.SURPLUS, ""),
                                             (Fate.STALE, ""), (Fate.CARRIED, "")])
def test_rows_that_a_repeat_or_a_choice_dropped_are_a_step_of_their_own(fate, cause):
    found = funnel_metrics(account(("actor.generate", Fate.TRAINED, "actor.update", "", 24),
                                   ("actor.generate", fate, "repeat", cause, 40), opened=8), HEALTH)
    assert (found["funnel/rows_sampled"], found["funnel/rows_kept"], found["funnel/rows_used"]) == (72, 32, 24)


def test_a_baseline_that_is_read_only_is_not_sampled_for_learning():
    found = funnel_metrics(account(("actor.generate", Fate.TRAINED, "actor.update", "", 8),
                                   ("actor.generate#2", Fate.READ, "baseline", "", 4)), {})
    assert found == {"funnel/rows_sampled": 8, "funnel/rows_used": 8}


def test_what_learns_from_data_has_used_rows_alone():
    assert funnel_metrics(account(("prompts", Fate.TRAINED, "model.update", "", 64)), HEALTH) == {"funnel/rows_used": 64}
    assert funnel_metrics(Account(), {}) == {}


def test_of_several_trained_roles_each_has_its_own():
    whole = account(("solver.generate", Fate.TRAINED, "solver.update", "", 8), ("judge.generate", Fate.TRAINED, "judge.update", "", 6))
    found = funnel_metrics(whole, {"solver/funnel/rows_scored": 8.0, "judge/funnel/rows_scored": 5.0})
    assert found == {"solver/funnel/rows_sampled": 8, "solver/funnel/rows_scored": 8, "solver/funnel/rows_used": 8,
                     "judge/funnel/rows_sampled": 6, "judge/funnel/rows_scored": 5, "judge/funnel/rows_used": 6}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_what_has_no_meaning_for_an_algorithm_is_absent(tmp_path, name):
    folder = rlflow.run(name, out=str(tmp_path), prompts=8, iterations=1, held_out=0, save_every=0, threads=1).folder
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    funnel = {key.rpartition("funnel/")[2]: value for key, value in line.items() if "funnel/" in key}
    assert set(funnel) == {"rows_used", "tokens", "tokens_with_gradient", "tokens_effective"}
    assert funnel["rows_used"] == 8 * (2 if name == "dpo" else 1)
    assert 0 < funnel["tokens_effective"] <= funnel["tokens_with_gradient"] <= funnel["tokens"]
