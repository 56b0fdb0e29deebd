"""An HTTP client with a deadline for each request.

It follows redirects only on the same host, and its errors quote what the server answered.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import json
import math
import os
import socket
import ssl
import string
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from rlflow.errors import printable
from rlflow.processes.clients.patience import Passing, Patience, Unanswered, left

TOKEN = "RLFLOW_SERVE_TOKEN"  # the variable with the token that clients send to `rlflow serve`
LONGEST = 16 << 20  # maximum size of an answer in bytes, unless the client sets another limit
QUOTED = 200  # how many characters of a body or header a message quotes
REDIRECTS = 5  # how many redirects a request follows
MOVED = (301, 302, 303, 307, 308)
BUSY = (408, 425, 429)  # a retry may succeed after these statuses, and after any status from 500 on
TELLING = ("Location", "WWW-Authenticate", "Allow", "Retry-After")  # headers that explain a failure


@dataclass(frozen=True)
class Reply:
    """A server's answer. Names in ``headers`` are case-insensitive."""

    status: int
    reason: str
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def said(self) -> str:
        """The status, the reason and any headers that explain a failed request, as text."""
        telling = "".join(
            f"; {name}: {self.headers[name][:QUOTED]}" for name in TELLING if self.headers.get(name)
        )
        return printable(f"{self.status} {self.reason}{telling}")


class HttpClient:
    """Sends HTTP requests. It can be shared between threads.

    ``patience`` decides when to retry. ``longest``: the maximum size of an answer in bytes; the rest isn't
    read.
    """

    def __init__(self, patience: Patience | None = None, longest: int = LONGEST) -> None:
        self._longest = longest
        self._closed = threading.Event()
        self._patience = patience or Patience(pause=self._closed.wait)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    @property
    def closed(self) -> bool:
        """Whether ``close`` has been called."""
        return self._closed.is_set()

    def close(self) -> None:
        """Stop all requests. Threads that are waiting for an answer get a RuntimeError."""
        self._closed.set()
        with self._lock:
            for connected in self._open:
                _cut(connected)

    def post(self, url: str, body: bytes, seconds: float) -> bytes:
        """Post a JSON body to ``url`` until the server answers with status 200, and return the answer's body.

        ``seconds``: the time for all tries together. Raises Unanswered if it runs out or a retry would be
        useless.
        """
        return self._patience.answer(partial(self._try_once, url, body), seconds)

    def _try_once(self, url: str, body: bytes, seconds: float) -> bytes:
        """Send a request once, and return the body of the answer. Raises Unanswered."""
        try:
            reply = self.once("POST", url, body, seconds, headers())
        except (OSError, http.client.HTTPException, ValueError) as error:
            if self.closed:
                raise RuntimeError("the client is closed") from None
            # The kernel's own timeout, which may come earlier or later, has an errno.
            if isinstance(error, TimeoutError) and error.errno is None:
                raise Unanswered("timeout", f"no answer after {seconds:.3g} s") from None
            raise (Passing if passes(error) else Unanswered)(
                "connection", f"no connection: {type(error).__name__}: {error}"
            ) from error
        if reply.status != http.client.OK:
            raise refused(reply)
        if len(reply.body) > self._longest:
            limit = f"{self._longest / (1 << 20):g} MiB"
            raise Unanswered("reply", f"the answer has more than {limit}: the server must send a shorter one")
        return reply.body

    def once(self, method: str, url: str, body: bytes, seconds: float, headers: Mapping[str, str]) -> Reply:
        """Send a single request without retries, and return the answer, following redirects on the same host.

        At most one byte more than the longest answer is read. Raises TimeoutError after ``seconds``, and
        OSError or HTTPException if the request can't be sent or gets no valid answer.
        """
        limit = time.monotonic() + seconds
        for _ in range(REDIRECTS):
            reply = self._exchange(method, url, body, max(limit - time.monotonic(), 1e-3), headers)
            target = moved(url, reply.status, reply.headers.get("Location"))
            if target is None:
                return reply
            method, body = ("GET", b"") if reply.status == 303 else (method, body)
            url, headers = target, headers if _origin(target) == _origin(url) else _without_token(headers)
        return reply

    def _exchange(
        self, method: str, url: str, question: bytes, seconds: float, headers: Mapping[str, str]
    ) -> Reply:
        parts, late = urlsplit(url), threading.Event()
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=seconds)
        path = quote(
            (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), safe=string.punctuation
        )
        try:
            connection.connect()
            with self._cut_at(connection.sock, seconds, late):
                connection.request(method, path, question or None, dict(headers))
                response = connection.getresponse()
                body = response.read(self._longest + 1)
                if response.length and len(body) <= self._longest:  # the connection ended before the body did
                    raise http.client.IncompleteRead(body, response.length)
                return Reply(response.status, response.reason, response.headers, body)
        except (OSError, http.client.HTTPException) as error:
            if late.is_set():
                raise TimeoutError from error
            raise
        finally:
            connection.close()

    @contextlib.contextmanager
    def _cut_at(self, connected: socket.socket, seconds: float, late: threading.Event) -> Iterator[None]:
        """Close a connection if the context lasts longer than ``seconds``, and set ``late``.

        The socket's own timeout wouldn't do, because it applies to each part of an answer. Closing the client
        also closes the connection.
        """
        timer = threading.Timer(seconds, _end, (late, connected))
        timer.daemon = True
        with self._lock:
            self._open.add(connected)
        timer.start()
        try:
            if self.closed:
                raise ConnectionAbortedError
            yield
            if late.is_set():  # an answer without a length may have been cut off here
                raise TimeoutError
        finally:
            timer.cancel()
            with self._lock:
                self._open.discard(connected)


