"""Threads as ranks: they share only bytes with their caller, and calls begin, wait, fail and end like calls
of processes."""

import os
import threading

import numpy as np
import pytest
import torch
from members import pool_of

from rlflow.cluster.rpc import thread_pool
from rlflow.cluster.rpc.message import Answer
from rlflow.cluster.rpc.rank_transport import GROUPS, CallFailed
from rlflow.cluster.rpc.streams import Streams
from rlflow.errors import FlowError, Late, PlanError, RemoteError, SkipIteration, Stopped
from rlflow.processes.user_frames import RaisedElsewhere
from rlflow.processes.watchdog.beside import Watchdog


class Rank:
    """The object of a rank."""

    def __init__(self):
        self.kept, self.begun, self.go = None, [], threading.Event()

    def keep(self, tensor):
        self.kept = tensor
        return tensor

    def write(self):
        self.kept.fill_(-1.0)

    def shown(self):
        return self.kept.tolist()

    def add(self, one, other):
        return one + other

    def both(self):
        return torch.zeros(2), "second"

    def numbered(self, number):
        self.begun.append(number)
        return number

    def wait(self):
        self.begun.append("waiting")
        self.go.wait(60)
        return "went"

    def open(self):
        self.go.set()

    def fail(self, kind, *given):
        raise kind(*given)

    def run_chunks(self, frame, *row_messages):
        for number in range(3):
            if bytes(frame) == b"fails" and number == 2:
                raise LookupError("no third")
            yield Answer(number, value=len(row_messages)).packed()

    def leave(self, status):
        os._exit(status)

    def fork(self):
        if (pid := os.fork()) == 0:
            return "child"
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def pool():
    with pool_of(Rank(), Rank()) as made:
        yield made


def values(pool, *refs):
    return pool.transport.values(refs, 60.0)


@pytest.mark.parametrize("tensor", [torch.ones(4), torch.ones(1 << 16)], ids=["small", "large"])
def test_writes_into_an_argument_stay_on_their_side(pool, tensor):
    sent = tensor.clone()
    ref = pool.send(0, "keep", sent)
    values(pool, ref)
    values(pool, pool.send(0, "write"))
    assert torch.equal(sent, tensor)
    values(pool, pool.send(1, "keep", sent))
    sent.fill_(5.0)
    assert values(pool, pool.send(1, "shown")) == [tensor.tolist()]


def test_an_argument_has_its_value_from_the_time_of_the_call(pool):
    with pool_of(Rank()) as slow:
        waiting = slow.send(0, "wait", group="model")
        sent = torch.ones(3)
        ref = slow.send(0, "keep", sent, group="model")  # this one begins when the other has ended
        sent.fill_(7.0)
        slow.send(0, "open", group="control")
        assert values(slow, waiting, ref)[1].tolist() == [1.0] * 3


def test_writes_into_an_answer_stay_on_their_side(pool):
    [answer] = values(pool, pool.send(0, "keep", torch.ones(4)))
    answer.fill_(5.0)
    assert values(pool, pool.send(0, "shown")) == [[1.0] * 4]
    ref = pool.send(0, "keep", torch.ones(4))
    values(pool, ref)
    values(pool, pool.send(0, "write"))
    assert values(pool, ref)[0].tolist() == [1.0] * 4


def test_each_reader_of_an_answer_has_its_own_copy(pool):
    ref = pool.send(0, "keep", torch.ones(4))
    one, other = values(pool, ref, ref)
    one.fill_(5.0)
    assert other.tolist() == values(pool, ref)[0].tolist() == [1.0] * 4


def test_bytes_and_arrays_keep_their_types(pool):
    raw, array = values(
        pool, pool.send(0, "keep", b"\0raw"), pool.send(1, "keep", np.arange(3, dtype=np.uint8))
    )
    assert raw == b"\0raw"
    assert (array.dtype, array.tolist()) == (np.uint8, [0, 1, 2])


def test_references_among_arguments_arrive_as_values(pool):
    waiting = pool.send(0, "wait")
    joined = pool.send(1, "add", waiting, pool.transport.keep("!"))
    assert pool.transport.ready([joined], 0.0) == []
    pool.send(0, "open")
    assert values(pool, joined) == ["went!"]


def test_a_stored_value_does_not_change(pool):
    tensor = torch.ones(2)
    kept = pool.transport.keep(tensor)
    tensor.fill_(9.0)
    assert values(pool, pool.send(0, "keep", kept), pool.send(1, "keep", kept), kept)[1].tolist() == [
        1.0,
        1.0,
    ]


def test_a_call_raises_the_error_of_its_reference(pool):
    failed = pool.send(0, "fail", LookupError, "not here")
    after = pool.send(1, "keep", failed)
    with pytest.raises(CallFailed):
        values(pool, after)
    assert str(pool.transport.error(after)) == "LookupError: not here"
    assert pool.actors[1].host.instance.kept is None


def test_each_answer_of_a_call_has_a_reference(pool):
    zeros, second = pool.send(0, "both", answers=2)
    assert values(pool, second) == ["second"]
    assert values(pool, zeros)[0].tolist() == [0.0, 0.0]
    for ref in pool.send(0, "fail", LookupError, "not here", answers=2):
        with pytest.raises(CallFailed):
            values(pool, ref)
        assert str(pool.transport.error(ref)) == "LookupError: not here"


def test_a_stream_yields_answers_and_errors_as_they_come(pool):
    row_messages = [pool.transport.keep(torch.ones(2))]
    streams = Streams(
        pool,
        "generate",
        {rank: pool.run_chunks(rank, b"works", row_messages, "model") for rank in range(2)},
        60.0,
        dict,
    )
    for number in range(3):
        assert {rank: (answer.key, answer.value) for rank, answer in streams.next().items()} == dict.fromkeys(
            range(2), (number, 1)
        )
    failing = Streams(pool, "generate", {0: pool.run_chunks(0, b"fails", (), "model")}, 60.0, dict)
    assert [failing.next()[0].key for _ in range(2)] == [0, 1]
    with pytest.raises(RemoteError, match=r"LookupError: no third \(rank 0 of pool 'all'\)"):
        failing.next()


