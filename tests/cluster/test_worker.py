"""Workers in threads compared with an engine without workers: every kind of call gives the same columns,
metrics and state."""

import time
from pathlib import Path

import pytest
import torch

import rlflow
import rlflow.data.tasks
from rlflow import StageError
from rlflow.author.figures import Figure, Of
from rlflow.author.load import load
from rlflow.cluster.rpc.wire_tensors import pack_tensors, unpack_tensors
from rlflow.cluster.sharding.shard_map import RemoteColumn
from rlflow.execution.engine import HERE, Chunks
from rlflow.training.protocols import Sampling

pytestmark = pytest.mark.slow  # whole runs, models or processes: each test is short, all together are not

flows = load(Path(__file__).parent / "flows.py")
COLUMNS = (
    "tokens",
    "mask",
    "completion",
    "scores",
    "logprobs",
    "noise",
    "shown",
    "advantages",
    "best",
    "total",
    "doubled",
    "report",
    "group",
)
SAMPLING = Sampling(samples=2, max_tokens=7)


@pytest.fixture(scope="module")
def distributed():
    """The objects of a run on three ranks, with seven prompts an iteration."""
    with rlflow.roles(flows.kinds, backend="null", prompts=7, pools="all=3@threads") as roles:
        yield roles


@pytest.fixture(scope="module")
def single():
    with rlflow.roles(flows.kinds, backend="null", prompts=7) as roles:
        yield roles


def outcome(roles, rows=7, iteration=0):
    prepared = roles.prepared
    prepared.engine.iteration = iteration
    return prepared.executor.run(prepared.plan, prepared.prompts.take(rows))


def stored(roles):
    return {name: pool.call("held").result() for name, pool in roles.prepared.engine.pools.items()}


def workers(roles, pool):
    """Return the objects on the ranks of a pool."""
    return [member.host.instance for member in roles.prepared.engine.pools[pool].actors]


def assert_same(found, expected):
    """Compare the outcomes of one iteration with and without workers."""
    assert found.metrics.keys() == expected.metrics.keys()
    for figure, value in expected.metrics.items():
        loss = figure.of is Of.UPDATE and figure.name == "loss"
        limits = {"rel": 1e-6, "abs": 1e-7} if loss else {"rel": 1e-12}  # ranks add up in another order
        assert found.metrics[figure] == pytest.approx(value, nan_ok=True, **limits), figure
    assert (found.summary, found.state, found.account) == (expected.summary, expected.state, expected.account)


def test_every_column_equals_that_of_a_single_process(distributed, single):
    found, expected = flows.kinds(distributed.take(), **distributed), flows.kinds(single.take(), **single)
    assert isinstance(found.data["logprobs"], RemoteColumn)
    fetched = distributed.prepared.engine.fetch(found.select(*COLUMNS))
    for name in COLUMNS:
        one, other = fetched[name], expected[name]
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, name
    # an ALL stage ran on every rank
    assert [float(value) for value in found["ranks"]] == [float(expected["total"])] * 3
    distributed.prepared.engine.finished()


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_an_iteration_is_equal_and_leaves_nothing_on_workers(distributed, single, rows):
    assert_same(outcome(distributed, rows), outcome(single, rows))
    assert stored(distributed) == {"all": [0, 0, 0]}


@pytest.mark.parametrize(
    ("name", "iterations", "settings"),
    [
        ("ppo", 3, {"hp.minibatch": 4, "hp.warmup": 1}),
        ("dapo", 1, {"hp.samples": 3, "hp.groups": 2}),
        ("vineppo", 1, {"hp.samples": 2, "hp.rollouts": 2}),
        ("correction", 1, {"hp.samples": 2}),
    ],
)
def test_an_algorithm_is_equal_with_weights_between_pools(name, iterations, settings):
    settings = {"prompts": 4, "hp.max_tokens": 9, **settings}
    with (
        rlflow.roles(
            name, backend="null", pools="train=2@threads,rollout=2@threads", **settings
        ) as distributed,
        rlflow.roles(name, backend="null", **settings) as single,
    ):
        for iteration in range(iterations):
            found, expected = outcome(distributed, 4, iteration), outcome(single, 4, iteration)
            assert_same(found, expected)
            assert stored(distributed) == {"train": [0, 0], "rollout": [0, 0]}
        engine = distributed.prepared.engine
        updates = iterations - settings.get("hp.warmup", 0)
        assert engine.models["actor"].version == updates
        for worker in workers(
            distributed, "rollout"
        ):  # has the weights that the last iteration was sampled with
            assert worker.engine.models["actor"].generator.version == updates - 1


