"""The engine on a pool of three ranks, compared with the engine in this process: every kind of stage, the
same columns, metrics and state. Ranks are threads, except in tests about processes."""

import os
import re
from contextlib import contextmanager
from pathlib import Path
from timeit import timeit

import pytest
import torch

import rlflow
from rlflow import PlanError, StageError
from rlflow.author.load import load
from rlflow.cluster import cluster_engine as cluster_engine
from rlflow.cluster.health.controllers import Controllers
from rlflow.cluster.launch import wait_for_models
from rlflow.cluster.rpc.pool import Pool
from rlflow.cluster.rpc.sockets import Sockets
from rlflow.cluster.sharding.shard_map import RemoteColumn

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


@pytest.fixture(scope="module")
def pooled():
    """The objects of a run on three ranks, with seven prompts an iteration."""
    roles = rlflow.roles(flows.kinds, backend="null", prompts=7, pools="all=3@threads")
    yield roles
    roles.close()


@pytest.fixture(scope="module")
def processes(ray_address):
    """The same run, whose ranks are processes of Ray."""
    roles = rlflow.roles(flows.kinds, backend="null", prompts=7, pools="all=3", ray_address=ray_address)
    yield roles
    roles.close()


@pytest.fixture(scope="module")
def single():
    roles = rlflow.roles(flows.kinds, backend="null", prompts=7)
    yield roles
    roles.close()


def stored(roles):
    return {name: pool.call("held").result() for name, pool in roles.prepared.engine.pools.items()}


def outcome(roles, rows=7):
    prepared = roles.prepared
    return prepared.executor.run(prepared.plan, prepared.prompts.take(rows))


def assert_columns_of_a_single_process(pooled, single):
    """Compare one iteration that the flow runs call by call."""
    there, here = flows.kinds(pooled.take(), **pooled), flows.kinds(single.take(), **single)
    assert isinstance(there.data["logprobs"], RemoteColumn)
    fetched = pooled.prepared.engine.fetch(there.select(*COLUMNS))
    for name in COLUMNS:
        one, other = fetched[name], here[name]
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, name
    total = float(here["total"])
    assert [float(value) for value in there["ranks"]] == [total] * 3  # an ALL stage ran on every rank
    pooled.prepared.engine.finished()


def test_every_column_equals_that_of_a_single_process(pooled, single):
    assert_columns_of_a_single_process(pooled, single)


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_metrics_equal_those_of_a_single_process(pooled, single, rows):
    assert_metrics_of_a_single_process(pooled, single, rows)


def assert_metrics_of_a_single_process(pooled, single, rows):
    """Compare one iteration that the executor runs."""
    there, here = outcome(pooled, rows), outcome(single, rows)
    assert there.metrics.keys() == here.metrics.keys()
    for name, value in here.metrics.items():
        assert there.metrics[name] == pytest.approx(value, rel=1e-12, nan_ok=True), name
    assert there.summary == here.summary


@pytest.fixture
def fresh():
    """The run in one process before its first iteration."""
    roles = rlflow.roles(flows.kinds, backend="null", prompts=7)
    yield roles
    roles.close()


@pytest.mark.slow
def test_processes_give_the_columns_and_metrics_of_a_single_one(processes, fresh):
    assert_columns_of_a_single_process(processes, fresh)
    assert_metrics_of_a_single_process(processes, fresh, 7)


@pytest.mark.slow
def test_short_calls_use_lines_or_ray_if_there_are_none(processes, monkeypatch):
    spoken, pool = [], processes.prepared.engine.pools["all"]
    assert pool.sockets.settled(60)

    def talk(what, *told):
        found = Pool.short_call(pool, what, *told)
        spoken.append((what, found is not None))
        return found

    monkeypatch.setattr(pool, "short_call", talk)
    prepared = processes.prepared
    prompts = prepared.prompts.take(7)
    over_lines = prepared.executor.run(prepared.plan, prompts)
    assert ("stage", True) in spoken
    spoken.clear()
    monkeypatch.setattr(pool, "sockets", Sockets())
    by_ray = prepared.executor.run(prepared.plan, prompts)
    assert {found for _, found in spoken} == {False}
    assert by_ray.metrics == pytest.approx(over_lines.metrics, nan_ok=True, rel=0)
    assert by_ray.summary == over_lines.summary


def test_nothing_stays_on_the_workers(pooled):
    outcome(pooled)
    assert stored(pooled) == {"all": [0, 0, 0]}


