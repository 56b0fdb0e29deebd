"""A job on real Ray: its rows, deadlines, deaths and ends, and the errors before anything starts."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from started import marked, until

from rlflow import Batch, FlowError, PlanError
from rlflow.cluster import Job, gather, here, wait
from rlflow.errors import Dead, Late, RemoteError
from rlflow.processes.watchdog import process_tag


class Policy:
    """A user's class that knows its place, computes, waits, and dies on request."""

    def __init__(self, offset=0):
        self.offset = offset

    def place(self):
        at = here()
        return (
            at.role,
            at.rank,
            at.ranks,
            at.local_rank,
            at.local_ranks,
            at.node,
            os.environ.get("A"),
            os.environ.get("B"),
        )

    def add(self, batch: Batch, plus: int, *, times: int = 1) -> Batch:
        import torch.distributed as dist

        values = [(value + plus + self.offset) * times for value in batch["x"].tolist()]
        if dist.is_initialized():
            dist.barrier()  # all ranks are here, also those without rows
        return Batch(batch.axis, batch.data | Batch.of(x=values).data) if values else batch

    def summed(self, value: int) -> int:
        import torch
        import torch.distributed as dist

        total = torch.tensor([value + here().rank])
        dist.all_reduce(total)
        return int(total)

    def waits(self, seconds: float) -> str:
        time.sleep(seconds)  # like a call that takes long
        return f"{here().role} {here().rank}"

    def dies(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def fails(self) -> None:
        raise LookupError("no such file")

    def pid(self) -> int:
        return os.getpid()


class Critic(Policy):
    def waits(self, seconds: float) -> str:
        return super().waits(seconds)


class Broken:
    def __init__(self):
        raise MemoryError("too large")


def declared(address=None):
    job = Job("mine", env={"A": "1"}, address=address)
    actor = job.role("actor", Policy, ranks=4, distributed=True, cpus=0.5)
    critic = job.role(
        "critic", Critic, ranks=4, per_node=4, cpus=0.5, env={"B": "2"}, arguments={"offset": 100}
    )
    job.collocate(actor, critic)
    return job, actor, critic


def test_a_job_can_be_described_before_it_starts():
    job, actor, critic = declared()
    assert str(job).splitlines() == [
        "job 'mine': 8 ranks of 2 roles",
        "  actor: 4 ranks of Policy, each with 0.5 CPU, in torch's group, with A set",
        "  critic: 4 ranks of Critic, each with 0.5 CPU, with A, B set",
        "  actor and critic share: rank k of each is placed in a bundle of 1 CPU",
        "  nodes: 1, with 4 of actor and critic on each",
        "  in all 4 CPUs, on this machine",
    ]
    assert (repr(actor), len(critic)) == ("Group(actor: 4 ranks of Policy)", 4)


@pytest.mark.parametrize(
    ("misuse", "told"),
    [
        (lambda job, actor: actor.call(Policy.pid), "job 'mine' is not running"),
        (lambda job, actor: job.role("actor", Policy), "'actor' cannot name a new role"),
        (
            lambda job, actor: job.role("other", Policy, arguments={"ofset": 1}),
            "unexpected keyword argument 'ofset'",
        ),
        (lambda job, actor: job.role("other", "Policy"), "role 'other' needs a class"),
        (lambda job, actor: job.role("other", Policy, ranks=0), "role 'other' needs ranks"),
        (
            lambda job, actor: job.role("other", Policy, env={"A": 1}),
            "an environment variable is not a string",
        ),
        (lambda job, actor: job.collocate(actor), "these roles cannot be collocated"),
        (
            lambda job, actor: job.collocate(actor, Job("second").role("critic", Policy)),
            "these roles cannot be collocated",
        ),
        (lambda job, actor: Job("empty").__enter__(), "job 'empty' cannot start"),
    ],
)
def test_misuse_is_an_error_at_its_line(misuse, told):
    job = Job("mine")
    actor = job.role("actor", Policy)
    with pytest.raises(FlowError, match=told) as refused:
        misuse(job, actor)
    assert "test_job.py" in str(refused.value).partition("\n")[0]


@pytest.mark.parametrize(
    ("needs", "told"),
    [({"ranks": 2, "gpus": 1000}, "2000 GPUs"), ({"ranks": 2, "per_node": 1}, "1 on a node")],
)
def test_a_job_that_cannot_fit_is_refused_before_it_starts(needs, told):
    import ray

    job = Job("large")
    job.role("actor", Policy, **needs)
    with pytest.raises(PlanError, match=told), job:
        raise AssertionError("it has started")
    assert not ray.is_initialized()


@pytest.fixture
def two_nodes():
    """Return the address of a Ray with two nodes of one processor each; both nodes are processes of this
    machine."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": 128 << 20},
    )
    cluster.add_node(num_cpus=1, object_store_memory=128 << 20)
    yield cluster.address
    cluster.shutdown()


@pytest.mark.slow
def test_per_node_places_ranks_and_they_compute_together(two_nodes):
    """Three ranks, of which one node could hold four, next to roles that share their bundles, and a role that
    fits nowhere."""
    job = Job("apart", address=two_nodes)
    actor = job.role("actor", Policy, ranks=3, per_node=2, cpus=0.25, distributed=True)
    critic = job.role("critic", Critic, ranks=3, cpus=0.125)
    job.collocate(actor, critic)
    with job:
        places = [role.call(kind.place).result() for role, kind in ((actor, Policy), (critic, Critic))]
        for name, found in zip(("actor", "critic"), places, strict=True):
            assert [place[:6] for place in found] == [
                (name, 0, 3, 0, 2, 0),
                (name, 1, 3, 1, 2, 0),
                (name, 2, 3, 0, 1, 1),
            ]
        assert actor.call(Policy.summed, 1).result() == [6] * 3  # over torch's group, from node to node
        for rows in (1, 2, 5):
            assert actor.call_batch(Policy.add, Batch.of(x=list(range(rows))), 1).result()[
                "x"
            ].tolist() == list(range(1, rows + 1))
    crowded = Job("crowded", address=two_nodes)
    # the nodes have enough together, but not one alone
    crowded.role("actor", Policy, ranks=2, per_node=2, cpus=0.75)
    with pytest.raises(PlanError, match="2 on a node"), crowded:
        raise AssertionError("it has started")


@pytest.mark.slow
def test_a_job_runs_on_a_real_ray(ray_address):
    job, actor, critic = declared(ray_address)
    lonely = job.role("lonely", Policy, distributed=True)  # a group of one
    with job:
        (started,) = gather(actor.call(Policy.pid), seconds=60)
        places = actor.call(Policy.place).result() + critic.call(Critic.place).result()
        assert places == [
            (role, rank, 4, rank, 4, 0, "1", {"actor": None, "critic": "2"}[role])
            for role in ("actor", "critic")
            for rank in range(4)
        ]
        assert actor.call(Policy.summed, 1).result() == [10] * 4  # over torch's group
        assert lonely.call(Policy.summed, 1).result() == [1]
        for rows in range(10):  # over 4 ranks in a group, 4 alone, and 1
            batch = Batch.of(x=list(range(rows))) if rows else Batch.of(x=[0]).rows([])
            both = gather(
                actor.call_batch(Policy.add, batch, 1),
                critic.call_batch(Critic.add, batch, 1, times=2),
                lonely.call_batch(Policy.add, batch, 1),
                seconds=60,
            )
            assert [each["x"].tolist() for each in both] == [
                [x + 1 for x in range(rows)],
                [2 * (x + 101) for x in range(rows)],
                [x + 1 for x in range(rows)],
            ]
        with pytest.raises(RemoteError, match=r"LookupError: no such file \(rank 0 of pool 'actor'\)"):
            actor.call_rank0(Policy.fails).result()

        quick, slow = (
            lonely.call(Policy.waits, 0.0),
            critic.options(seconds=5).call_each(Critic.waits, [0.0, 60.0, 0.0, 60.0]),
        )
        assert wait([slow, quick], seconds=60, count=1) == ([quick], [slow])
        with pytest.raises(
            Late,
            match=r"no answer to 'waits' from rank 1 of pool 'critic', rank 3 of pool 'critic' after 5 s"
            r"; rank 1 .*at its last heartbeat it ran (waits|nothing)",
        ):
            slow.result()
        actor.call_rank0(Policy.dies)
        with pytest.raises(Dead, match=r"rank 0 of pool 'actor' \(pid \d+ on .*\) has died"):
            lonely.options(seconds=60).call(Policy.waits, 60.0).result()
    assert not any(alive(pid) for pid in started)
    with pytest.raises(FlowError, match="job 'mine' is not running"):
        actor.call(Policy.pid)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_a_failing_constructor_is_named_and_a_killed_driver_leaves_nothing(tmp_path):
    job = Job("broken")
    job.role("actor", Broken)
    with pytest.raises(PlanError, match=r"MemoryError: too large \(rank 0 of pool 'actor'\)"), job:
        raise AssertionError("it has started")

    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import time
        from rlflow.cluster import Job

        class Policy:
            def name(self):
                return "policy"

        if __name__ == "__main__":
            job = Job("killed", env={"JOB_MARK": "s-mark-of-this-test"})
            actor = job.role("actor", Policy, ranks=2)
            with job:
                print(actor.call(Policy.name, seconds=60).result(), flush=True)
                time.sleep(600)
    """)
    )
    # an environment where titles of Ray's agents overwrite marks
    more = {f"FILL{number}": "x" * 10 for number in range(8)}
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **more, "DRIVER_MARK": str(tmp_path)},
    )
    try:
        assert process.stdout.readline() == "['policy', 'policy']\n"
        processes = process_tag.descendants(process.pid)
        assert len(processes) > 3  # processes of Ray and of the ranks
    finally:
        process.kill()
        process.communicate()
    assert until(lambda: not process_tag.still(processes) and not marked(str(tmp_path).encode()), 240.0), (
        marked(str(tmp_path).encode())
    )
