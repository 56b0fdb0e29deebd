"""RemoteReward: rows that a server judges, by the protocol of OpenRLHF's remote reward models. A failure is missing, never 0.

A batch goes as ``POST URL`` with ``{"query": […], "prompts": […], "labels": […]}``, where a query is a prompt with its completion. The
answer is ``{"rewards": […]}`` with a number for each row.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rlflow.data.json_fields import given_back
from rlflow.data.scorer import ScorerSpec
from rlflow.rewards import values
from rlflow.rewards.forms import asked
from rlflow.rewards.pool import NAN, STEP, Results

BATCH = 64  # rows of a request
IN_FLIGHT = 8  # requests at a time
PAUSES = (0.1, 1.0)  # seconds before a request is tried again after a connection failed
ANSWER = 16 << 20  # most bytes of an answer
CAUSES = ("connection", "status", "timeout", "reply", "count")  # why the rows of a batch are missing, beside those of a single number


class Missing(Exception):
    """The rows of a batch have no score; the cause, and a message."""


@dataclass(frozen=True)
class _Batches:
    """A request's rows under way."""

    futures: Sequence[Future[list[Any]]]  # verdicts on the rows of each batch


class RemoteReward:
    """Judges rows by asking a server, IN_FLIGHT batches of BATCH rows at a time. ``submit`` and ``wait`` are those of `RewardPool`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._threads = ThreadPoolExecutor(IN_FLIGHT, "remote-reward")
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def submit(self, scorer: ScorerSpec, names: Sequence[str], rows: Sequence[Sequence[Any]], timeout: float) -> _Batches:
        """Start asking for rows, each with the values of the columns ``names``. ``timeout``: seconds for a batch."""
        judged = [given_back(dict(zip(names, row, strict=True))) for row in rows]
        starts = range(0, len(judged), BATCH)
        return _Batches([self._threads.submit(self._verdicts, judged[start : start + BATCH], timeout) for start in starts])

    def wait(self, call: _Batches) -> Results:
        """The results of submitted rows, once all have one. Raises RuntimeError where the reward was closed."""
        waiting = set(call.futures)
        try:
            while waiting:
                waiting = wait(waiting, STEP).not_done
        except BaseException:  # interrupted: the others need not be asked for
            for future in waiting:
                future.cancel()
            raise
        if self._closed.is_set():
            raise RuntimeError("the remote reward is closed")
        verdicts = [verdict for future in call.futures for verdict in future.result()]
        missing = [verdict for verdict in verdicts if isinstance(verdict, list)]
        return Results([NAN if isinstance(verdict, list) else verdict for verdict in verdicts], Counter(cause for cause, _ in missing),
                       dict(reversed(missing)))  # fmt: skip

    def close(self) -> None:
        """End all requests. What waits for one raises RuntimeError."""
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for connected in self._open:
                _cut(connected)

    def _verdicts(self, rows: Sequence[Mapping[str, Any]], timeout: float) -> list[Any]:
        """A number for each row, or [cause, message]."""
        try:
            return [values.number(reward, f"{self.url}: the server sent") for reward in self._rewards(_question(rows), len(rows), timeout)]
        except Missing as missing:
            cause, message = missing.args
            return [[cause, f"{self.url}: {message}"]] * len(rows)

    def _rewards(self, question: bytes, count: int, timeout: float) -> list[Any]:
        """The values that the server sends for the rows of a batch. Raises Missing."""
        for tries, pause in enumerate((*PAUSES, None), 1):
            try:
                return _read(self._answer(question, timeout), count)
            except (OSError, http.client.HTTPException) as error:
                if self._closed.is_set():
                    raise RuntimeError("the remote reward is closed") from None
                if pause is None or not isinstance(error, OSError):
                    raise Missing("connection", f"no connection in {tries} tries: {type(error).__name__}: {error}") from None
            self._closed.wait(pause)
        raise AssertionError

    def _answer(self, question: bytes, timeout: float) -> bytes:
        """The bytes that the server answers within ``timeout`` seconds. Raises Missing, and OSError where there is no connection."""
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=timeout)
        late = threading.Event()
        try:
            connection.connect()
            with self._cut_at(connection.sock, timeout, late):
                return _asked(connection, parts.path + (f"?{parts.query}" if parts.query else ""), question)
        except (OSError, http.client.HTTPException) as error:
            if late.is_set() or isinstance(error, TimeoutError):
                raise Missing("timeout", f"no answer after {timeout:g} s") from None
            raise
        finally:
            connection.close()

    @contextlib.contextmanager
    def _cut_at(self, connected: socket.socket, timeout: float, late: threading.Event) -> Iterator[None]:
        """While inside, end the connection after ``timeout`` seconds and set ``late``: a socket's own limit is for each part of an answer.
        It ends too where the reward is closed."""
        timer = threading.Timer(timeout, _end, (late, connected))
        timer.daemon = True
        with self._lock:
            self._open.add(connected)
        timer.start()
        try:
            if self._closed.is_set():
                raise ConnectionAbortedError
            yield
            if late.is_set():  # the end of an answer without a length may be this one
                raise TimeoutError
        finally:
            timer.cancel()
            with self._lock:
                self._open.discard(connected)


def headers() -> dict[str, str]:
    """The headers of a request: with the token of `rlflow serve`, where this process has one in RLFLOW_SERVE_TOKEN."""
    token = os.environ.get("RLFLOW_SERVE_TOKEN")
    return {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}


def _asked(connection: http.client.HTTPConnection, path: str, question: bytes) -> bytes:
    """The body of the answer. Raises Missing for one that is no success."""
    connection.request("POST", path or "/", question, headers())
    response = connection.getresponse()
    body = response.read(ANSWER + 1)
    if response.status != http.client.OK:
        raise Missing("status", f"the server answered {response.status} {response.reason}: {body[:200].decode(errors='replace')}")
    if len(body) > ANSWER:
        raise Missing("reply", f"the server answered with more than {ANSWER} bytes")
    return body


def _end(late: threading.Event, connected: socket.socket) -> None:
    late.set()
    _cut(connected)


def _cut(connected: socket.socket) -> None:
    """End a connection from another thread, so that what reads from it goes on."""
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def _question(rows: Sequence[Mapping[str, Any]]) -> bytes:
    queries, prompts, labels = zip(*map(asked, rows), strict=True)
    return json.dumps({"query": queries, "prompts": prompts, "labels": labels}).encode()


def _read(body: bytes, count: int) -> list[Any]:
    """The rewards in an answer. Raises Missing."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Missing("reply", f"the answer is not JSON: {error}") from None
    rewards = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(rewards, list):
        raise Missing("reply", f'the answer has no list "rewards": {body[:200].decode(errors="replace")}')
    if len(rewards) != count:
        raise Missing("count", f"the answer has {len(rewards)} rewards for {count} rows")
    return rewards
