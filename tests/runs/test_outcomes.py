"""The funnel of rows comes from the row accounting, with measurements of rows at the steps between."""

import json

import pytest
from keyed import figures, keyed

import rlflow
from rlflow import encode, flow, loss
from rlflow.compiler.spans import Span
from rlflow.compiler.trace.compile import compile_flow
from rlflow.execution.account import Count, End, RowAccount, RowOutcome
from rlflow.execution.iteration_outcome import Outcome
from rlflow.runs.loop import speed
from rlflow.runs.outcomes import funnel_metrics, without_funnel

HEALTH = {"funnel/rows_scored": 30.0, "funnel/rows_mixed": 16.0, "funnel/rows_untruncated": 12.0}


@loss
def likelihood(new):
    """Increase the probability of the sampled tokens."""
    return -new.logprobs


@flow
def samplers(prompts, actor, actor_b):
    """Two trained roles, and a baseline that is only read."""
    one, other = (
        actor.generate(prompts, samples=8, max_tokens=2),
        actor_b.generate(prompts, samples=6, max_tokens=2),
    )
    actor.generate(prompts, max_tokens=2)
    actor.update(one, likelihood)
    given = encode(prompts, "answer", actor)
    actor.update(given, likelihood)
    actor_b.update(other, likelihood)


GRAPH = compile_flow(samplers).graph


def funnel(whole, health=None, roles=()):
    """Return the funnel by name. ``health``: measurements of rows, by name."""
    return keyed(funnel_metrics(whole, GRAPH, figures(health or {}), roles))


def account(*ends, opened=0):
    """Outcomes: (source, outcome, node, cause, rows)."""
    whole = RowAccount()
    for source, fate, node, cause, rows in ends:
        whole.sample(source, Count(0, rows, rows))
        whole.end(source, End(fate, node, cause), Count(0, rows, rows))
    if opened:
        whole.open("actor.generate", Count(0, opened, opened))
    return whole


def test_sampled_and_used_rows_come_from_the_accounting():
    found = funnel(
        account(
            ("actor.generate", RowOutcome.TRAINED, "actor.update", "", 28),
            ("actor.generate", RowOutcome.LEFT_OUT, "actor.update", "scores is not finite", 4),
        ),
        HEALTH,
    )
    assert found == {
        "funnel/rows_sampled": 32,
        "funnel/rows_scored": 30,
        "funnel/rows_mixed": 16,
        "funnel/rows_untruncated": 12,
        "funnel/rows_used": 28,
    }
    assert list(found) == [
        f"funnel/rows_{name}" for name in ("sampled", "scored", "mixed", "untruncated", "used")
    ]
    assert keyed(without_funnel(figures(HEALTH | {"policy/entropy": 0.5}))) == {"policy/entropy": 0.5}


@pytest.mark.parametrize(
    ("fate", "cause"),
    [
        (RowOutcome.LEFT_OUT, "not kept"),
        (RowOutcome.LEFT_OUT, "not chosen"),
        (RowOutcome.SURPLUS, ""),
        (RowOutcome.STALE, ""),
        (RowOutcome.CARRIED, ""),
    ],
)
def test_rows_dropped_by_a_repeat_or_choice_are_a_separate_step(fate, cause):
    found = funnel(
        account(
            ("actor.generate", RowOutcome.TRAINED, "actor.update", "", 24),
            ("actor.generate", fate, "repeat", cause, 40),
            opened=8,
        ),
        HEALTH,
    )
    assert (found["funnel/rows_sampled"], found["funnel/rows_kept"], found["funnel/rows_used"]) == (
        72,
        32,
        24,
    )


def test_a_read_only_baseline_is_not_sampled_for_training():
    found = funnel(
        account(
            ("actor.generate", RowOutcome.TRAINED, "actor.update", "", 8),
            ("actor.generate#2", RowOutcome.READ, "actor.update", "", 4),
        )
    )
    assert found == {"funnel/rows_sampled": 8, "funnel/rows_used": 8}


def test_rows_encoded_from_text_are_not_used_samples():
    whole = account(("actor.generate", RowOutcome.TRAINED, "actor.update", "", 8))
    whole.place("encode", Count(0, 4, 4))
    whole.end("encode", End(RowOutcome.TRAINED, "actor.update#2"), Count(0, 4, 4))
    assert funnel(whole) == {"funnel/rows_sampled": 8, "funnel/rows_used": 8}
    whole.end("encode", End(RowOutcome.TRAINED, "actor.update"), Count(0, 3, 3))  # joined with the samples
    whole.place("encode", Count(0, 3, 3))
    assert funnel(whole) == {"funnel/rows_sampled": 15, "funnel/rows_used": 15}
    alone = RowAccount(placed=whole.placed)
    alone.end("encode", End(RowOutcome.TRAINED, "actor.update#2"), Count(0, 4, 4))
    assert funnel(alone) == {"funnel/rows_used": 4}


def test_training_on_data_has_only_used_rows():
    assert funnel(account(("prompts", RowOutcome.TRAINED, "actor.update", "", 64)), HEALTH) == {
        "funnel/rows_used": 64
    }
    assert funnel(RowAccount()) == {}


def test_each_trained_role_has_its_own_funnel():
    whole = account(
        ("actor.generate", RowOutcome.TRAINED, "actor.update", "", 8),
        ("actor_b.generate", RowOutcome.TRAINED, "actor_b.update", "", 6),
    )
    found = funnel(
        whole, {"actor/funnel/rows_scored": 8.0, "actor_b/funnel/rows_scored": 5.0}, ("actor", "actor_b")
    )
    assert found == {
        "actor/funnel/rows_sampled": 8,
        "actor/funnel/rows_scored": 8,
        "actor/funnel/rows_used": 8,
        "actor_b/funnel/rows_sampled": 6,
        "actor_b/funnel/rows_scored": 5,
        "actor_b/funnel/rows_used": 6,
    }


def test_sampling_speed_is_total_tokens_over_total_time():
    whole = account(
        ("actor.generate", RowOutcome.TRAINED, "actor.update", "", 31),
        ("actor.generate#2", RowOutcome.READ, "actor.update", "", 4),
        ("actor_b.generate", RowOutcome.TRAINED, "actor_b.update", "", 83),
    )
    nodes = ("actor.generate", "actor.generate#2", "actor_b.generate", "actor.update")
    spans = [Span(node, "model", place, place + 0.5) for place, node in enumerate(nodes)]
    assert keyed(speed(Outcome(spans=spans, account=whole), GRAPH)) == {
        "response/tokens_per_second": (31 + 4 + 83) / 1.5
    }
    assert speed(Outcome(spans=spans), GRAPH) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_figures_without_meaning_for_an_algorithm_are_absent(tmp_path, name):
    folder = rlflow.run(
        name, out=str(tmp_path), prompts=8, iterations=1, held_out=0, save_every=0, threads=1
    ).folder
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    funnel = {key.rpartition("funnel/")[2]: value for key, value in line.items() if "funnel/" in key}
    assert set(funnel) == {"rows_used", "tokens", "tokens_with_gradient", "tokens_effective"}
    assert funnel["rows_used"] == 8 * (2 if name == "dpo" else 1)
    assert 0 < funnel["tokens_effective"] <= funnel["tokens_with_gradient"] <= funnel["tokens"]
