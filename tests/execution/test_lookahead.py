"""Sampling ahead of training: iteration numbers decide the weights of each sampling, no row is lost or
doubled, and a resumed run continues exactly.

One process runs everything, with an engine that keeps the version to sample with, which its generator would
lose.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from keyed import keyed

from rlflow import StageError, flow, group, loss, repeat, stage
from rlflow.author.load import load
from rlflow.backends.null import Score
from rlflow.compiler.passes import plan
from rlflow.errors import SkipIteration, Stopped
from rlflow.execution import lookahead as ahead
from rlflow.execution.local_engine import LocalEngine
from rlflow.execution.lookahead import Ahead

pytestmark = pytest.mark.slow  # runs models or processes: each test is short, but all together are not

ITERATIONS, PROMPTS = 6, 5
generated = load(Path(__file__).parent / "generated.py")
EMA = load(Path(__file__).parent / "ema.py")


@dataclass(frozen=True)
class Settings:
    groups: int = 3
    tries: int = 3
    bar: float = 0.2
    after: int = 0


@loss
def policy_loss(new, logprobs, policy_version, place):
    return -(new.logprobs - logprobs).exp() + 0 * place[:, None], {}


@loss
def scored_loss(new, logprobs, policy_version, scores):
    return -(new.logprobs - logprobs).exp() * scores[:, None], {}


@stage(gives="keep", rows="group")
def above(scores, group, *, bar):
    return scores.view(-1, 2).amin(1).repeat_interleave(2) > bar


@stage(gives={"place": group("float32")}, rows="group")
def placed(group):
    return group.float()


@flow
def kept(prompts, actor, reward, hp=Settings()):
    def body(drawn):
        rows = actor.generate(drawn, samples=2, max_tokens=5)
        rows |= reward(rows)
        rows |= placed(rows)
        return rows | above(rows, bar=hp.bar)

    batch = repeat(body, prompts, groups=hp.groups, tries=hp.tries)
    batch |= actor.logprobs(batch)
    actor.update(batch, policy_loss, after=hp.after)


@flow
def beside(prompts, actor, reward, hp=Settings()):
    """The flow also samples the prompts outside the repeat."""

    def body(drawn):
        rows = actor.generate(drawn, samples=2, max_tokens=5)
        rows |= reward(rows)
        rows |= placed(rows)
        return rows | above(rows, bar=hp.bar)

    every = actor.generate(prompts, samples=2, max_tokens=3)
    every |= reward(every)
    every |= actor.logprobs(every)
    batch = repeat(body, prompts, groups=hp.groups, tries=hp.tries)
    batch |= actor.logprobs(batch)
    actor.update(batch, policy_loss)
    actor.update(every, scored_loss)


@flow
def plain(prompts, actor, reward):
    batch = actor.generate(prompts, samples=2, max_tokens=5)
    batch |= reward(batch)
    batch |= actor.logprobs(batch)
    actor.update(batch, scored_loss)


@flow
def now_and_then(prompts, actor, reward, hp=Settings()):
    """A repeat and a further sampling that are due in different iterations, and in none at the same time."""

    def body(drawn):
        rows = actor.generate(drawn, samples=2, max_tokens=5)
        rows |= reward(rows)
        rows |= placed(rows)
        return rows | above(rows, bar=hp.bar)

    every = actor.generate(prompts, samples=2, max_tokens=3, every=3)
    every |= reward(every, every=3)
    every |= actor.logprobs(every, every=3)
    actor.update(every, scored_loss, every=3)
    batch = repeat(body, prompts, groups=hp.groups, tries=hp.tries, every=3, after=1)
    batch |= actor.logprobs(batch, every=3, after=1)
    actor.update(batch, policy_loss, every=3, after=1)


class Versions(LocalEngine):
    """A null backend whose weights are their version."""

    def frozen(self, role):
        return self.models[role].version

    def sample(self, role, prompts, sampling, seed, terms=None):
        model = self.models[role]
        model.generator.receive(iter(()), self.weights.get(role, model.version))
        model.sampled_version = model.version  # Engine.sample would pass it
        return super().sample(role, prompts, sampling, seed)


class Run:
    """A run that samples ahead, an iteration at a time; ``results``: the metrics of each iteration, or the
    reason for skipping it.
    """

    def __init__(self, world, flow, staleness, learner, iterations=ITERATIONS, hp=None):
        rows = self.rows = []

        class Keeping(learner):
            def update(self, batch, loss, **options):
                age = batch.data["policy_version"]
                versions = [set(part.tolist()) for part in age.value.split(age.lengths.tolist())]
                rows.append((engine.iteration, loss.name, batch.axis.keys.tolist(), versions))
                return super().update(batch, loss, **options)

        self.world = world(flow, trainer=Keeping, hp=hp)
        engine = self.engine = self.world.engine
        self.engine.__class__ = Versions
        self.plan = plan(self.world.program)
        self.ahead = Ahead(
            self.plan, self.engine, self.world.queues, self.world.stream, staleness, iterations, PROMPTS
        )
        self.results, self.accounts = {}, {}

    def steps(self, first=0, last=ITERATIONS):
        for number in range(first, last):
            self.step(number)
        return self

    def step(self, number):
        self.engine.iteration = number
        try:
            sampled = self.ahead.advance(number)
            outcome = self.world.executor.run(self.plan, sampled.prompts, sampled)
            self.results[number], self.accounts[number] = keyed(outcome.metrics), outcome.account
        except SkipIteration as skip:
            self.results[number], self.accounts[number] = str(skip), skip.account
        self.ahead.done(number)

    def saved(self, number):
        """Return the contents of a checkpoint, and the other state of such a run."""
        return self.ahead.saved(number), self.engine.models["actor"].version

    def restore(self, saved):
        (state, files), version = saved
        self.engine.models["actor"].version = version
        self.ahead.restore(state, files)

    def total(self, name):
        return sum(
            metrics.get(f"repeat.body/{name}", 0)
            for metrics in self.results.values()
            if not isinstance(metrics, str)
        )

    def trained(self, loss="policy_loss"):
        return [tuple(key) for _, name, keys, _ in self.rows for key in keys if name == loss]

    def oldest(self):
        """Return for each training iteration the oldest version of its rows."""
        return {number: min(map(min, versions)) for number, _, _, versions in self.rows}

    def left(self):
        """Return the positions of the groups that no update has trained on yet."""
        pieces = next(iter(self.ahead.carry_over.values())).pieces
        return [position for piece in pieces for position in piece.rows.axis.keys[::2, 0].tolist()]


@pytest.fixture
def run(world, learner):
    made = []

    def make(*args, **options):
        made.append(Run(world, *args, learner=learner, **options))
        return made[-1]

    yield make
    for each in made:
        each.ahead.close()


def wanted(prompts, positions, bar):
    """Return the positions that ``above`` keeps."""
    batch = prompts(0, positions).repeat(2)
    scores = Score()(batch)[0].view(-1, 2)
    return set((scores.amin(1) > bar).nonzero()[:, 0].tolist())


@pytest.mark.parametrize(
    ("staleness", "groups", "drops"), [(1, 3, True), (2, 3, False), (2, 1, True), (6, 3, False)]
)
def test_kept_groups_are_trained_once_or_dropped_within_the_bound(run, prompts, staleness, groups, drops):
    made = run(kept, staleness, hp=Settings(groups=groups)).steps()
    assert all(version >= number - staleness for number, version in made.oldest().items())
    assert all(len(version) == 1 for *_, versions in made.rows for version in versions)
    trained, left = [position for position, sample in made.trained() if sample == 0], made.left()
    found = wanted(prompts, made.world.stream.position, 0.2)
    assert len(made.trained()) == len(set(made.trained())) == 2 * len(trained)
    assert trained == sorted(trained)
    assert {*trained, *left} <= found
    assert len(found) - len(trained) - len(left) == made.total("dropped")
    assert made.total("seen") == made.world.stream.position
    assert made.total("surplus") == made.total("carried") + made.total("dropped") + len(left)
    assert made.total("carried") > 0
    assert (made.total("dropped") > 0) == drops


def test_enough_carried_over_groups_replace_sampling(run):
    made = run(kept, 6, hp=Settings(groups=1)).steps(last=3)
    assert [made.results[number]["repeat.body/tries"] for number in range(3)] == [1, 0, 0]
    assert [made.results[number]["repeat.body/carried"] for number in range(3)] == [0, 3, 2]
    assert made.world.stream.position == PROMPTS
    assert made.oldest() == {0: 0, 1: 0, 2: 0}


def test_unchanged_weights_do_not_age_their_samples(run):
    assert run(kept, 1, hp=Settings(groups=1)).steps(last=5).total("dropped") > 0
    warming = run(kept, 1, hp=Settings(groups=1, after=4)).steps(last=5)
    assert (warming.total("dropped"), warming.total("carried") > 0) == (0, True)


def test_prompts_with_other_readers_are_taken_in_every_iteration(run):
    made = run(beside, 6, hp=Settings(groups=1)).steps()
    every = made.trained("scored_loss")
    assert len(every) == len(set(every)) == 2 * PROMPTS * ITERATIONS
    assert len(made.trained()) == len(set(made.trained())) == 2 * ITERATIONS


def test_only_the_calls_that_are_due_sample_ahead(run):
    made, sampled = run(now_and_then, 2), []
    for number in range(ITERATIONS):
        sampled.append({made.plan.graph.nodes[i].name for i in made.ahead.advance(number).rows})
        made.step(number)
    assert sampled == [{"actor.generate"}, {"repeat.body"}, set()] * 2
    assert {number: loss for number, loss, *_ in made.rows} == {
        0: "scored_loss",
        1: "policy_loss",
        3: "scored_loss",
        4: "policy_loss",
    }
    assert all(version >= number - 2 for number, version in made.oldest().items())


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 3])
@pytest.mark.parametrize(
    ("flow", "hp", "skips"),
    [
        (kept, Settings(), False),
        (kept, Settings(groups=5, tries=1, bar=0.6), True),
        (beside, Settings(), False),
        (now_and_then, Settings(), False),
        (plain, None, False),
    ],
)
def test_a_run_cut_at_any_iteration_continues_the_same(run, flow, hp, skips, staleness):
    whole, saves = run(flow, staleness, hp=hp), {}
    for number in range(ITERATIONS):
        saves[number] = whole.saved(number)
        whole.step(number)
    assert any(isinstance(results, str) for results in whole.results.values()) == skips
    for cut, saved in saves.items():
        again = run(flow, staleness, hp=hp)
        again.restore(saved)
        again.steps(cut)
        assert again.rows == [row for row in whole.rows if row[0] >= cut]
        assert again.results == {
            number: results for number, results in whole.results.items() if number >= cut
        }
        assert again.saved(ITERATIONS) == whole.saved(ITERATIONS)


@pytest.mark.parametrize("staleness", [1, 3])
def test_a_skipped_iteration_loses_and_doubles_nothing(run, prompts, staleness):
    made = run(kept, staleness, hp=Settings(groups=5, tries=1, bar=0.6)).steps()
    assert "the body kept none of 5 groups in 1 tries" in made.results.values()
    assert made.world.stream.position == PROMPTS * ITERATIONS
    assert {position for position, _ in made.trained()} == wanted(prompts, PROMPTS * ITERATIONS, 0.6)
    assert len(made.trained()) == len(set(made.trained()))


@pytest.mark.parametrize("staleness", [1, 3])
def test_only_rows_with_a_missing_score_are_skipped(run, staleness):
    made, missing = run(plain, staleness), []

    def score(batch):
        scores = Score()(batch)[0]
        bad = batch.axis.keys.sum(1) % 4 == 0
        missing.append(int(bad.sum()))
        return torch.where(bad, torch.nan, scores), {}

    made.engine.scorers["reward"] = score
    made.steps()
    keys = made.trained("scored_loss")
    assert keys == [(position, sample) for position in range(PROMPTS * ITERATIONS) for sample in range(2)]
    assert [results["actor.update/left_out"] for results in made.results.values()] == missing
    assert sum(missing) == sum((position + sample) % 4 == 0 for position, sample in keys) > 0


def test_only_groups_with_a_missing_score_are_dropped(run, prompts):
    made = run(kept, 2)
    made.engine.scorers["reward"] = lambda batch: (
        torch.where(batch.axis.keys[:, 0] % 3 == 0, torch.nan, Score()(batch)[0]),
        {},
    )
    made.steps()
    found = {position for position in wanted(prompts, made.world.stream.position, 0.2) if position % 3}
    trained = {position for position, _ in made.trained()}
    assert len(made.trained()) == len(set(made.trained()))
    assert {*trained, *made.left()} <= found
    assert len(found) - len({*trained, *made.left()}) == made.total("dropped")


def test_an_error_in_a_body_names_the_iteration_it_was_for(run):
    made = run(kept, 1)

    def score(batch):
        if int(batch.axis.keys.max()) >= PROMPTS:
            raise RuntimeError("no more")
        return Score()(batch)[0], {}

    made.engine.scorers["reward"] = score
    made.step(0)
    with pytest.raises(StageError, match="stage 'reward' failed in iteration 1 .*no more"):
        made.step(1)


def test_closing_during_a_body_waits_for_the_running_call(run, monkeypatch):
    made, started, go = run(kept, 1), threading.Event(), threading.Event()

    def score(batch):
        started.set()
        assert go.wait(60)
        return Score()(batch)[0], {}

    made.engine.scorers["reward"] = score
    monkeypatch.setattr(ahead, "CLOSING_SECONDS", 0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(made.ahead.advance, 0)
        assert started.wait(60)
        made.ahead.close()
        go.set()
        with pytest.raises(Stopped):
            waiting.result(60)
    assert made.world.stream.position == PROMPTS
    assert not made.rows


@settings(max_examples=8)
@given(shape=st.fixed_dictionaries(generated.SHAPES), staleness=st.integers(1, 2), cut=st.integers(1, 3))
def test_a_cut_run_counts_every_row_once(run, shape, staleness, cut):
    flow = generated.drawn(**shape)
    whole = run(flow, staleness, iterations=4)
    seen = generated.Seen(whole.engine)
    whole.steps(last=4)
    generated.assert_counted(whole.accounts.values(), seen)
    started, resumed = run(flow, staleness, iterations=4), run(flow, staleness, iterations=4)
    started.steps(last=cut)
    resumed.restore(started.saved(cut))
    resumed.steps(cut, 4)
    assert started.rows + resumed.rows == whole.rows
    assert [account.as_json() for account in (started.accounts | resumed.accounts).values()] == [
        account.as_json() for account in whole.accounts.values()
    ]


@pytest.mark.parametrize("staleness", [1, 2])
def test_rows_sampled_ahead_belong_to_their_own_iteration(run, flows, staleness):
    made = run(flows.clocked, staleness)
    made.engine.iterations = ITERATIONS
    made.steps()
    for number, metrics in made.results.items():
        clocks = {name: value for name, value in metrics.items() if name.endswith("/iteration")}
        assert clocks == dict.fromkeys(clocks, number)
        assert len(clocks) == 4 + (
            "enough/iteration" in metrics
        )  # with enough carried-over groups the body does not run
        assert metrics["schedule/progress"] == pytest.approx(number / ITERATIONS)
        assert metrics.get("enough/progress", number / ITERATIONS) == pytest.approx(number / ITERATIONS)


def test_a_falling_temperature_follows_the_rows_own_iteration(run):
    def cooling():
        made = run(EMA.ema, 2, hp=EMA.EMA(controlled=False))
        made.engine.iterations = ITERATIONS
        return made

    whole = cooling().steps(last=3)
    saved = whole.saved(3)
    whole.steps(3)
    again = cooling()
    again.engine.state |= whole.engine.state
    again.restore(saved)
    again.steps(3)
    temperatures = [metrics["above/temperature"] for metrics in whole.results.values()]
    assert temperatures == pytest.approx([1.2 - 0.4 * number / ITERATIONS for number in range(ITERATIONS)])
    assert [metrics["above/temperature"] for metrics in again.results.values()] == temperatures[3:]
    assert again.rows == whole.rows[-len(again.rows) :]
