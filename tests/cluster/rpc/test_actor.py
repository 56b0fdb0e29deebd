"""The host around an object: whose calls it refuses, what it lets out of a call, and what others see
meanwhile."""

import os

import pytest
import torch

from rlflow.author.batch import Batch
from rlflow.cluster.health.heartbeat import MARKS
from rlflow.cluster.rpc.actor import RayHost
from rlflow.cluster.rpc.host import GENERATION_BYTES
from rlflow.cluster.rpc.row_messages import opened, packed
from rlflow.errors import RemoteError
from rlflow.processes.user_frames import RaisedElsewhere
from rlflow.processes.watchdog.beside import Watchdog


class Counter:
    """What a host holds: it says what it was asked."""

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
        """A child that comes out of the call with an exception of its own; what its parent sees of it."""
        child = os.fork()
        if not child:
            raise ValueError("in the child")
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def host():
    host = RayHost.__ray_actor_class__()
    host.instance, host.watchdog = Counter(5), Watchdog()
    return host


def told(generation, frame):
    return generation.to_bytes(GENERATION_BYTES, "little") + frame


def test_a_method_is_called_by_its_name_and_named_while_it_runs(host):
    assert host.do(0, "add", 2) == 7
    [(what, seconds)] = host.do(0, "marks")
    assert what == "marks"
    assert 0 <= seconds < 60
    assert host.beat() == ()


def test_frames_and_transfers_reach_the_object_without_the_era(host):
    assert host.do_run(told(0, b"frame"), "transfer") == (b"frame", ("transfer",))
    assert list(host.do_chunks(told(0, b"frame"), "transfer")) == [b"frame", "transfer"]
    assert host.do_run(told(0, b"")) == (b"", ())


@pytest.mark.parametrize(
    "ask",
    [
        lambda host, generation: host.do(generation, "add", 1),
        lambda host, generation: host.do_run(told(generation, b"")),
        lambda host, generation: list(host.do_chunks(told(generation, b""))),
    ],
    ids=["do", "run", "chunks"],
)
def test_what_was_asked_in_another_era_is_refused_and_does_nothing(host, ask):
    host.enter(513)  # more than a byte of it counts
    for generation in (0, 1, 512, 514):
        with pytest.raises(
            (RuntimeError, RaisedElsewhere),
            match=rf"was called in generation {generation} of the pool, which is now in generation 513",
        ):
            ask(host, generation)
    assert host.instance.count == 5
    ask(host, 513)


def test_a_call_that_would_end_the_process_is_an_error_that_names_the_line_and_others_pass(host):
    with pytest.raises(RemoteError, match=r"^SystemExit: 4 \(raised by .*a stage must not end the process"):
        host.do(0, "leave")
    with pytest.raises(RaisedElsewhere, match="KeyError: 'missing'"):
        host.do(0, "fail")
    assert host.do(0, "add", 1) == 6


def test_a_child_that_comes_out_of_a_call_ends_there(host):
    assert host.do(0, "forked") == 1


def test_rows_go_in_and_come_out_as_bytes_on_which_the_batch_lies(host):
    found = opened(host.do_batch("doubled", packed(Batch.of(scores=torch.tensor([1.5, -2.0]))), False))
    assert found["scores"].tolist() == [1.5, -2.0, 1.5, -2.0]
