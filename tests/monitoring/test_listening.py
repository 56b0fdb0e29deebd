"""The listening sockets of a process, with address, port and reach."""

import os
import socket
import subprocess
import sys

import pytest

from rlflow.monitoring.doctor import addresses, listening, processes, unmapped

SERVER = (
    "import socket, sys\ns = socket.create_server((sys.argv[2], 0))\nprint(s.getsockname()[1], "
    "flush=True)\nsys.stdin.read()"
)


@pytest.mark.parametrize(
    ("text", "address"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::ffff:127.0.0.1", "127.0.0.1")]
)
def test_an_ipv4_address_in_ipv6_form_is_read_as_ipv4(text, address):
    assert str(unmapped(text)) == address


@pytest.mark.parametrize(
    ("host", "reach"), [("127.0.0.1", "this machine only"), ("0.0.0.0", "open to the network")]
)
def test_an_own_listening_process_is_shown_with_its_reach(host, reach):
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, "rlflow", host], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        port = int(process.stdout.readline())
        assert [(str(address), number) for address, number in addresses(process.pid)] == [(host, port)]
        assert any(line.startswith(f"{host}:{port}  {reach}  pid {process.pid}  ") for line in listening())
        process.communicate(b"")
    assert addresses(process.pid) == []


def test_children_are_included_and_the_caller_is_not():
    child = "import os; print(os.getpid(), flush=True); input()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", parent, "rlflow"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        ours = dict(processes()) if (pid := int(process.stdout.readline())) else {}
        assert {process.pid, pid} <= set(ours)
        process.communicate(b"\n")
    assert os.getpid() not in ours


def test_a_socket_that_only_connects_is_not_shown():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        ports = [port for _, port in addresses(os.getpid())]
        assert server.getsockname()[1] in ports
        assert client.getsockname()[1] not in ports
