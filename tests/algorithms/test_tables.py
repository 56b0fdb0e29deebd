"""Algorithms that keep tables: what three iterations read, train on and store, computed by hand."""

import dataclasses
import json
import math

import pytest
import torch

import rlflow
from rlflow.algorithms import curriculum, selfplay, spo
from rlflow.author.batch import Batch
from rlflow.author.load import load_flow
from rlflow.backends.null import Trainer
from rlflow.training.protocols import ModelSpec


class Moving(Trainer):
    """A policy whose log-probs fall by 0.06 with each optimizer step."""

    def _column(self, name, batch):
        data = super()._column(name, batch)
        return dataclasses.replace(data, value=data.value - 0.06 * self.steps)


class Traced:
    """A flow on the null backend, with the scores that a test gives. Prompts are named by their place in
    ``records``.

    ``said``: completions that replace those of the backend for a stage, by prompt.
    """

    def __init__(self, name, hp, folder, records, trainer=Trainer, **options):
        data = folder / "records.jsonl"
        data.write_text("".join(json.dumps({"prompt": text, "answer": "0"}) + "\n" for text in records))
        self.flow, self.records, self.said = load_flow(name), list(records), {}
        hp = dataclasses.replace(self.flow.parameters.hp, **hp)
        self.roles = rlflow.roles(
            self.flow, hp, backend="null", data=str(data), held_out=0, out=str(folder), **options
        )
        self.engine = self.roles.prepared.engine
        self.engine.models["actor"].trainer = trainer(ModelSpec(None))
        self._stage, self.engine.stage = self.engine.stage, self.stage

    def stage(self, of, batch, *rest):
        """Run a stage, and keep the columns that it reads and gives."""
        if of.name in self.said:
            left = {prompt: iter(texts) for prompt, texts in self.said[of.name].items()}
            texts = [next(left[prompt]) for prompt in self.prompts_of(batch)]
            data = dataclasses.replace(batch.data["completion"], value=texts)
            batch = Batch(batch.axis, {**batch.data, "completion": data})
        result = self._stage(of, batch, *rest)
        self.calls.setdefault(of.name, []).append(batch | result[0])
        return result

    def take(self):
        """Take the prompts of the next iteration. Return them in the order of the data."""
        self.taken, self.calls = self.roles.take(), {}
        names = [self.records.index(text) for text in self.taken["prompt"]]
        self.prompts = dict(zip(self.taken.axis.keys[:, 0].tolist(), names, strict=True))
        return names

    def prompts_of(self, batch):
        return [self.prompts[place] for place in batch.axis.keys[:, 0].tolist()]

    def iteration(self, scores):
        """Run the iteration. ``scores``: the scores of each prompt's responses."""

        def scored(batch):
            left = {prompt: iter(row) for prompt, row in scores.items()}
            return torch.tensor([next(left[prompt]) for prompt in self.prompts_of(batch)]), {}

        self.engine.scorers = dict.fromkeys(self.engine.scorers, scored)
        self.flow(self.taken, **self.roles)

    def sampled(self):
        """Return the prompts of the iteration's responses."""
        return set(self.prompts_of(self.calls["compare"][-1]))

    def seen(self, stage, column, call=-1):
        """Return a column of a stage's rows, sorted by prompt and sample. Of a token column, the value at the
        first token.
        """
        batch = self.calls[stage][call]
        prompts = self.prompts_of(batch)
        order = sorted(range(len(batch)), key=lambda row: (prompts[row], *batch.axis.keys[row].tolist()))
        if isinstance(batch[column], list):
            return [batch[column][row] for row in order]
        values = batch[column] if batch[column].dim() == 1 else batch[column][:, 0]
        return pytest.approx(values[order].tolist(), abs=1e-5, nan_ok=True)

    def stored(self, table):
        """Return the numbers of a table by key."""
        kept = self.engine.memory[table]
        keys = torch.cat([part.keys for part in kept.parts]).unique()
        rows = torch.stack(list(kept.read(keys).values()), 1).tolist()
        return {key: pytest.approx(row, abs=1e-5) for key, row in zip(keys.tolist(), rows, strict=True)}


NAN = math.nan


