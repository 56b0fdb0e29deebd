"""HTTP as rlflow's clients speak it: one deadline for a whole question, redirects within a host, and errors
with the server's own words."""

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

TOKEN = "RLFLOW_SERVE_TOKEN"  # the variable with the token of `rlflow serve`, which clients send
LONGEST = 16 << 20  # most bytes of an answer
QUOTED = 200  # most characters of a body or header that a message quotes
REDIRECTS = 5  # most redirects of a question
MOVED = (301, 302, 303, 307, 308)
BUSY = (408, 425, 429)  # with those from 500 on, the statuses that a wait may mend
TELLING = ("Location", "WWW-Authenticate", "Allow", "Retry-After")  # headers that say why there is no answer


@dataclass(frozen=True)
class Reply:
    """What a server answered. ``headers`` finds names in any case; ``said``: status, reason and headers that
    say why, in words."""

    status: int
    reason: str
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def said(self) -> str:
        """The status with what explains it."""
        telling = "".join(
            f"; {name}: {self.headers[name][:QUOTED]}" for name in TELLING if self.headers.get(name)
        )
        return printable(f"{self.status} {self.reason}{telling}")


class HttpClient:
    """Asks servers, from several threads. ``patience``: when it asks again."""

    def __init__(self, patience: Patience | None = None) -> None:
        self._closed = threading.Event()
        self._patience = patience or Patience(pause=self._closed.wait)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed.is_set()

    def close(self) -> None:
        """End all questions. Whoever waits for an answer gets a RuntimeError."""
        self._closed.set()
        with self._lock:
            for connected in self._open:
                _cut(connected)

    def post(self, url: str, body: bytes, seconds: float) -> bytes:
        """The body of the answer with status 200 to a question in JSON, which has so many seconds in all.
        Raises Unanswered."""
        return self._patience.answer(partial(self._asked, url, body), seconds)

    def _asked(self, url: str, body: bytes, seconds: float) -> bytes:
        """One try of a question. Raises Unanswered."""
        try:
            reply = self.once("POST", url, body, seconds, headers())
        except (OSError, http.client.HTTPException, ValueError) as error:
            if self.closed:
                raise RuntimeError("the client is closed") from None
            # not the kernel's own, which comes sooner or later
            if isinstance(error, TimeoutError) and error.errno is None:
                raise Unanswered("timeout", f"no answer after {seconds:.3g} s") from None
            raise (Passing if passes(error) else Unanswered)(
                "connection", f"no connection: {type(error).__name__}: {error}"
            ) from error
        if reply.status != http.client.OK:
            raise refused(reply)
        if len(reply.body) > LONGEST:
            raise Unanswered("reply", f"the server answered with more than {LONGEST} bytes")
        return reply.body

    def once(self, method: str, url: str, body: bytes, seconds: float, headers: Mapping[str, str]) -> Reply:
        """The answer to a question that is asked once; redirects to the same host are followed. Reads at most
        LONGEST bytes of a body, and one more. Raises TimeoutError after so many seconds, OSError and
        HTTPException for a server that cannot be asked."""
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
                body = response.read(LONGEST + 1)
                if response.length and len(body) <= LONGEST:  # the connection ended before the body did
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
        """While inside, end the connection after so many seconds and set ``late``: a socket's own limit is
        for each part of an answer. It ends too where the client is closed."""
        timer = threading.Timer(seconds, _end, (late, connected))
        timer.daemon = True
        with self._lock:
            self._open.add(connected)
        timer.start()
        try:
            if self.closed:
                raise ConnectionAbortedError
            yield
            if late.is_set():  # the end of an answer without a length may be this one
                raise TimeoutError
        finally:
            timer.cancel()
            with self._lock:
                self._open.discard(connected)


def post(url: str, value: Any, seconds: float | None = None) -> Any:
    """The JSON value that a server answers to a JSON value. For tools, environments, rewards and stages that
    ask a server.

    A busy server (408, 425, 429, 5xx) and one that takes no connection are asked again until ``seconds`` have
    passed: by default those that are left of the call, 60 outside of one. While a service of the run is being
    started anew, time stands still. Raises ConnectionError, which fails the row and is not shown to the
    model.
    """
    body = HttpClient().post(url, json.dumps(value).encode(), left() if seconds is None else seconds)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Unanswered("reply", f"{url}: the answer is not JSON: {error}") from None


def token() -> str:
    """The token of `rlflow serve`; empty where the variable is missing or has blanks alone."""
    return os.environ.get(TOKEN, "").strip()


def headers() -> dict[str, str]:
    """The headers of a question in JSON, with the token if this process has one."""
    return {
        "Content-Type": "application/json",
        **({"Authorization": f"Bearer {known}"} if (known := token()) else {}),
    }


def refused(reply: Reply) -> Unanswered:
    """Why an answer with another status than 200 is none."""
    text = printable(reply.body[:QUOTED].decode(errors="replace"))
    message = f"the server answered {reply.said}" + (f": {text}" if text else "")
    if is_passing(reply.status):
        return Passing(
            "status", message, wanted_pause(reply.headers.get("Retry-After"), reply.headers.get("Date"))
        )
    return Unanswered("status", message)


def is_passing(status: int) -> bool:
    """Whether a wait may mend an answer with this status."""
    return status in BUSY or status >= 500


def wanted_pause(after: str | None, now: str | None) -> float | None:
    """The seconds that the headers Retry-After (seconds, or a date) and Date ask to wait; None if they do
    not."""
    if after is None:
        return None
    with contextlib.suppress(ValueError):
        seconds = float(after)
        return max(seconds, 0.0) if math.isfinite(seconds) else None
    # no date, or two dates of which only one has a time zone
    with contextlib.suppress(ValueError, TypeError):
        begin = email.utils.parsedate_to_datetime(now) if now else datetime.now(UTC)
        return max((email.utils.parsedate_to_datetime(after) - begin).total_seconds(), 0.0)
    return None


def moved(url: str, status: int, location: str | None) -> str | None:
    """Where a redirect leads, if it stays on the same host and does not give up encryption; None for any
    other answer."""
    if status not in MOVED or not location:
        return None
    target = urljoin(url, location)
    before, after = urlsplit(url), urlsplit(target)
    try:
        same = before.hostname == after.hostname and (after.port is None or after.port > 0)
    except ValueError:  # no port
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
    """The headers for another program on the same host."""
    return {name: value for name, value in headers.items() if name != "Authorization"}


def passes(error: BaseException) -> bool:
    """Whether a wait may mend what keeps a question from being asked, or cuts its answer off."""
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_AGAIN and _may_connect()
    lasting = isinstance(error, PermissionError | ssl.SSLCertVerificationError)
    return isinstance(error, OSError | http.client.IncompleteRead) and not lasting


def _may_connect() -> bool:
    """Whether this process may open connections: behind the walls of rewards a name looks as if it were
    unknown for a while."""
    try:
        socket.socket().close()
    except PermissionError:
        return False
    return True


def _end(late: threading.Event, connected: socket.socket) -> None:
    late.set()
    _cut(connected)


def _cut(connected: socket.socket) -> None:
    """End a connection from another thread, so that what reads from it goes on."""
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
