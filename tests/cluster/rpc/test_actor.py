"""The host around an object: the calls it refuses, the errors it passes on, and the state it shows during a
call."""

import os

import pytest
import torch

from rlflow.author.batch import Batch
from rlflow.cluster.health.heartbeat import MARKS
from rlflow.cluster.rpc.actor import RayHost
from rlflow.cluster.rpc.host import GENERATION_BYTES
from rlflow.errors import RemoteError
from rlflow.execution.wire.row_bytes import opened, packed
from rlflow.processes.user_frames import RaisedElsewhere
from rlflow.processes.watchdog.beside import Watchdog


class Counter:
    """The object of a host; it records its calls."""

    def __init__(self, start):
        if start < 0:
            raise SystemExit(3)
        self.count = start

    def add(self, number):
        self.count += number
        return self.count

    def marks(self):
        return MARKS.now()

    def leave(self):
        raise SystemExit(4)

    def fail(self):
        raise KeyError("missing")

    def run(self, frame, *transfers):
        return bytes(frame), transfers

    def run_chunks(self, frame, *transfers):
        yield bytes(frame)
        yield from transfers

    def doubled(self, batch):
        return batch.rows(torch.arange(len(batch)).repeat(2))

    def forked(self):
        """Fork a child that leaves the call with an exception of its own; return its exit status."""
        child = os.fork()
        if not child:
            raise ValueError("in the child")
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def host():
    host = RayHost.__ray_actor_class__()
    host.instance, host.watchdog = Counter(5), Watchdog()
    return host


def with_generation(generation, frame):
    return generation.to_bytes(GENERATION_BYTES, "little") + frame


def test_the_running_method_is_shown_by_name(host):
    assert host.do(0, "add", 2) == 7
    [(what, seconds)] = host.do(0, "marks")
    assert what == "marks"
    assert 0 <= seconds < 60
    assert host.beat() == ()


def test_frames_reach_the_object_without_the_generation_number(host):
    assert host.do_run(with_generation(0, b"frame"), "transfer") == (b"frame", ("transfer",))
    assert list(host.do_chunks(with_generation(0, b"frame"), "transfer")) == [b"frame", "transfer"]
    assert host.do_run(with_generation(0, b"")) == (b"", ())


@pytest.mark.parametrize(
    "ask",
    [
        lambda host, generation: host.do(generation, "add", 1),
        lambda host, generation: host.do_run(with_generation(generation, b"")),
        lambda host, generation: list(host.do_chunks(with_generation(generation, b""))),
    ],
    ids=["do", "run", "chunks"],
)
def test_a_call_of_another_generation_is_refused(host, ask):
    host.enter(513)  # more than one byte of the number counts
    for generation in (0, 1, 512, 514):
        with pytest.raises(
            (RuntimeError, RaisedElsewhere),
            match=rf"was called in generation {generation} of the pool, which is now in generation 513",
        ):
            ask(host, generation)
    assert host.instance.count == 5
    ask(host, 513)


def test_a_call_that_would_exit_raises_an_error_with_the_line(host):
    with pytest.raises(RemoteError, match=r"^SystemExit: 4 \(raised by .*a stage must not end the process"):
        host.do(0, "leave")
    with pytest.raises(RaisedElsewhere, match="KeyError: 'missing'"):
        host.do(0, "fail")
    assert host.do(0, "add", 1) == 6


def test_a_child_that_leaves_a_call_ends_there(host):
    assert host.do(0, "forked") == 1


def test_rows_travel_as_bytes_that_the_batch_uses_directly(host):
    found = opened(host.do_batch("doubled", packed(Batch.of(scores=torch.tensor([1.5, -2.0]))), False))
    assert found["scores"].tolist() == [1.5, -2.0, 1.5, -2.0]