@pytest.mark.parametrize(("name", "data"), [("dpo", "arithmetic_pairs"), ("sft", "arithmetic_lessons")])
def test_training_on_data_is_equal_by_pairs_and_without_groups(name, data):
    settings = {
        "prompts": 5,
        "hp.minibatch": 4,
        "data": f"{next(iter(rlflow.data.tasks.__path__))}/{data}.jsonl",
    }
    distributed = rlflow.roles(name, backend="null", pools="all=2@threads", **settings)
    with distributed as distributed, rlflow.roles(name, backend="null", **settings) as single:
        assert_same(outcome(distributed, 5), outcome(single, 5))
        assert stored(distributed) == {"all": [0, 0]}


def test_spans_of_ranks_use_the_drivers_clock(distributed):
    distributed.prepared.engine.ran()
    start = time.monotonic()
    found = outcome(distributed, iteration=3)
    end = time.monotonic()
    spans = found.ranks
    assert {(span.pool, span.rank, span.iteration) for span in spans} == {
        ("all", rank, 3) for rank in range(3)
    }
    assert {"actor.generate", "reward", "noisy", "actor.update"} <= {span.node for span in spans}
    assert all(start - 0.1 <= span.start <= span.end <= end + 0.1 for span in spans)
    assert distributed.prepared.engine.ran() == []


@pytest.mark.parametrize("count", [1, 2, 5])
def test_chunks_and_the_full_batch_equal_a_run_without_chunks(distributed, count):
    engine, prompts = distributed.prepared.engine, distributed.take()
    expected = engine.gather(engine.sample("actor", prompts, SAMPLING, 5))
    *chunks, found = engine.sample_chunks(
        "actor", prompts, SAMPLING, 5, Chunks(count, ("tokens", "completion"))
    )
    assert len(chunks) == count
    rows = [path for chunk in chunks for path in chunk.axis.keys.tolist()]
    assert sorted(rows) == sorted(expected.axis.keys.tolist())
    where = {tuple(path): row for row, path in enumerate(expected.axis.keys.tolist())}
    for chunk in map(engine.gather, chunks):
        index = [where[tuple(path)] for path in chunk.axis.keys.tolist()]
        assert chunk["completion"] == [expected["completion"][row] for row in index]
        assert chunk.data["tokens"].lengths.tolist() == expected.data["tokens"].lengths[index].tolist()
    found = engine.gather(found)
    assert torch.equal(found["tokens"], expected["tokens"])
    assert torch.equal(found.axis.keys, expected.axis.keys)
    spans = engine.ran()
    assert all(span.start <= span.end for span in spans)
    engine.finished()


def test_carried_over_rows_come_back_from_a_checkpoint(distributed):
    engine, prompts = distributed.prepared.engine, distributed.take()
    rows = engine.sample("actor", prompts, SAMPLING, 5)
    expected = engine.gather(rows)
    back = engine.unpacked(engine.packed(rows), None, "all")
    for again in (back, engine.held(rows, "all")):
        assert all(isinstance(data, RemoteColumn) for data in again.data.values())
        for name in ("tokens", "sampled_logprobs", "completion"):
            one, other = engine.gather(again)[name], expected[name]
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    for both in map(engine.gather, (engine.concat([rows, back]), engine.joined([rows, back]))):
        assert both["completion"] == [*expected["completion"], *expected["completion"]]
        assert both.data["tokens"].value.tolist() == expected.data["tokens"].value.tolist() * 2
    texts = [
        rows.select("completion", "mask").rename(completion="said"),
        back.select("finish", "mask").rename(finish="said"),
    ]
    # has another name on the workers
    assert engine.gather(engine.concat(texts))["said"] == [*expected["completion"], *expected["finish"]]
    engine.finished()
    assert stored(distributed) == {"all": [0, 0, 0]}


def homes(rows):
    """Return the rank that stores each row."""
    layout = rows.data["tokens"].layout
    return [layout.shards[i].at.rank for i in layout.shard.tolist()]


def test_rows_come_back_to_the_ranks_that_stored_them(distributed):
    engine = distributed.prepared.engine
    rows = engine.sample("actor", distributed.take(), SAMPLING, 5)
    assert len(set(homes(rows))) == 3
    packed = engine.packed(rows)
    back = engine.unpacked(packed, None, "all")
    assert homes(back) == homes(rows) == homes(engine.held(rows, "all"))
    assert engine.packed(back) == packed
    part = rows.rows([1, 4, 9])
    assert homes(engine.held(part, "all")) == homes(part)
    engine.finished()