@pytest.fixture
def traced(tmp_path):
    runs = []

    def start(name, hp, records, **options):
        runs.append(Traced(name, hp, tmp_path, records, **options))
        return runs[-1]

    yield start
    for run in runs:
        run.roles.close()


def test_spo_tracks_the_expected_score_of_each_prompt(traced):
    """Each update moves the policy by 0.06 nats per token, which halves the evidence. The third prompt gets no
    score at first, so at its second visit the policy has moved by 0.12, and a quarter of the evidence stays.
    """
    run = traced("spo", {"max_tokens": 4, "keep_low": 0.125}, "abc", trainer=Moving, prompts=3)
    run.take()
    run.iteration({0: [1.0], 1: [0.0], 2: [NAN]})
    assert run.seen("compare", "value") == [0.5, 0.5, 0.5]
    assert run.seen("compare", "advantages") == [0.707107, -0.707107, NAN]  # gains ±1/2, deviation √(1/2)
    # value, evidence, moved: (0.5 · 0.5 + 1) / 1.5 and (0.5 · 0.5 + 0) / 1.5
    assert run.stored("tracker") == {0: [5 / 6, 1.5, 0.06], 1: [1 / 6, 1.5, 0.06]}

    run.take()
    run.iteration({0: [1.0], 1: [1.0], 2: [0.0]})
    assert run.seen("compare", "value") == [5 / 6, 1 / 6, 0.5]
    assert run.seen("compare", "advantages") == [0.0, 1.0, -1.0]  # gains 1/6, 5/6, -1/2, deviation 2/3
    assert run.stored("tracker") == {
        0: [(0.5 * 1.25 + 1) / 1.75, 0.5 * 1.5 + 1, 0.12],
        1: [(0.5 * 0.25 + 1) / 1.75, 0.5 * 1.5 + 1, 0.12],
        2: [(0.25 * 0.5 + 0) / 1.25, 0.25 * 1 + 1, 0.12],
    }

    run.take()
    run.iteration({0: [0.0], 1: [1.0], 2: [1.0]})
    assert run.seen("compare", "value") == [1.625 / 1.75, 1.125 / 1.75, 0.1]
    # gains -0.928571, 0.357143, 0.9: mean 0.109524, deviation 0.939098
    assert run.seen("compare", "advantages") == [-1.105417, 0.263678, 0.841740]
    assert run.stored("tracker") == {
        0: [(0.5 * 1.625 + 0) / 1.875, 1.875, 0.18],
        1: [(0.5 * 1.125 + 1) / 1.875, 1.875, 0.18],
        2: [(0.5 * 0.125 + 1) / 1.625, 1.625, 0.18],
    }


def test_spo_stores_the_posterior_of_its_authors():
    """They count discounted wins α and losses β: α ← ρα + r and β ← ρβ + 1 - r, with ρ = 2^(-D / half) between
    its bounds. The table has α / (α + β) and α + β.
    """
    wins, losses, moved = (torch.tensor(x, dtype=torch.float64) for x in ([0.5, 3.0], [0.5, 1.0], [0.0, 0.2]))
    for _ in range(4):
        scores = torch.tensor([0.25, 1.0], dtype=torch.float64)
        now = moved.max() + 0.03
        value, evidence, moved_then, _ = spo.track(
            scores, wins / (wins + losses), wins + losses, moved, now, half=0.06, low=0.3, high=0.96
        )
        rho = torch.tensor([max(0.3, min(0.96, 2 ** (-float(now - then) / 0.06))) for then in moved])
        wins, losses, moved = rho * wins + scores, rho * losses + 1 - scores, moved_then
        torch.testing.assert_close(value, wins / (wins + losses))
        torch.testing.assert_close(evidence, wins + losses)


def test_spo_counts_a_prompt_that_an_iteration_has_twice_as_its_mean(traced):
    run = traced("spo", {"max_tokens": 4, "keep_low": 0.5, "keep_high": 0.5}, "a", prompts=2)
    run.take()
    run.iteration({0: [1.0, 0.5]})
    assert run.stored("tracker") == {0: [(0.5 * 0.5 + 0.75) / 1.5, 1.5, 0.0]}


