"""A program that answers at a Ray's address is identified before Ray's own code waits for it."""

import contextlib
import os
import signal
import socket
import threading

import pytest
from processes import until

from rlflow.cluster.reach import GONE, GREETING, Listening, check_greeting, check_joins, check_speaks
from rlflow.processes.watchdog.signals import ending_at_once

# an empty settings frame, the start of every HTTP/2 server
SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@contextlib.contextmanager
def answering(answer):
    """Start a server that takes one connection, reads the greeting, sends ``answer`` and ends the connection;
    None: sends nothing. Return HOST:PORT."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            with connection:
                got = b""
                while len(got) < len(GREETING):
                    got += connection.recv(100)
                connection.sendall(answer or b"")
                if answer is None:
                    over.wait()

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        over.set()
        thread.join()


def test_an_http_2_server_is_accepted_as_a_possible_ray():
    with answering(SETTINGS) as address:
        assert check_speaks(address, 30.0) == address


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nServer: x\r\n\r\n", "'HTTP/1.1 400 Bad Request'"),
        (b"+OK\r\n", "'\\+OK'"),
        (b"\xff\x00" * 30, "it is not a Ray"),
        (b"", "closed the connection at once"),
    ],
)
def test_another_answer_is_quoted(answer, told):
    with answering(answer) as address, pytest.raises(OSError, match=told):
        check_speaks(address, 30.0)


def test_a_silent_server_is_given_up_at_the_deadline():
    with answering(None) as address, pytest.raises(OSError, match=r"sent nothing for 0\.1 s"):
        check_speaks(address, 0.1)


def test_a_child_that_cannot_join_gives_the_error_of_ray():
    with pytest.raises(OSError, match=r"^wrong version$"):
        check_joins("there:1", 60.0, "print('wrong version\\nmore')")
    ended = "import os, sys\nprint('[now E 7 7] core.cc:9: no \\x1b raylet', file=sys.stderr, flush=True)\nos._exit(1)"
    with pytest.raises(OSError, match=r"ended the process that joined it: core\.cc:9: no \\x1b raylet"):
        check_joins("there:1", 60.0, ended)
    assert check_joins("there:1", 60.0, "import sys\nassert sys.argv[1:] == ['there:1']") is None


def test_a_child_that_hangs_is_ended_at_the_deadline_or_by_a_signal(tmp_path):
    hangs = f"import os, time\nopen(r'{tmp_path / 'pid'}', 'w').write(str(os.getpid()))\ntime.sleep(600)"
    with pytest.raises(TimeoutError), socket.create_server(("127.0.0.1", 0)) as silent:
        check_joins(f"127.0.0.1:{silent.getsockname()[1]}", 0.1)

    def interrupt():
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        os.kill(os.getpid(), signal.SIGTERM)

    # held by a name, as Python would lose a signal that arrives while the thread is freed
    interrupting = threading.Thread(target=interrupt)
    with ending_at_once():
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            check_joins("there:1", 120.0, hangs)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_closed_port_is_refused_from_every_setting(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    for address in (f"127.0.0.1:{port}", "auto"):
        with pytest.raises(ConnectionRefusedError):
            check_speaks(address, 30.0)
    monkeypatch.delenv("RAY_ADDRESS")
    assert check_speaks("auto", 30.0) == ""  # Ray itself knows the place of a running Ray


def test_an_answer_in_pieces_is_put_together():
    check_greeting(SETTINGS, 1.0)
    with pytest.raises(OSError, match="it is not a Ray"):
        check_greeting(SETTINGS[:8], 1.0)


def test_a_controller_without_connections_for_long_is_lost():
    now = [0.0]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        watched = Listening(f"127.0.0.1:{listener.getsockname()[1]}", lambda: now[0])
        for second in range(0, 200, 5):
            now[0] = float(second)
            assert watched.lost() is None
    for second in (200, 210, 220):
        now[0] = float(second)
        assert watched.lost() is None  # a controller may be restarted
    now[0] = 195 + GONE
    assert "accepted no connection for 30 s" in watched.lost()