def test_the_driver_sees_no_column_above_64_kib(pooled, monkeypatch):
    opened = cluster_engine.opened

    def small_only(payload):
        batch = opened(payload)
        assert all(data.nbytes <= 64 << 10 for data in batch.data.values()), batch
        return batch

    monkeypatch.setattr(cluster_engine, "opened", small_only)
    prompts = pooled.prepared.prompts.take(900)
    found = pooled.prepared.executor.run(pooled.prepared.plan, prompts)
    assert found.records["tokens"].data["tokens"].nbytes > 64 << 10
    with pytest.raises(ValueError, match=r"column 'tokens' of \d+ bytes, expected at most 65536"):
        pooled.prepared.engine.fetch(found.records["tokens"])


WRONG = {
    "row count": (
        "return scores[1:]",
        r"found shape \[\d\], expected \[\d\] \(row level\) \(rank \d of pool 'all'\)",
    ),
    "raises": ("raise RuntimeError('no such luck')", r"RuntimeError: no such luck \(rank \d of pool 'all'\)"),
    "exit": (
        "sys.exit(0)",
        r"stage 'bad' failed .*SystemExit: 0 \(raised by .*wrong\.py:\d+\); a stage must not end",
    ),
    "_exit": (
        "os._exit(0)",
        r"stage 'bad' failed .*ProcessExit: os\._exit\(0\) \(raised by .*wrong\.py:\d+\); a stage must not end",
    ),
    "late": (
        "return scores",
        r"no answer to 'stage' from rank 0 of pool 'all', rank 1 of pool 'all' after 0.5 s",
    ),
}


# called by a worker instead of loading
SLOW = "import pathlib, time; pathlib.Path({!r}).write_text('loads'); time.sleep(600)"


@pytest.fixture
def wrong(tmp_path):
    """The file of a flow with a failing stage, and a stage that waits until the pipe next to the file is
    opened."""
    bodies = "\n".join(f"    if mode == {name!r}:\n        {body}" for name, (body, _) in WRONG.items())
    os.mkfifo(tmp_path / "late")
    (tmp_path / "wrong.py").write_text(f"""
import os
import sys
import torch
from rlflow import flow, loss, row, scalar, stage

PIPE = {str(tmp_path / "late")!r}

@stage(gives={{"extra": row(torch.float32)}})
def bad(scores, mode: scalar(torch.float32)):
    mode = {["sound", *WRONG]!r}[int(mode)]
{bodies}
    return scores

@stage(gives={{"later": row(torch.float32)}}, timeout=0.5)
def never(extra: row(torch.float32)):
    open(PIPE).close()

@loss
def policy_loss(new, later: row(torch.float32)):
    return new.logprobs * later[:, None], {{}}

@flow(state=lambda hp: {{"mode": 0.0}})
def wrong(prompts, actor, reward):
    batch = actor.generate(prompts, max_tokens=4)
    batch |= reward(batch)
    batch |= bad(batch)
    batch |= never(batch)
    actor.update(batch, policy_loss)
""")
    return tmp_path / "wrong.py"


@contextmanager
def opened(file, **where):
    """Two ranks that run the flow of a file."""
    roles = rlflow.roles(str(file), backend="null", prompts=6, **where)
    try:
        yield roles
    finally:
        os.close(os.open(file.with_name("late"), os.O_RDWR))  # a stage that waits there continues
        roles.close()


def assert_each_names_its_rank(roles):
    for number, (_, message) in enumerate(WRONG.values(), 1):
        roles.state["mode"] = float(number)
        with pytest.raises(StageError, match=message):
            outcome(roles)
        assert stored(roles) == {"all": [0, 0]}


def test_a_failure_names_its_rank_and_leaves_nothing(wrong):
    with opened(wrong, pools="all=2@threads") as roles:
        assert_each_names_its_rank(roles)


@pytest.mark.slow
def test_a_failure_in_a_process_names_its_rank(wrong, request):
    """The last test, because it ends the run of this module: a process has one run on Ray at a time."""
    request.getfixturevalue("processes").close()
    with opened(wrong, pools="all=2", ray_address=request.getfixturevalue("ray_address")) as roles:
        assert_each_names_its_rank(roles)
        pipe = wrong.with_name("pipe")
        os.mkfifo(pipe)
        slow = Pool(
            "slow",
            roles.prepared.engine.pools["all"].actors[:1],
            roles.prepared.engine.pools["all"].transport,
        )
        slow.making = [
            slow.actors[0].make.options(concurrency_group="model").remote(timeit, SLOW.format(str(pipe)))
        ]
        assert pipe.read_text() == "loads"
        with pytest.raises(
            PlanError,
            match=r"no answer to 'the start' from rank 0 of pool 'slow' after 0\.2 s; .* is still loading\n",
        ) as late:
            wait_for_models([slow], 0.2, Controllers())
        assert re.search(r"timeit\.py:\d+ in timeit\n.*within 0\.2 s\n.*--load-timeout 0\.4", str(late.value))