PROBLEM = PlanError.of("x", "it cannot be").problems


AS_THEY_ARE = [
    SkipIteration("no rows"),
    Stopped("asked"),
    RemoteError("elsewhere"),
    PlanError(*PROBLEM),
    FlowError(*PROBLEM),
]


@pytest.mark.parametrize("error", AS_THEY_ARE, ids=lambda error: type(error).__name__)
def test_errors_with_a_place_arrive_unchanged(pool, error):
    kind, given = type(error), PROBLEM if isinstance(error, PlanError | FlowError) else error.args
    with pytest.raises(kind) as raised:
        pool.call("fail", kind, *given).result()
    assert type(raised.value) is kind
    assert raised.value.args == error.args


class Own(Exception):
    """An exception that cannot be rebuilt from its arguments."""

    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


@pytest.mark.parametrize(
    ("kind", "given", "text"),
    [
        (LookupError, ("not here",), "LookupError: not here"),
        (Own, (1, 2), "Own: 1 and 2"),
        (SystemExit, (3,), r"SystemExit: 3 \(raised by .*test_thread_pool\.py:\d+\)"),
        (KeyboardInterrupt, (), "KeyboardInterrupt"),
    ],
)
def test_other_errors_name_the_rank_and_the_lines_of_the_user(pool, kind, given, text):
    with pytest.raises(RemoteError, match=text) as raised:
        pool.future("fail", [(1, pool.send(1, "fail", kind, *given))], 60.0, list).result()
    if issubclass(kind, Exception):
        assert str(raised.value).endswith("(rank 1 of pool 'all')")
        assert "raise kind(*given)" in raised.value.lines[0]
        assert "in a worker:" in raised.value.__notes__[0]


def test_a_late_rank_is_named_and_still_answers(pool):
    there, ref = pool.send(0, "numbered", 1), pool.send(1, "wait")
    values(pool, there)
    with pytest.raises(Late, match="no answer to 'wait' from rank 1 of pool 'all' after 0 s"):
        pool.future("wait", [(0, there), (1, ref)], 0.0, list).result()
    pool.send(1, "open")
    assert values(pool, ref) == ["went"]


def test_a_new_generation_refuses_calls_of_the_previous_one(pool):
    begun, waiting = pool.send(0, "wait", group="model"), pool.send(0, "numbered", 1, group="model")
    entered = pool.enter(1)
    pool.actors[0].host.instance.go.set()
    assert values(pool, *entered) == [None, None]
    assert values(pool, begun, waiting) == ["went", 1]
    pool.generation = 0
    with pytest.raises(
        RemoteError, match="'numbered' was called in generation 0 of the pool, which is now in generation 1"
    ):
        pool.call("numbered", 2).result()
    pool.generation = 1
    assert pool.call("numbered", 3).result() == [3, 3]
    assert pool.actors[0].host.instance.begun == ["waiting", 1, 3]


def test_model_calls_run_in_order_and_other_groups_concurrently(
    pool,
):
    first = pool.send(0, "wait", group="model")
    refs = [pool.send(0, "numbered", number, group="model") for number in range(50)]
    assert values(pool, pool.send(0, "numbered", "cpu", group="cpu")) == ["cpu"]
    assert pool.transport.ready([first, *refs], 0.0) == []
    pool.send(0, "open", group="control")
    assert values(pool, *refs) == list(range(50))
    begun = pool.actors[0].host.instance.begun
    assert [item for item in begun if item not in ("waiting", "cpu")] == list(range(50))


def test_the_first_of_several_answers_is_enough_on_request(pool):
    waiting, there = pool.send(0, "wait"), pool.send(1, "numbered", 1)
    assert pool.transport.ready([waiting, there], 60.0, first=True) == [there]
    future = pool.transport.future(waiting)
    assert not future.done()
    pool.send(0, "open")
    assert future.result(60) == "went"
    with pytest.raises(RaisedElsewhere, match="LookupError: "):
        pool.transport.future(pool.send(0, "fail", LookupError)).result(60)


def test_an_exit_of_a_rank_is_an_error(pool):
    watchdog_process = Watchdog.start()
    try:
        with pytest.raises(RemoteError, match=r"ProcessExit: os\._exit\(3\)"):
            pool.call("leave", 3).result()
        assert pool.call("fork").result() == [0, 0]
    finally:
        watchdog_process.close()


def test_threads_end_with_their_pool():
    before = set(threading.enumerate())
    with pool_of(Rank(), Rank()) as pool:
        ours = set(threading.enumerate()) - before
        assert len(ours) == 2 * sum(GROUPS.values())
        pool.call("numbered", 1).result()
    assert not any(thread.is_alive() for thread in ours)


def test_a_hanging_rank_does_not_block_other_ranks():
    before, stuck = set(threading.enumerate()), Rank()
    with pool_of(stuck, Rank(), Rank()) as pool:
        ours, hanging = set(threading.enumerate()) - before, pool.send(0, "wait", group="model")
        assert pool.call("numbered", 1).result() == [1, 1, 1]
        assert not thread_pool.close(pool, seconds=0.0)
        for thread in ours - {pool.actors[0].queues._threads[0]}:
            thread.join(60)
        assert [thread.name for thread in ours if thread.is_alive()] == ["model"]
        stuck.go.set()
        assert values(pool, hanging) == ["went"]
        assert thread_pool.close(pool)
