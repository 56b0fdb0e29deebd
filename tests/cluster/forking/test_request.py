import os
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.cluster.forking.request import REPLY, Request, receive, reply, send

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
REQUESTS = st.builds(
    Request,
    TEXT,
    st.lists(TEXT, max_size=3),
    st.lists(TEXT, max_size=3),
    st.dictionaries(TEXT, TEXT, max_size=3),
    TEXT,
)


@given(REQUESTS, st.integers(0, 3))
def test_a_request_arrives_unchanged_with_its_files(request, count):
    near, far = socket.socketpair()
    reading, writing = os.pipe()
    with near, far:
        send(near, request, [writing] * count)
        got, files = receive(far)
    assert got == request
    assert len(files) == count
    for file in files:
        os.write(file, b"x")
        assert os.read(reading, 1) == b"x"
    for file in (reading, writing, *files):
        os.close(file)


def test_a_request_larger_than_the_socket_buffer_arrives_complete():
    near, far = socket.socketpair()
    request = Request("key", ["m"], ["script"], {"LONG": "x" * 3_000_000})
    with near, far:
        thread = threading.Thread(target=send, args=(near, request, [0]))
        thread.start()
        got, files = receive(far)
        thread.join()
    for file in files:
        os.close(file)
    assert got == request


NOISE = [
    (b"", EOFError),
    (b"\0\0", EOFError),
    (b"\0\0\0\2[", EOFError),
    (b"\0\0\0\2[]", ValueError),
    (b"\0\0\0\4nope", ValueError),
    (b'\0\0\0\7{"a":1}', ValueError),
    (b"\xff\xff\xff\xff", ValueError),
]


@pytest.mark.parametrize(("noise", "error"), NOISE)
def test_anything_else_is_an_error(noise, error):
    near, far = socket.socketpair()
    with far:
        with near:
            near.sendall(noise)
        with pytest.raises(error):
            receive(far)


def test_replies_are_numbers_until_the_connection_closes():
    near, far = socket.socketpair()
    with far:
        with near:
            near.sendall(REPLY.pack(4242) + REPLY.pack(9))
        assert (reply(far), reply(far)) == (4242, 9)
        with pytest.raises(EOFError):
            reply(far)
