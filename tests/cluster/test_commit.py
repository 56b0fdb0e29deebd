"""In-memory checkpoints alone: when one is complete, which death caused an error, and how roles are
restored."""

import contextlib
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

import rlflow
from rlflow import ALL, flow, loss, stage
from rlflow.cluster.commit import Commit, Copy, Workers, chain
from rlflow.cluster.health import monitor
from rlflow.cluster.health.controllers import GCS, Controllers
from rlflow.cluster.health.heartbeat import ProcessInfo
from rlflow.cluster.health.monitor import Death, WatchedWorker
from rlflow.cluster.lean import WorkerStart
from rlflow.cluster.rpc.pool import Pool
from rlflow.cluster.rpc.thread_pool import ThreadTransport
from rlflow.cluster.run_workers import RunWorkers
from rlflow.cluster.sharding.shard_map import WorkerId
from rlflow.cluster.weights.sharded_models import RemoteModel, RemoteTrainer
from rlflow.errors import Dead, RemoteError, StageError
from rlflow.processes.process import Process


def commit(*roles, versions=(), queue=None):
    return Commit({role: Copy(f"state of {role}", Future()) for role in roles}, dict(versions), queue)


def test_a_commit_is_complete_when_all_parts_have_arrived():
    states = commit("actor", "critic")
    assert not states.complete
    assert not states.settled(0.0)
    states.states["actor"].size.set_result(10)
    assert not states.complete
    states.states["critic"].size.set_result(10)
    assert states.complete
    assert states.settled(0.0)
    failed = commit("actor")
    failed.states["actor"].size.set_exception(RemoteError("gone"))
    assert not failed.settled(60.0)
    assert commit().complete  # no role is trained


def test_a_waiter_for_a_commit_is_called_for_each_part():
    states, calls = commit("actor", "critic"), []
    states.then(lambda: calls.append(states.complete))
    states.states["critic"].size.set_result(1)
    assert calls == [False]
    states.states["actor"].size.set_exception(RemoteError("gone"))
    assert calls == [False, False]


def test_an_error_is_traced_to_its_cause():
    first, second, third = Dead("first"), ValueError("second"), KeyError("third")
    second.__cause__, second.__context__, third.__context__ = first, OSError("on the way"), second
    assert chain(third) == [third, second, first]
    assert chain(None) == []


@pytest.fixture
def workers():
    """The workers of a run without pools."""
    run_workers = RunWorkers(Path("/nowhere"), {}, {}, {}, WorkerStart(1), 0.0, 1.0, {})
    engine = SimpleNamespace(models={}, ran=list, traffic=dict)
    return Workers(run_workers, engine, ())


def died(workers, gone=True):
    """Report a death as the watch does."""
    worker = WatchedWorker(WorkerId("all", 0), None, ProcessInfo(Process.this(), "node"))
    workers.run_workers.watch.death, workers.run_workers.watch.verdict = (
        Death(worker, "has died", gone),
        "rank 0 of pool 'all' has died",
    )
    return workers.run_workers.watch.death


def test_only_errors_from_workers_are_traced_to_a_death(workers):
    death = died(workers)
    failure = StageError("judge", 1, 0, "failed")
    failure.__cause__ = Dead("gone")
    assert workers.death(failure) is death
    assert workers.death(RemoteError("ValueError: of the stage")) is death
    assert workers.death(ValueError("of this process")) is None
    assert workers.death(StageError("judge", 1, 0, "without a cause")) is None


def test_without_a_death_there_is_no_recovery(workers, monkeypatch):
    monkeypatch.setattr(monitor, "CAUSE_SECONDS", 0.01)  # all workers are gone
    assert workers.death(RemoteError("ValueError: of the stage")) is None
    died(workers, gone=False)
    assert workers.death(Dead("gone")) is None


def test_a_ray_without_a_controller_is_reported(workers):
    assert workers.lost() is None
    workers.run_workers.controllers = Controllers({GCS: (2**22 + 1, "0")})
    assert "gcs_server" in workers.lost()


class InThisProcess(Pool):
    """A pool without actors that records its calls."""

    def __init__(self, name):
        super().__init__(name, (), ThreadTransport())
        self.asked = []

    def call(self, method, *args, **keywords):
        self.asked.append((method, *args))
        done = Future()
        done.set_result([])
        return done


@stage(on="reference", dispatch=ALL, pure=False)
def renewed(reference, temperature):
    return {}


@loss
def policy_loss(new, logprobs, ref_logprobs, scores):
    return scores[:, None] * (logprobs - new.logprobs) * ref_logprobs.exp()


@flow
def renewing(prompts, actor, reference, reward):
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= reward(batch)
    batch |= actor.logprobs(batch)
    batch |= reference.logprobs(batch, gives="ref_logprobs")
    renewed(batch)
    actor.update(batch, policy_loss)


def test_a_commit_has_the_state_of_roles_passed_to_stages():
    with contextlib.closing(rlflow.roles(renewing, backend="null", pools="all=1@threads")) as roles:
        taken = roles.prepared.workers.commit(0)
        assert taken.settled(30)
        assert list(taken.states) == ["actor", "reference"]


def test_roles_are_restored_to_the_commit(workers):
    pool = InThisProcess("all")
    actor = RemoteModel("actor", RemoteTrainer("actor", pool), pool, version=7, sampled_version=7)
    reference = RemoteModel("reference", version=0)
    ran = []
    workers.engine.models |= {"actor": actor, "reference": reference}
    workers.engine.ran = lambda: ran.append(True)
    workers.ahead = SimpleNamespace(restore=lambda *queue: ran.append(queue))
    workers.restore(
        commit("actor", versions={"actor": 4, "reference": 0}, queue=({"next": 3}, {"rows": b"packed"}))
    )
    assert pool.asked == [("restore", "actor", "state of actor")]
    assert (actor.version, actor.sampled_version) == (4, -1)  # the generator must receive the weights again
    assert ran == [({"next": 3}, {"rows": b"packed"}), True]
    workers.restore(commit(versions={"actor": 5}))
    assert (actor.version, ran) == (5, [({"next": 3}, {"rows": b"packed"}), True, True])


def test_a_restarted_pool_keeps_look_ahead_rows(workers, monkeypatch):
    order, death = [], died(workers)

    def restart(pool):
        order.append(pool)
        return [pool]

    monkeypatch.setattr(workers.run_workers, "restart", restart)
    workers.ahead = SimpleNamespace(drop=lambda: order.append("drop"))
    assert workers.restart(death) == ["all"]
    assert order == ["drop", "all"]
