"""Code runs in real processes in a real sandbox; requests have SandboxFusion's form."""

import base64
import json
import os
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import until
from served import asking

import rlflow
from rlflow.processes.sandbox import probe
from rlflow.processes.watchdog import process_tag
from rlflow.services.serving.code import Code, Folder, run_request, runner

needs_sandbox = pytest.mark.skipif(bool(probe.missing("code")), reason="this machine has not all walls")


@needs_sandbox
def test_code_reads_its_input_and_files_and_its_streams_come_back():
    files = {"data/numbers.txt": base64.b64encode(b"1 2").decode()}
    with asking(runner(2)) as client:
        health = client.get("/health")[1]
        status, answer = client.post(
            "/run_code",
            {
                "code": "import sys\nprint(input(), open('data/numbers.txt').read())\nsys.exit(3)",
                "language": "python",
                "stdin": "said",
                "files": files,
            },
        )
    assert set(health["isolation"].values()) == {True}
    assert (status, answer["status"]) == (200, "Failed")
    result = answer["run_result"]
    assert (result["status"], result["return_code"], result["stdout"], result["stderr"]) == (
        "Finished",
        3,
        "said 1 2\n",
        "",
    )
    assert run_request(Code(code="print(1)"))["status"] == "Success"


ATTEMPTS = """
import ctypes, json, mmap, os, socket, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
def called(name, *arguments):
    if getattr(libc, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), name)
def allocated(flags):
    return lambda: mmap.mmap(-1, 1 << 20, flags=flags | mmap.MAP_ANONYMOUS)
refused = {}
for name, attempt in {
    "socket": socket.socket, "fork": os.fork, "exec": lambda: os.execv("/bin/true", ["true"]), "signal": lambda: os.kill(PARENT, 0),
    "write": lambda: open("made", "w"), "write elsewhere": lambda: open("../made", "w"), "folder": lambda: os.mkdir("made"),
    "outlive": lambda: called("prctl", 1, 0), "hide": lambda: called("prctl", 4, 0), "SysV memory": lambda: called("shmget", 7, 9, 0o1600),
    "SysV queue": lambda: called("msgget", 7, 0o1600), "SysV semaphore": lambda: called("semget", 7, 1, 0o1600),
    "memory file": lambda: os.memfd_create("x"), "shared memory": allocated(mmap.MAP_SHARED), "stack": allocated(mmap.MAP_PRIVATE | 0x100),
    "users": lambda: open("/etc/passwd").read(), "source": lambda: open(SOURCE).read(), "data": lambda: open(DATA).read(),
    "other process": lambda: open("/proc/PARENT/environ").read(), "processes": lambda: os.listdir("/proc"),
    "root": lambda: os.listdir("/"), "temporary": lambda: os.listdir(".."), "zeroes": lambda: open("/dev/zero", "rb").read(1),
    "private memory": lambda: mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), "own folder": lambda: os.listdir("."),
    "own file": lambda: open("given").read(), "input": lambda: open("/dev/stdin").read(), "null": lambda: open(os.devnull, "w").write("x"),
    "module": lambda: __import__("decimal").Decimal(1), "package": lambda: __import__("numpy").ones(3).sum(),
}.items():
    try:
        attempt()
        refused[name] = False
    except OSError:
        refused[name] = True
print(json.dumps(refused))
"""
ALLOWED = {"private memory", "own folder", "own file", "input", "null", "module", "package"}


def attempted(folder):
    """Return for each attempt of code to do more than compute if it was refused."""
    (folder / "data.jsonl").write_text('{"answer": "7"}')
    values = {
        "PARENT": str(os.getpid()),
        "SOURCE": repr(rlflow.__file__),
        "DATA": repr(str(folder / "data.jsonl")),
    }
    code = ATTEMPTS
    for name, value in values.items():
        code = code.replace(name, value)
    result = run_request(Code(code=code, stdin="x", run_timeout=60, files={"given": ""}))["run_result"]
    assert result["stderr"] == ""
    return json.loads(result["stdout"])


@needs_sandbox
def test_code_can_only_compute(tmp_path):
    assert {name for name, refused in attempted(tmp_path).items() if not refused} == ALLOWED


