"""A buffer on pools: the rows stay on their ranks, and draws, evictions and restarts give the same rows as in one
process."""

from pathlib import Path

import pytest
import torch

import rlflow
from rlflow.author.load import load
from rlflow.author.memory import buffer
from rlflow.author.node_options import DrawOptions
from rlflow.cluster.sharding.shard_map import RemoteColumn
from rlflow.execution.engine import HERE
from rlflow.execution.memory.buffers import KeptBuffer
from rlflow.execution.memory.saved_buffers import restored_buffer, saved_buffer
from rlflow.training.protocols import Sampling

pytestmark = pytest.mark.slow  # models and ranks: each test is short, all together are not

flows = load(Path(__file__).parent / "flows.py")
STORED = ("prompt_tokens", "tokens", "mask", "finish", "sampled_logprobs", "policy_version", "group")
SPEC = buffer(groups=9, max_age=3, evict="temperature")


@pytest.fixture(scope="module")
def three():
    with rlflow.roles(flows.kinds, backend="null", prompts=7, pools="all=3@threads") as roles:
        yield roles


@pytest.fixture(scope="module")
def two():
    with rlflow.roles(flows.kinds, backend="null", prompts=7, pools="all=2@threads") as roles:
        yield roles


@pytest.fixture(scope="module")
def single():
    with rlflow.roles(flows.kinds, backend="null", prompts=7) as roles:
        yield roles


class History:
    """Iterations that draw from a buffer and put rows into it, on the engine of some roles."""

    def __init__(self, roles):
        self.roles, self.engine = roles, roles.prepared.engine
        self.kept, self.drawn, self.last = KeptBuffer.empty(SPEC), [], None
        self.engine.iteration = 0

    def step(self, prompts):
        engine = self.engine
        which = self.kept.chosen(engine.iteration, engine.iteration, DrawOptions(4))
        batch = self.kept.rows(engine, which, engine.iteration)
        if len(which):
            self.drawn.append(engine.gather(batch.select(*STORED, "age", "drawn")))
        self.last = batch
        rows = engine.sample("actor", prompts, Sampling(samples=2, max_tokens=7), engine.iteration)
        put = (rows | engine.spread(prompts.select("prompt_tokens"), "all")).select(*STORED, "temperature")
        self.kept = self.kept.after_draw(self.kept.entries.row[which]).after_put(
            engine, put, engine.iteration
        )
        del rows, put, batch
        engine.finished()
        engine.iteration += 1

    def steps(self, prompts):
        for each in prompts:
            self.step(each)
        return self

    def restarted(self, roles):
        """Continue on the engine of other roles from the saved form."""
        state, files = saved_buffer("past", self.kept, self.engine)
        iteration, drawn = self.engine.iteration, self.drawn
        self.kept = KeptBuffer.empty(SPEC)
        self.engine.finished()
        self.roles, self.engine = roles, roles.prepared.engine
        self.engine.iteration, self.drawn = iteration, drawn
        self.kept = restored_buffer("past", self.kept, state, files, self.engine)
        assert saved_buffer("past", self.kept, self.engine)[1] == files
        return self


@pytest.fixture
def prompts(single):
    taken = single.take(28)
    return [taken.rows(torch.arange(4 * i, 4 * i + 4)) for i in range(7)]


def same(one, other):
    assert len(one) == len(other) > 3
    for a, b in zip(one, other, strict=True):
        assert list(a.data) == list(b.data)
        assert torch.equal(a.axis.keys, b.axis.keys)
        for name, data in a.data.items():
            value = b.data[name].value
            assert torch.equal(data.value, value) if isinstance(value, torch.Tensor) else data.value == value


def test_draws_equal_those_of_a_single_process(single, three, two, prompts):
    expected = History(single).steps(prompts)
    found = History(three).steps(prompts)
    same(found.drawn, expected.drawn)
    assert found.kept.totals == expected.kept.totals
    assert found.kept.totals.put.rows == 56
    for others in (three, two, single):  # the same number of ranks, fewer, and no pool at all
        again = History(three).steps(prompts[:3]).restarted(others).steps(prompts[3:])
        same(again.drawn, expected.drawn)


def test_rows_stay_on_their_ranks_and_are_freed_with_the_buffer(three, prompts):
    history = History(three).steps(prompts)
    drawn = history.last.data["tokens"]
    assert isinstance(drawn, RemoteColumn)
    homes = [drawn.layout.shards[i].at for i in drawn.layout.shard.tolist()]
    assert len(set(homes)) > 1
    pool = history.engine.pools["all"]
    assert sum(pool.call("held").result()) <= 3 * (len(history.kept.puts) + 1)
    sent = history.engine.traffic()
    history.kept.rows(history.engine, torch.arange(8), 7)
    assert history.engine.traffic()["columns"] == 0 < sent["columns"]
    history.kept, history.last = KeptBuffer.empty(SPEC), None
    del drawn
    history.engine.finished()
    assert pool.call("held").result() == [0, 0, 0]


def test_rows_come_back_from_their_bytes_after_workers_lost_them(three, prompts):
    history = History(three).steps(prompts[:3])
    engine, kept = history.engine, history.kept
    expected = engine.gather(kept.rows(engine, torch.arange(len(kept)), 3).select("tokens"))
    state, files = saved_buffer("past", kept, engine)
    for pool in engine.pools.values():
        for member in pool.actors:
            member.host.instance.store.clear(1 << 62)
    history.kept = kept.on(engine)
    again = engine.gather(history.kept.rows(engine, torch.arange(len(kept)), 3).select("tokens"))
    assert torch.equal(again["tokens"], expected["tokens"])
    assert saved_buffer("past", history.kept, engine) == (state, files)


def test_the_ranks_of_rows_do_not_change_when_a_call_needs_them_elsewhere(three, prompts):
    history = History(three).steps(prompts[:2])
    engine, kept = history.engine, history.kept
    batch = kept.rows(engine, torch.arange(len(kept)), 2)
    before = [shard.at for shard in batch.data["tokens"].layout.shards]
    engine.calls.run(engine.pools["all"], "hold", batch, [torch.arange(len(batch))], {}, HERE, "io")
    engine.finished()
    again = kept.rows(engine, torch.arange(len(kept)), 3)
    assert [shard.at for shard in again.data["tokens"].layout.shards] == before