def test_the_curriculum_samples_the_prompts_of_the_largest_expected_learnability(traced):
    """With wins w and losses l, it is (w + 1)(l + 1) / ((w + l + 2)(w + l + 3)): 1/6 for a new prompt. Of equal
    prompts, the first in the data is sampled.
    """
    run = traced("curriculum", {"max_tokens": 4, "samples": 4, "chosen": 2, "keep": 0.8}, "abcd", prompts=4)
    one, two, *new = run.take()
    run.iteration({one: [1.0, 0.0, 0.5, 0.4], two: [1.0, 1.0, 1.0, 1.0]})
    assert run.seen("learnability", "gain") == [1 / 6, 1 / 6, 1 / 6, 1 / 6]
    assert run.sampled() == {one, two}
    assert run.stored("seen") == {one: [2, 4, 0], two: [4, 4, 0]}  # wins, tries, iteration

    three, four = sorted(new, key=run.take().index)
    run.iteration({one: [1.0, NAN, 0.0, 1.0], three: [0.0, 0.0, 0.0, 0.0]})
    # 0.8 of the counts are left: 1.6 wins of 3.2, and 3.2 of 3.2
    gains = {one: 2.6 * 2.6 / (5.2 * 6.2), two: 4.2 * 1 / (5.2 * 6.2), three: 1 / 6, four: 1 / 6}
    assert run.seen("learnability", "gain") == [gains[prompt] for prompt in range(4)]
    assert run.sampled() == {one, three}
    # the missing score counts like the mean of the others
    assert run.stored("seen") == {one: [1.6 + 4 * 2 / 3, 7.2, 1], two: [4, 4, 0], three: [0, 4, 1]}

    run.take()
    run.iteration({one: [0.0, 0.0, 0.0, 0.0], four: [NAN, NAN, NAN, NAN]})
    wins, tries = 0.8 * (1.6 + 8 / 3), 0.8 * 7.2  # 3.413333 of 5.76
    gains = {
        one: (wins + 1) * (tries - wins + 1) / ((tries + 2) * (tries + 3)),
        two: 3.56 * 1 / (4.56 * 5.56),  # 0.64 · 4 wins of 0.64 · 4 after two iterations
        three: 1 * 4.2 / (5.2 * 6.2),
        four: 1 / 6,
    }
    assert run.seen("learnability", "gain") == [gains[prompt] for prompt in range(4)]
    assert run.sampled() == {one, four}
    assert run.stored("seen") == {one: [wins, tries + 4, 2], two: [4, 4, 0], three: [0, 4, 1]}


def test_learnability_is_the_expected_variance_of_a_response():
    """The integral of p(1 - p) over the posterior p^wins (1 - p)^losses."""
    p = torch.linspace(0, 1, 20_001, dtype=torch.float64)
    for wins, losses in ((0.0, 0.0), (3.0, 1.0), (0.5, 6.25)):
        density = p**wins * (1 - p) ** losses
        gain, _ = curriculum.learnability(torch.tensor([wins]), torch.tensor([wins + losses]))
        assert float(gain) == pytest.approx(float((p * (1 - p) * density).sum() / density.sum()), rel=1e-3)


