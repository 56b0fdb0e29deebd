"""Frames and answers over real sockets; the worker's end runs in threads of this process."""

import multiprocessing
import socket
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import pytest

from rlflow.cluster.rpc.pool import Future, Pool, SocketFuture, WorkerId
from rlflow.cluster.rpc.rank_transport import Gone
from rlflow.cluster.rpc.sockets import CONNECTIONS, LARGEST, PendingCalls, Sockets, listen
from rlflow.cluster.rpc.thread_pool import ThreadTransport
from rlflow.errors import Dead, Late, RemoteError

KEY = b"of this run"


class Odd(Exception):
    """An exception that cannot be transferred: its constructor takes two arguments, unpickling passes one."""

    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


def answer(told):
    if told == b"wait":
        HELD.wait(60)
    if told.startswith(b"raise"):
        raise Odd("this", "that") if told == b"raise odd" else LookupError("of this rank")
    return {"told": told} if told == b"object" else told[::-1]


HELD = threading.Event()


@pytest.fixture
def lines():
    made = Sockets([listen(KEY, answer), listen(KEY, answer)], KEY)
    assert made.settled(60)
    HELD.clear()
    yield made
    HELD.set()
    made.close()


def answers_of(lines, frames, seconds=60.0, answered=()):
    """Return the answers of ranks to frames. The answers of ``answered`` are there before the time starts."""
    taken = lines.take(frames)
    talk = PendingCalls(lines, taken)
    for rank, frame in frames.items():
        talk.send(rank, frame)
    assert all(taken[rank].poll(60) for rank in answered)
    return SocketFuture(
        ThreadTransport(), "it", [WorkerId("all", rank) for rank in frames], talk, seconds, list, None
    )


def free(lines):
    """Return how many lines to each rank are free."""
    found = [0, 0]
    for rank in (0, 1):
        taken = []
        while (line := lines.take([rank])) is not None:
            taken.append(line[rank])
        found[rank] = len(taken)
        for line in taken:
            lines.give(rank, line)
    return found


def test_answers_come_in_rank_order(lines):
    assert answers_of(lines, {1: b"one", 0: b"zero"}).result() == [b"eno", b"orez"]
    assert answers_of(lines, {0: b"object"}).result() == [{"told": b"object"}]
    assert answers_of(lines, {0: b"x" * (LARGEST - 1)}).result() == [b"x" * (LARGEST - 1)]
    assert free(lines) == [CONNECTIONS, CONNECTIONS]


def test_a_raising_rank_is_named_and_its_line_stays_usable(lines):
    with pytest.raises(
        RemoteError, match=r"^LookupError: of this rank \(rank 1 of pool 'all'\)\nin a worker:"
    ):
        answers_of(lines, {1: b"raise"}).result()
    with pytest.raises(RemoteError, match=r"^Odd: this and that \(rank 0 of pool 'all'\)\nin a worker:"):
        answers_of(lines, {0: b"raise odd"}).result()
    assert free(lines) == [CONNECTIONS, CONNECTIONS]


def test_an_error_ends_the_wait_and_a_late_rank_is_named(lines):
    with pytest.raises(RemoteError, match="rank 1"):
        answers_of(lines, {0: b"wait", 1: b"raise"}).result()
    with pytest.raises(Late, match=r"^no answer to 'it' from rank 0 of pool 'all' after 0.3 s$"):
        answers_of(lines, {0: b"wait", 1: b"y"}, seconds=0.3, answered=[1]).result()
    assert free(lines) == [CONNECTIONS - 2, CONNECTIONS]  # an answer may still arrive there
    assert lines.take([0, 1]) is None


def test_calls_run_concurrently_as_long_as_lines_are_free(lines):
    waits = answers_of(lines, {0: b"wait"})
    assert answers_of(lines, {0: b"x"}).result() == [b"x"]
    assert not waits.done()
    HELD.set()
    assert waits.result() == [b"tiaw"]


def test_a_worker_that_closes_its_line_is_dead():
    """A killed process does the same: the kernel closes its end."""
    there, theirs = multiprocessing.Pipe()
    lines = Sockets(["", ""], KEY)
    lines.give(1, there)
    heard = answers_of(lines, {1: b"x"})
    theirs.close()
    with pytest.raises(
        Dead, match=r"^rank 1 of pool 'all' was lost while 'it' ran there: the worker closed the connection$"
    ):
        heard.result()
    assert lines.take([1]) is None
    gone = PendingCalls(lines, {1: there})
    gone.send(1, b"x")
    assert isinstance(gone.error(1), Gone)


def test_a_connection_without_the_key_gets_no_line():
    name = listen(KEY, answer)
    with pytest.raises(AuthenticationError):
        Client(name, "AF_UNIX", authkey=b"of another run")
    lines = Sockets([name], KEY)
    assert lines.settled(60)
    assert answers_of(lines, {0: b"x"}).result() == [b"x"]


def test_a_worker_that_does_not_listen_or_answer_has_no_line():
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind("\0rlflow-silent")
        silent.listen()
        lines = Sockets(["\0rlflow-nobody", "", "\0rlflow-silent"], KEY)
        assert not lines.settled(0.2)  # it continues next to the work of the run
        assert [lines.take([rank]) for rank in range(3)] == [None] * 3


def test_a_pool_without_lines_sends_nothing_by_socket():
    pool = Pool("all", [object()], ThreadTransport())
    assert pool.short_call("run", {0: b"x"}, 1.0) is None
    assert isinstance(pool.future("x", [], 1.0, list), Future)


def test_a_too_long_frame_is_not_sent_by_socket(lines):
    pool = Pool("all", [object(), object()], ThreadTransport())
    pool.sockets = lines
    assert pool.short_call("run", {0: b"", 1: b"x" * LARGEST}, 1.0) is None
    # after the generation number
    assert pool.short_call("run", {0: b"ab", 1: b""}, 60.0).result() == [b"ba" + bytes(8), bytes(8)]