@needs_sandbox
def test_limits_in_a_request_are_capped():
    asked = Code(code="print(len(bytearray(5 << 30)))", memory_limit_MB=10**30)
    assert run_request(asked)["run_result"]["stderr"].startswith("MemoryError")


SERVING = """
import sys
from rlflow.services.serving.code import Code, run_request
run_request(Code(code="import ctypes, time\\nctypes.CDLL(None).prctl(1, 0)\\ntime.sleep(60)", run_timeout=60), sys.argv[1])
"""


@needs_sandbox
def test_code_ends_with_its_killed_server(tmp_path):
    environment = {**os.environ, "RLFLOW_RUN": f"test-{os.getpid()}"}
    server = subprocess.Popen([sys.executable, "-c", SERVING, str(tmp_path)], env=environment)
    try:
        until(
            lambda: len(process_tag.marked(environment["RLFLOW_RUN"])) == 2
        )  # the code has the mark of its run
    finally:
        server.kill()
        server.wait()
    until(lambda: not process_tag.marked(environment["RLFLOW_RUN"]))


def test_a_server_removes_its_folder_and_those_of_killed_servers(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    living, left = Folder(), tmp_path / "rlflow-code-left"
    (left / "request-x").mkdir(parents=True)
    Folder().remove()
    assert [path.name for path in tmp_path.iterdir()] == [Path(living.path).name]
    living.remove()
    assert not list(tmp_path.iterdir())


@needs_sandbox
def test_health_answers_at_once_despite_queued_requests():
    with asking(runner(1)) as client, ThreadPoolExecutor(61) as clients:
        first = clients.submit(client.post, "/run_code", {"code": "import time; time.sleep(5)"})
        behind = [
            clients.submit(client.post, "/run_code", {"code": "", "language": "rust"}) for _ in range(60)
        ]
        assert {client.get("/health")[0] for _ in range(100)} == {200}
        assert not first.done()
    assert first.result()[1]["status"] == "Success"
    assert {request.result()[0] for request in behind} == {200}


@needs_sandbox
def test_bodies_are_limited_with_and_without_a_length_header():
    with asking(runner(1)) as client:
        assert status_of(client, b"Content-Length: 17000000", b"") == 413
        assert (
            status_of(
                client, b"Transfer-Encoding: chunked", b"%x\r\n%s" % ((16 << 20) + 1, b"x" * ((16 << 20) + 1))
            )
            == 413
        )
        assert (
            client.post("/run_code", {"code": "", "files": {str(number): "" for number in range(1001)}})[0]
            == 422
        )


def status_of(client, header, body):
    """Return the status of the answer to this part of a request."""
    host, _, port = client.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=240) as connection:
        connection.sendall(
            b"POST /run_code HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n%s\r\n\r\n%s"
            % (header, body)
        )
        return int(connection.recv(12).split()[1])


@needs_sandbox
def test_a_deadline_of_0_means_the_default():
    assert run_request(Code(code="print(1)", run_timeout=0))["run_result"]["status"] == "Finished"


@needs_sandbox
def test_endless_code_and_endless_output_are_ended():
    result = run_request(Code(code="while True: print('x' * 1000)", run_timeout=0.6))["run_result"]
    assert (result["status"], result["return_code"]) == ("TimeLimitExceeded", None)
    assert len(result["stdout"]) <= 1 << 20


@needs_sandbox
def test_the_beginning_of_long_output_is_kept():
    result = run_request(Code(code="print('x' * (2 << 20))"))["run_result"]
    assert (result["status"], result["stdout"]) == ("Finished", "x" * (1 << 20))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"language": "rust"}, "language: found 'rust'"),
        ({"language": "\ud800"}, "language: found '\\ud800'"),
        ({"stdin": "\ud800"}, "stdin: found a lone surrogate"),
        ({"fetch_files": ["x"]}, "code cannot write files"),
        ({"files": {"../x": ""}}, "files: found the name '../x'"),
        ({"files": {"x": "!"}}, "files: 'x' is not base64"),
    ],
)
def test_unsupported_requests_are_reported(asked, said):
    answer = run_request(Code(code="print(1)", **asked))
    assert (answer["status"], answer["run_result"]) == ("SandboxError", None)
    assert said in answer["message"]
