"""Replay: which rows three iterations draw, train on and store, computed by hand."""

import dataclasses
import math

import pytest
import torch

import rlflow
from rlflow.author.load import load_flow


@pytest.fixture
def replay():
    """Two prompts an iteration, which are the groups 0 and 1, then 2 and 3, and so on."""
    flow, columns, sampled = load_flow("replay_grpo"), {}, {}
    hp = dataclasses.replace(
        flow.parameters.hp, samples=2, replayed=8, kept=2, age=2, max_tokens=4, minibatch=100
    )
    with rlflow.roles(flow, hp, backend="null", held_out=0, prompts=2) as roles:
        engine = roles.prepared.engine
        run_stage = engine.stage

        def stage(of, batch, *rest):
            result = run_stage(of, batch, *rest)
            columns[of.name] = batch | result[0]
            return result

        def iteration(scores):
            """Run an iteration with these scores. Return the groups and advantages of the rows that it trains on.

            Drawn rows must have the log-probs that they were sampled with, and the weights must correct for
            these.
            """
            scored = lambda batch: (torch.tensor(scores[: len(batch)]), {})  # noqa: E731
            engine.scorers = dict.fromkeys(engine.scorers, scored)
            flow(roles.take(), **roles)
            rows = columns["compare"]
            corrected = columns["truncated_weights"]
            ratio = (corrected["logprobs"] - corrected["sampled_logprobs"]).exp().clamp(max=2.0)
            assert torch.allclose(corrected["weights"], torch.where(corrected["mask"], ratio, 0.0))
            log_probs = corrected.data["sampled_logprobs"].lists()
            for path, own in zip(rows.axis.keys[:, :2].tolist(), log_probs, strict=True):
                assert sampled.setdefault(tuple(path), own) == own
            return rows.axis.keys[:, 0].tolist(), rows["advantages"][:, 0].tolist()

        engine.stage = stage
        yield iteration, lambda: engine.buffer("past")


def stored(kept):
    """Return the group, spread and number of draws of each stored row."""
    keys = torch.cat([put.rows.axis.keys[:, 0] for put in kept.puts])
    starts = [0]
    for put in kept.puts:
        starts.append(starts[-1] + len(put.rows))
    entries = kept.entries
    rows = [int(keys[starts[put] + place]) for put, place in zip(entries.put, entries.place, strict=True)]
    spreads = [round(value, 4) for value in entries.numbers[:, 0].tolist()]
    return list(zip(rows, spreads, entries.drawn.tolist(), strict=True))


def near(signs):
    """Return the advantages of two responses, which are ±√(1/2), except that deviations are 1e-4 larger."""
    return pytest.approx([sign * math.sqrt(0.5) for sign in signs], abs=5e-4)


def test_three_iterations_by_hand(replay):
    iteration, kept = replay
    # nothing to draw; the scores of group 1 are equal, so its advantages are 0
    groups, gains = iteration([1.0, 0.0, 1.0, 1.0])
    assert groups == [0, 0, 1, 1]
    assert gains == near([1, -1, 0, 0])
    assert stored(kept()) == [(0, 0.7071, 0)] * 2 + [(1, 0.0, 0)] * 2

    # group 1 has a weight of 0, so it is not drawn
    groups, gains = iteration([2.0, 0.0, 0.0, 0.5])
    assert groups == [2, 2, 3, 3, 0, 0]
    assert gains == near([1, -1, -1, 1, 1, -1])
    # of four groups, the two with the largest spread stay: √(1/2) and √2
    assert stored(kept()) == [(0, 0.7071, 1)] * 2 + [(2, 1.4142, 0)] * 2
    assert kept().totals.choice.rows == 4

    groups, gains = iteration([1.0, 1.0, 0.0, 0.0])
    assert groups == [4, 4, 5, 5, 0, 0, 2, 2]
    assert gains == near([0, 0, 0, 0, 1, -1, 1, -1])
    # group 0 would be three iterations old; of two groups without spread, the older one leaves
    assert stored(kept()) == [(2, 1.4142, 1)] * 2 + [(5, 0.0, 0)] * 2
    assert (kept().totals.age.rows, kept().totals.choice.rows) == (2, 6)


def test_expert_iteration_learns_from_a_growing_set():
    """A right response is learned from in its own iteration, and can be drawn in the next ones."""
    flow, learned = load_flow("expert_iteration"), []
    hp = dataclasses.replace(flow.parameters.hp, samples=2, replayed=8, kept=4, max_tokens=4, minibatch=100)
    with rlflow.roles(flow, hp, backend="null", held_out=0, prompts=2) as roles:
        engine = roles.prepared.engine
        update = engine.update

        def recorded(role, batch, *rest, **options):
            learned.append(batch.axis.keys[:, :2].tolist())
            return update(role, batch, *rest, **options)

        engine.update = recorded
        for scores in ([1.0, 0.0, 1.0, 1.0], [0.0, 1.0, float("nan"), 0.5], [1.0, 1.0, 0.0, 0.0]):
            scored = lambda batch, given=scores: (torch.tensor(given), {})  # noqa: E731
            engine.scorers = dict.fromkeys(engine.scorers, scored)
            flow(roles.take(), **roles)
        kept = engine.buffer("solved")
    first, second, third = [[0, 0], [1, 0], [1, 1]], [[2, 1]], [[4, 0], [4, 1]]
    assert learned == [first, second + first, third + first + second]
    # of six right responses, the two oldest have left
    assert kept.entries.row.tolist() == [2, 3, 4, 5]
    assert kept.totals.room.rows == 2
