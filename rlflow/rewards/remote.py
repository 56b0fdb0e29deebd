"""Scores rows on a server that uses the protocol of OpenRLHF's remote reward models.

A batch is sent as ``POST URL`` with ``{"query": […], "prompts": […], "labels": […]}``; a query is a prompt
followed by its completion. The server answers ``{"rewards": […]}`` with one number per row. If scoring a row
fails, its score is missing, never 0.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from rlflow.data.json_fields import given_back
from rlflow.data.scorer import ScorerSpec
from rlflow.processes.clients.http import HttpClient
from rlflow.processes.clients.patience import Unanswered
from rlflow.rewards import values
from rlflow.rewards.forms import asked
from rlflow.rewards.values import NAN, STEP, Results

BATCH = 64  # maximum number of rows in a request
IN_FLIGHT = 8  # maximum number of concurrent requests
# Maximum bytes in an answer. JSON of many small values can take 25 times its length in memory while it is read.
ANSWER = 4 << 20


@dataclass(frozen=True)
class _Batches:
    """The rows of one ``submit`` call, split into batches with a future each."""

    futures: Sequence[Future[list[Any]]]  # for each batch, the verdicts on its rows


class RemoteReward:
    """Scores rows on a server, with up to IN_FLIGHT requests of BATCH rows each at a time.

    ``submit`` and ``wait`` work as in `RewardPool`.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._threads = ThreadPoolExecutor(IN_FLIGHT, "remote-reward")
        self._client = HttpClient(longest=ANSWER)

    def submit(
        self, scorer: ScorerSpec, names: Sequence[str], rows: Sequence[Sequence[Any]], timeout: float
    ) -> _Batches:
        """Start scoring rows, and return the call to pass to ``wait``.

        ``rows``: for each row, the values of the columns ``names``. ``timeout``: seconds for each batch,
        including retries while the server is busy.
        """
        judged = [given_back(dict(zip(names, row, strict=True))) for row in rows]
        starts = range(0, len(judged), BATCH)
        return _Batches(
            [self._threads.submit(self._verdicts, judged[start : start + BATCH], timeout) for start in starts]
        )

    def wait(self, call: _Batches) -> Results:
        """Wait until the rows of a submitted call are scored, and return their results.

        Raises RuntimeError if ``close`` was called.
        """
        waiting = set(call.futures)
        try:
            while waiting:
                waiting = wait(waiting, STEP).not_done
        # this thread was interrupted: the results of the remaining requests are not needed
        except BaseException:
            for future in waiting:
                future.cancel()
            raise
        if self._client.closed:
            raise RuntimeError("the remote reward is closed")
        verdicts = [verdict for future in call.futures for verdict in future.result()]
        missing: list[Any] = [verdict for verdict in verdicts if isinstance(verdict, list)]
        return Results(
            [NAN if isinstance(verdict, list) else verdict for verdict in verdicts],
            Counter(cause for cause, _ in missing),
            dict(reversed(missing)),
        )

    def close(self) -> None:
        """Stop all requests. Threads that are waiting for results get RuntimeError."""
        self._client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _verdicts(self, rows: Sequence[Mapping[str, Any]], timeout: float) -> list[Any]:
        """Send one request, and return a score or [cause, message] for each row."""
        try:
            rewards = _read(self._client.post(self.url, _question(rows), timeout), len(rows))
        except Unanswered as missing:
            return [[missing.cause, f"{self.url}: {missing}"]] * len(rows)
        return [values.number(reward, f"{self.url}: the server sent") for reward in rewards]


def _question(rows: Sequence[Mapping[str, Any]]) -> bytes:
    queries, prompts, labels = zip(*map(asked, rows), strict=True)
    return json.dumps({"query": queries, "prompts": prompts, "labels": labels}).encode()


def _read(body: bytes, count: int) -> list[Any]:
    """Parse the server's answer into a list of ``count`` rewards. Raises Unanswered if it's invalid."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Unanswered("reply", f"the answer is not JSON: {error}") from None
    rewards = answer.get("rewards") if isinstance(answer, dict) else None
    if not isinstance(rewards, list):
        raise Unanswered("reply", f'the answer has no list "rewards": {body[:200].decode(errors="replace")}')
    if len(rewards) != count:
        raise Unanswered("count", f"the answer has {len(rewards)} rewards for {count} rows")
    return rewards
