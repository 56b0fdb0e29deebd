"""What answers at a Ray's address is named before Ray's own code waits for it."""

import contextlib
import socket
import threading

import pytest

from rlflow.cluster.reach import GONE, GREETING, Listening, check_greeting, check_speaks

# an empty frame of settings, with which a server of HTTP/2 begins
SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@contextlib.contextmanager
def answering(answer):
    """A server that takes one connection, reads the greeting, sends ``answer`` and ends the connection; None:
    it says nothing. Gives HOST:PORT."""
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


def test_a_server_of_http_2_may_be_a_ray_and_its_address_is_given():
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
def test_what_answers_in_another_way_is_quoted(answer, told):
    with answering(answer) as address, pytest.raises(OSError, match=told):
        check_speaks(address, 30.0)


def test_what_says_nothing_is_left_at_the_deadline():
    with answering(None) as address, pytest.raises(OSError, match=r"sent nothing for 0\.1 s"):
        check_speaks(address, 0.1)


def test_a_port_that_nobody_listens_at_is_refused_wherever_the_address_stands(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    for address in (f"127.0.0.1:{port}", "auto"):
        with pytest.raises(ConnectionRefusedError):
            check_speaks(address, 30.0)
    monkeypatch.delenv("RAY_ADDRESS")
    assert check_speaks("auto", 30.0) == ""  # Ray itself knows where it has one


def test_an_answer_in_pieces_is_a_whole_one():
    check_greeting(SETTINGS, 1.0)
    with pytest.raises(OSError, match="it is not a Ray"):
        check_greeting(SETTINGS[:8], 1.0)


def test_a_controller_is_lost_once_it_has_taken_no_connection_for_long():
    now = [0.0]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        watched = Listening(f"127.0.0.1:{listener.getsockname()[1]}", lambda: now[0])
        for second in range(0, 200, 5):
            now[0] = float(second)
            assert watched.lost() is None
    for second in (200, 210, 220):
        now[0] = float(second)
        assert watched.lost() is None  # a controller may be started anew
    now[0] = 195 + GONE
    assert "accepted no connection for 30 s" in watched.lost()