def test_selfplay_pays_and_compares_each_role_by_type(traced):
    """Prompts 0 and 2 are sums (kind 0), prompt 1 is a difference (kind 1). The averages keep a half."""
    sums = ("20 + 7 =", "9 - 4 =", "30 + 1 =")
    run = traced("selfplay", {"max_tokens": 4, "samples": 2, "decay": 0.5, "request": ""}, sums, prompts=3)
    numbers = {prompt: ["5", "5"] for prompt in range(3)}
    run.take()
    run.said = {"pose": {0: ["3"], 1: ["x"], 2: [" 99"]}, "grade": {**numbers, 2: ["5", "five"]}}
    run.iteration({0: [1.0, 0.0], 1: [1.0, 1.0], 2: [0.0, 0.0]})
    assert run.seen("pose", "question") == ["3 + 7 =", "9 - 4 =", "99 + 1 ="]
    assert run.seen("pose", "answer") == ["10", "0", "100"]
    assert run.seen("grade", "scores") == [1, -0.5, 1, 1, -0.5, -1]
    # half of the answers are right; the proposal is no number; no answer is right
    assert run.seen("pay", "scores") == [0.5, -1, -0.5]
    assert run.seen("compare", "advantages", 0) == [0.5 / 0.5001, 0, -0.5 / 0.5001]
    # weight, mean, square of kind 0 and 1; only the last differ from the batch's because of the weight
    assert run.stored("proposer") == {0: [0.5, 0, 0.125], 1: [0.5, -0.5, 0.5]}
    # rewards 1, -1/2, -1/2, -1 of kind 0: mean -1/4, deviation 3/4
    advantages = [1.25 / 0.7501, -0.25 / 0.7501, 0, 0, -0.25 / 0.7501, -0.75 / 0.7501]
    assert run.seen("compare", "advantages", 1) == advantages
    assert run.stored("solver") == {0: [0.5, -0.125, 0.3125], 1: [0.5, 0.5, 0.5]}

    run.take()
    run.said = {"pose": {0: ["5"], 1: ["8"], 2: ["123"]}, "grade": numbers}
    run.iteration({0: [1.0, 1.0], 1: [0.0, 1.0], 2: [1.0, NAN]})
    assert run.seen("pose", "question") == ["5 + 7 =", "8 - 4 =", "30 + 1 ="]
    assert run.seen("pose", "answer") == ["12", "4", "0"]
    assert run.seen("pay", "scores") == [-0.5, 0.5, -1]
    # kind 0: mean -0.375 / 0.75 = -1/2, square 0.375 / 0.75, so deviation 1/2; kind 1: mean 0, deviation √(1/2)
    assert run.seen("compare", "advantages", 0) == [0, 0.5 / (0.5**0.5 + 1e-4), -0.5 / 0.5001]
    assert run.stored("proposer") == {0: [0.75, -0.375, 0.375], 1: [0.75, 0, 0.375]}
    # kind 0: mean 0.583333, deviation 0.731247; kind 1: mean 1/2, deviation √(1/2)
    advantages = [0.569725, 0.569725, -1.414014, 0.707007, 0.569725, NAN]
    assert run.seen("compare", "advantages", 1) == advantages
    assert run.stored("solver") == {0: [0.75, 0.4375, 0.65625], 1: [0.75, 0.375, 0.5625]}

    run.take()
    run.said = {"pose": {0: ["-1"], 1: ["1"], 2: ["4"]}, "grade": numbers}
    run.iteration({0: [1.0, 1.0], 1: [NAN, NAN], 2: [1.0, 0.0]})
    assert run.seen("pay", "scores") == [-1, NAN, 0.5]
    # mean -0.3125 / 0.875, deviation 0.666242; without a score, nothing of kind 1 is written
    assert run.seen("compare", "advantages", 0) == [-0.964755, NAN, 1.286341]
    assert run.stored("proposer") == {0: [0.875, -0.3125, 0.5], 1: [0.75, 0, 0.375]}
    # mean 0.53125 / 0.875, deviation 0.686049
    assert run.seen("compare", "advantages", 1) == [0.572554, 0.572554, NAN, NAN, 0.572554, -1.613561]
    assert run.stored("solver") == {0: [0.875, 0.53125, 0.734375], 1: [0.75, 0.375, 0.5625]}


def test_selfplay_pays_a_proposal_by_the_share_of_wrong_answers():
    rate, valid = torch.tensor([0.25, 0.0, 1.0, NAN, 0.5, NAN]), torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    paid = selfplay.pay(valid, rate, wrong=-0.5, malformed=-1.0)
    assert paid.tolist() == pytest.approx([0.75, -0.5, -0.5, NAN, -1.0, -1.0], nan_ok=True)


def test_selfplay_without_memory_normalises_over_the_batch_by_type():
    """TRR++ of the paper: (reward - mean) / standard deviation of the batch's rewards of one type."""
    scores = torch.linspace(-1, 2, 9, dtype=torch.float64).square()
    kind = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1, 1])
    old = torch.full((9,), 3.0, dtype=torch.float64)
    mask = torch.ones(9, 1, dtype=torch.bool)
    advantages = selfplay.compare(scores, kind, mask, old, old, old, decay=0.0)[0][:, 0]
    for each in (0, 1):
        rows = scores[kind == each]
        expected = (rows - rows.mean()) / (rows.std(correction=0) + 1e-4)
        torch.testing.assert_close(advantages[kind == each], expected)
