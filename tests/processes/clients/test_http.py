"""Answers and messages of HTTP requests to real servers on loopback."""

import json
import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import rlflow
from rlflow.processes.clients.http import HttpClient, headers, moved, wanted_pause
from rlflow.processes.clients.patience import Passing, Patience, Unanswered

REAL_SECONDS = 30.0  # for a request that should succeed


class Server(ThreadingHTTPServer):
    """Returns the next of ``answers`` (status, headers, body), and the last one forever; ``requests``: method,
    path, token and body of each request."""

    daemon_threads = True

    def __init__(self, *answers):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers, self.requests = list(answers), []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append((self.command, self.path, self.headers.get("Authorization"), body))
        status, headers, answer = (
            self.server.answers.pop(0) if len(self.server.answers) > 1 else self.server.answers[0]
        )
        self.send_response(status)
        for name, value in {"Content-Length": str(len(answer)), **headers}.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST

    def log_message(self, *words):
        pass


@contextmanager
def serving(*answers):
    with Server(*answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def request(server, path="/", seconds=REAL_SECONDS):
    """Return the answer and the pauses before it; only pauses move the clock."""
    now = [0.0]

    def pause(seconds):
        now[0] += seconds

    return HttpClient(Patience(lambda: now[0], pause)).post(server.url + path, b"{}", seconds), now[0]


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_a_busy_server_is_retried(status):
    with serving((status, {"Retry-After": "3"}, b"busy"), (200, {}, b"done")) as server:
        assert request(server) == (b"done", 3.0)
    assert [body for *_, body in server.requests] == [b"{}", b"{}"]


def test_an_incomplete_answer_is_retried():
    with serving((200, {"Content-Length": "50"}, b"do"), (200, {}, b"done")) as server:
        assert request(server)[0] == b"done"


@pytest.mark.parametrize(
    ("status", "headers", "words"),
    [
        (401, {"WWW-Authenticate": 'Bearer realm="judge"'}, 'WWW-Authenticate: Bearer realm="judge"'),
        (405, {"Allow": "GET, HEAD"}, "Allow: GET, HEAD"),
        (302, {"Location": "http://elsewhere.example/x"}, "Location: http://elsewhere.example/x"),
        (404, {"X": "\x1b[31m"}, "404 Not Found: what \\x1b[1m is"),
    ],
)
def test_other_answers_fail_at_once_and_are_quoted(status, headers, words):
    with serving((status, headers, b"what \x1b[1m is")) as server, pytest.raises(Unanswered) as error:
        request(server)
    assert (error.value.cause, len(server.requests)) == ("status", 1)
    assert words in str(error.value)
    assert "\x1b" not in str(error.value)


@pytest.mark.parametrize(
    ("status", "method", "body"),
    [
        (301, "POST", b"{}"),
        (302, "POST", b"{}"),
        (303, "GET", b""),
        (307, "POST", b"{}"),
        (308, "POST", b"{}"),
    ],
)
def test_a_redirect_on_the_same_host_is_followed(status, method, body, monkeypatch):
    monkeypatch.setenv("RLFLOW_SERVE_TOKEN", "secret")
    with serving((status, {"Location": "/b/?x=1"}, b""), (200, {}, b"done")) as server:
        assert request(server, "/a")[0] == b"done"
    assert server.requests == [
        ("POST", "/a", "Bearer secret", b"{}"),
        (method, "/b/?x=1", "Bearer secret", body),
    ]


def test_a_redirect_to_another_port_drops_the_token(monkeypatch):
    monkeypatch.setenv("RLFLOW_SERVE_TOKEN", "secret")
    with serving((200, {}, b"done")) as other, serving((307, {"Location": f"{other.url}/x"}, b"")) as server:
        assert request(server)[0] == b"done"
    assert other.requests == [("POST", "/x", None, b"{}")]


def test_circular_redirects_end():
    with (
        serving((307, {"Location": "/again"}, b"")) as server,
        pytest.raises(Unanswered, match="Location: /again"),
    ):
        request(server)
    assert len(server.requests) == 5


def test_a_redirect_to_another_host_is_not_followed():
    assert moved("http://h:1/a", 307, "b") == "http://h:1/b"
    assert moved("http://h:1/a", 307, "https://h/b") == "https://h/b"
    for url, status, location in [
        ("https://h/a", 307, "http://h/b"),
        ("http://h/a", 307, "http://other/b"),
        ("http://h/a", 307, "file://h/b"),
        ("http://h/a", 307, "http://h:x/"),
        ("http://h/a", 307, None),
        ("http://h/a", 200, "b"),
    ]:
        assert moved(url, status, location) is None, location


def test_retry_after_has_seconds_or_a_date():
    now = datetime(2026, 1, 1, tzinfo=UTC)
    date, late = format_datetime(now, usegmt=True), format_datetime(now + timedelta(seconds=90), usegmt=True)
    assert [wanted_pause(after, date) for after in ("2", "0.5", "-3", late, date)] == [
        2.0,
        0.5,
        0.0,
        90.0,
        0.0,
    ]
    assert [wanted_pause(after, date) for after in (None, "", "soon", "nan", "inf")] == [None] * 5
    assert wanted_pause(late, None) == 0.0  # by this machine's clock


def test_a_blank_token_is_not_sent(monkeypatch):
    monkeypatch.setenv("RLFLOW_SERVE_TOKEN", " ")
    assert "Authorization" not in headers()
    monkeypatch.setenv("RLFLOW_SERVE_TOKEN", "secret\n")
    assert headers()["Authorization"] == "Bearer secret"


def test_a_closed_client_sends_no_request():
    client = HttpClient()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.post("http://127.0.0.1:9/", b"{}", REAL_SECONDS)


@pytest.mark.parametrize("headers", [{}, {"Content-Length": None, "Connection": "close"}])
def test_an_answer_beyond_the_limit_is_refused_without_a_retry(headers):
    client = HttpClient(longest=1 << 20)
    for more in (0, 1):
        answer = b"x" * ((1 << 20) + more)
        with serving((200, headers, answer)) as server:
            if not more:
                assert client.post(server.url, b"{}", REAL_SECONDS) == answer
                continue
            with pytest.raises(Unanswered, match="the answer has more than 1 MiB") as error:
                client.post(server.url, b"{}", REAL_SECONDS)
        assert (error.value.cause, isinstance(error.value, Passing)) == ("reply", False)


def test_a_tool_sends_json():
    with serving((503, {}, b""), (200, {}, b'{"result": [1]}')) as server:
        assert rlflow.post(f"{server.url}/x", {"query": "q"}) == {"result": [1]}
    assert json.loads(server.requests[1][3]) == {"query": "q"}
    with serving((200, {}, b"<html>")) as server, pytest.raises(ConnectionError, match="is not JSON"):
        rlflow.post(server.url, {})


def test_an_unknown_host_name_is_not_retried():
    with pytest.raises(Unanswered, match="no connection: ") as error:
        rlflow.post("http://judge.invalid/", {}, seconds=0.2)
    assert not isinstance(error.value, Passing)