def post(url: str, value: Any, seconds: float | None = None) -> Any:
    """Send ``value`` as JSON to a server with POST, and return the server's JSON answer.

    Use this in tools, environments, rewards and stages. If the server is busy (408, 425, 429, 5xx) or can't
    be reached, the request is repeated for up to ``seconds``, by default the time left for the current call
    of the tool, environment or reward, or 60 outside of such calls. Time in which one of the run's services
    restarts doesn't count. Raises ConnectionError if the request fails. That fails the row; the model doesn't
    see the error.
    """
    body = HttpClient().post(url, json.dumps(value).encode(), left() if seconds is None else seconds)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Unanswered("reply", f"{url}: the answer is not JSON: {error}") from None


def token() -> str:
    """Return the token for `rlflow serve` from the environment, or "" if it is missing or blank."""
    return os.environ.get(TOKEN, "").strip()


def headers() -> dict[str, str]:
    """Return the HTTP headers for a JSON request, with the token if this process has one."""
    return {
        "Content-Type": "application/json",
        **({"Authorization": f"Bearer {known}"} if (known := token()) else {}),
    }


def refused(reply: Reply) -> Unanswered:
    """Return the error for an answer whose status is not 200."""
    text = printable(reply.body[:QUOTED].decode(errors="replace"))
    message = f"the server answered {reply.said}" + (f": {text}" if text else "")
    if is_passing(reply.status):
        return Passing(
            "status", message, wanted_pause(reply.headers.get("Retry-After"), reply.headers.get("Date"))
        )
    return Unanswered("status", message)


def is_passing(status: int) -> bool:
    """Whether a retry may succeed after an answer with this status."""
    return status in BUSY or status >= 500


def wanted_pause(after: str | None, now: str | None) -> float | None:
    """Return how many seconds a server asks clients to wait, or None if it doesn't.

    ``after``: the header Retry-After, a number of seconds or a date. ``now``: the header Date.
    """
    if after is None:
        return None
    with contextlib.suppress(ValueError):
        seconds = float(after)
        return max(seconds, 0.0) if math.isfinite(seconds) else None
    # ValueError: not a date. TypeError: only one of the two dates has a time zone.
    with contextlib.suppress(ValueError, TypeError):
        begin = email.utils.parsedate_to_datetime(now) if now else datetime.now(UTC)
        return max((email.utils.parsedate_to_datetime(after) - begin).total_seconds(), 0.0)
    return None


def moved(url: str, status: int, location: str | None) -> str | None:
    """Return the URL that an answer redirects to, or None if there is no redirect to follow.

    Only redirects that stay on the same host and don't go from https to http are followed.
    """
    if status not in MOVED or not location:
        return None
    target = urljoin(url, location)
    before, after = urlsplit(url), urlsplit(target)
    try:
        same = before.hostname == after.hostname and (after.port is None or after.port > 0)
    except ValueError:  # invalid port
        return None
    return (
        target
        if same and after.scheme in (before.scheme, {"http": "https", "ws": "wss"}.get(before.scheme))
        else None
    )


def _origin(url: str) -> tuple[str | None, int | None, str]:
    parts = urlsplit(url)
    return parts.hostname, parts.port, parts.scheme


def _without_token(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers without the token, for a redirect to another port on the same host."""
    return {name: value for name, value in headers.items() if name != "Authorization"}


def passes(error: BaseException) -> bool:
    """Whether a retry may succeed after a connection error.

    The error either kept a request from being sent or cut off the answer.
    """
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_AGAIN and _may_connect()
    lasting = isinstance(error, PermissionError | ssl.SSLCertVerificationError)
    return isinstance(error, OSError | http.client.IncompleteRead) and not lasting


def _may_connect() -> bool:
    """Whether this process is allowed to open network connections.

    In a reward's sandbox it may not be, and a failed name lookup then looks like a temporary problem.
    """
    try:
        socket.socket().close()
    except PermissionError:
        return False
    return True


def _end(late: threading.Event, connected: socket.socket) -> None:
    late.set()
    _cut(connected)


def _cut(connected: socket.socket) -> None:
    """Close a connection from another thread, so that a thread reading from it returns."""
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