def test_lasting_rows_are_kept_until_nothing_uses_them(distributed):
    engine = distributed.prepared.engine
    rows = engine.sample("actor", distributed.take(), SAMPLING, 5)
    expected = engine.gather(rows)["tokens"]
    kept = [engine.lasting().held(rows, "all"), engine.lasting().unpacked(engine.packed(rows), None, "all")]
    del rows
    for iteration in (1, 2, 3):
        engine.finished()
        engine.iteration = iteration
        assert stored(distributed) == {"all": [2, 2, 2]}
        for batch in kept:
            assert torch.equal(engine.gather(batch)["tokens"], expected)
            # a call on other ranks copies rows to them for this iteration only
            engine.calls.run(
                engine.pools["all"], "hold", batch.select("tokens"), [torch.arange(14)], {}, HERE, "io"
            )
    assert all(len(shard.copies) < 3 for batch in kept for shard in batch.data["tokens"].layout.shards)
    part = kept[0].rows([0, 13])
    del kept[:], batch
    engine.finished()
    assert sum(stored(distributed)["all"]) == 3  # a selection keeps all shards of its batch
    del part
    engine.finished()
    assert stored(distributed) == {"all": [0, 0, 0]}
    engine.iteration = 0


def test_the_driver_reads_no_column_above_64_kib(distributed):
    engine = distributed.prepared.engine
    rows = engine.sample("actor", distributed.take(900), SAMPLING, 5)
    groups = engine.fetch(rows.select("group"))["group"]
    assert (groups - groups[0]).tolist() == [row // 2 for row in range(1800)]
    with pytest.raises(
        ValueError, match=rf"column 'tokens' of {rows.data['tokens'].nbytes} bytes, expected at most 65536"
    ):
        engine.fetch(rows.select("tokens", "group"))
    engine.finished()


def test_a_trainers_state_comes_from_rank_0_and_is_restored(distributed):
    first, other, _ = workers(distributed, "all")
    before = unpack_tensors(first.state("actor"))
    payload, size = first.commit("actor")
    assert size == payload.nbytes > 0
    # takes part alone
    assert unpack_tensors(other.state("actor")) == unpack_tensors(other.weights("actor")) == {}
    outcome(distributed)
    # of five rows each
    assert unpack_tensors(first.weights("actor"))["steps"] == before["parameters/steps"] + 5
    for worker in (first, other):
        worker.restore("actor", payload)
        assert worker.engine.models["actor"].trainer.state() == before
    first.receive("actor", 12, pack_tensors({"steps": torch.tensor(3)}))
    assert first.engine.models["actor"].generator.version == 12


WRONG = {
    "row count": (
        "return scores[1:]",
        r"found shape \[\d\], expected \[\d\] \(row level\) \(rank 0 of pool 'all'\)",
    ),
    "raises": ("raise RuntimeError('no such luck')", r"RuntimeError: no such luck \(rank 0 of pool 'all'\)"),
}


@pytest.fixture
def wrong(tmp_path):
    """A flow whose stage fails as its state says; with a state not in WRONG, no row can be learned from."""
    bodies = "\n".join(
        f"    if mode == {number}:\n        {body}" for number, (body, _) in enumerate(WRONG.values())
    )
    (tmp_path / "wrong.py").write_text(f"""
import torch
from rlflow import flow, loss, row, scalar, stage

@stage(gives={{"extra": row(torch.float32)}})
def bad(scores, mode: scalar(torch.float32)):
{bodies}
    return scores * torch.nan

@loss
def policy_loss(new, extra: row(torch.float32)):
    return new.logprobs * extra[:, None], {{}}

@flow(state=lambda hp: {{"mode": 0.0}})
def wrong(prompts, actor, reward):
    batch = actor.generate(prompts, max_tokens=4)
    batch |= reward(batch)
    batch |= bad(batch)
    actor.update(batch, policy_loss)
""")
    return str(tmp_path / "wrong.py")


def test_a_failure_names_its_rank_and_leaves_nothing(wrong):
    pools = {"backend": "null", "prompts": 6, "pools": "all=2@threads"}
    with (
        rlflow.roles(wrong, **pools) as distributed,
        rlflow.roles(wrong, backend="null", prompts=6) as single,
    ):
        for number, (_, message) in enumerate(WRONG.values()):
            distributed.state["mode"] = float(number)
            with pytest.raises(StageError, match=message):
                outcome(distributed, 6)
            assert stored(distributed) == {"all": [0, 0]}
        distributed.state["mode"] = single.state["mode"] = float(len(WRONG))
        distributed.prepared.prompts.load(single.prepared.prompts.state())
        found, expected = outcome(distributed, 6), outcome(single, 6)
        assert found.metrics == pytest.approx(expected.metrics, nan_ok=True)
        assert found.metrics[Figure(Of.UPDATE, "left_out", "actor.update", "actor")] == 6
        assert found.account == expected.account  # of rows that no step has learned from
