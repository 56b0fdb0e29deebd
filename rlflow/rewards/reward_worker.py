"""The process that loads scorers, scores rows, and ends with its parent.

Run as ``python -m rlflow.rewards.reward_worker PARENT REPLIES SANDBOX``: the parent's process id, the
descriptor for replies, and the process's permissions as JSON (``Confinement.words``). Requests arrive on
standard input. The worker sends one reply per row, with the row's index in the request. When it starts, it
moves requests and replies to other descriptors, so that user code can print or read standard input without
disturbing them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rlflow.data.json_fields import given_back
from rlflow.processes.clients.patience import within
from rlflow.processes.sandbox import sandboxes
from rlflow.processes.watchdog import process_tag
from rlflow.rewards import alone, frames, scorers, values
from rlflow.rewards.forms import FORMS, by_batch

if TYPE_CHECKING:
    from rlflow.rewards.together import SideBySide

# Bytes that a built-in scorer may allocate in addition to the memory of its process. Without a limit, an
# answer such as 9**9**9 would exhaust the machine's memory.
BUILT_IN_MEMORY = 4 << 30


def main() -> None:
    """Read the command line, enter the sandbox, and answer requests until standard input is closed."""
    RewardWorker(*begun()).serve()


def begun() -> tuple[int, int]:
    """Set up the process as its command line says, and return (requests, replies) as file descriptors.

    The process is then in the sandbox and ends when its parent does. Standard input and output are free for
    user code.
    """
    parent, replies = int(sys.argv[1]), int(sys.argv[2])
    process_tag.die_with(parent)
    requests = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.set_inheritable(replies, False)
    confine(json.loads(sys.argv[3]))
    return requests, replies


def confine(words: dict[str, Any]) -> None:
    """Enter the sandbox, either the one for built-in scorers or the one for users' rewards.

    ``words``: the process's permissions, from ``Confinement.words``.
    """
    if words["built_in"]:
        sandboxes.around_scorers(words["folder"])
    else:
        sandboxes.around_rewards([words["folder"], *words["folders"]], words["network"], words["memory"])


class RequestWorker:
    """Loads objects and answers requests, with one reply per part of a request.

    ``requests`` and ``replies`` are file descriptors. Subclasses define how to load an object and how to
    answer a request.
    """

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies = requests, replies

    def load(self, key: str, packed: dict[str, Any]) -> None:
        """Load an object, which later requests refer to as ``key``. May raise any exception.

        ``packed``: plain values that describe the object.
        """
        raise NotImplementedError

    def answers(self, request: dict[str, Any]) -> Iterator[Any]:
        """Yield the answer to each part of a request, in order, as soon as it is available."""
        raise NotImplementedError

    def serve(self) -> None:
        """Answer requests until the request stream ends."""
        reader = frames.FrameReader(limit=1 << 32)
        while data := os.read(self._requests, 1 << 20):
            reader.feed(data)
            while (body := reader.next()) is not None:
                self._answer(frames.unpacked(body))

    def _answer(self, request: dict[str, Any]) -> None:
        """Answer one request.

        Only this process replies: if user code forks a child that returns here, the child exits.
        """
        number = request["number"]
        if "load" in request:
            with process_tag.here_alone():
                reply = self._loaded(request)
            self._reply(frames.reply(number, frames.WHOLE, reply))
            return
        self._reply(frames.reply(number, frames.WHOLE, {"ready": True}))
        for place, answer in enumerate(self.answers(request)):
            # Send the reply at once, because the pool already counts the time toward the next answer.
            self._reply(frames.reply(number, place, answer))

    def _loaded(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            self.load(request["key"], request["load"])
        except BaseException as error:  # a user's file may raise anything, SystemExit included
            return {"failed": values.failure(error), "line": line_of(error, request["file"])}
        return {"loaded": request["key"]}

    def _reply(self, message: Any) -> None:
        unsent = memoryview(frames.packed(message))
        while unsent:
            unsent = unsent[os.write(self._replies, unsent) :]


class RewardWorker(RequestWorker):
    """Scores rows with the scorers that it has loaded."""

    def __init__(self, requests: int, replies: int) -> None:
        super().__init__(requests, replies)
        self._scorers: dict[str, tuple[dict[str, Any], scorers.Score]] = {}
        self._async: SideBySide | None = None

    def load(self, key: str, packed: dict[str, Any]) -> None:
        """Build a scorer from its kind and settings."""
        self._scorers[key] = (packed, scorers.build(packed["kind"], packed["settings"]))

    def answers(self, request: dict[str, Any]) -> Iterator[Any]:
        """Yield the verdict on each row of the request."""
        described, scorer = self._scorers[request["key"]]
        rows = [given_back(dict(zip(request["names"], values, strict=True))) for values in request["rows"]]
        with _memory(described["kind"]):
            yield from self._scores(described, scorer, rows, request["timeout"])

    def _scores(
        self, described: dict[str, Any], scorer: scorers.Score, rows: Sequence[scorers.Row], timeout: float
    ) -> Iterator[Any]:
        if described["settings"].get("later"):
            from rlflow.rewards.together import SideBySide  # imports asyncio, which other rewards do not need

            self._async = self._async or SideBySide()
            with process_tag.here_alone():
                yield from self._async.scores(scorer, rows, timeout)
            return
        form = FORMS.get(described["settings"].get("form", ""))
        if form is not None and form.batch:
            with process_tag.here_alone(), within(timeout):
                yield from by_batch(scorer, rows, form)
            return
        for portion, apart in scorers.portions(described["kind"], described["settings"], rows):
            if apart:
                yield from alone.judged(
                    [partial(_score, scorer, row) for row in portion], (self._requests, self._replies)
                )
                continue
            for row in portion:
                with process_tag.here_alone(), within(timeout):
                    score = _score(scorer, row)
                yield score


def _score(scorer: scorers.Score, row: scorers.Row) -> Any:
    """Score one row, and return what ``values.verdict`` makes of the score."""
    try:
        return values.verdict(scorer(**row))
    except BaseException as error:  # a user's function may raise anything, SystemExit included
        return values.raised(error)


@contextlib.contextmanager
def _memory(kind: str) -> Iterator[None]:
    """Limit how much memory a built-in scorer may allocate inside this context.

    Users' functions aren't limited, because they may load a model.
    """
    if kind == "function" or sys.platform != "linux":
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as sizes:
        limit = int(sizes.read().split()[0]) * resource.getpagesize() + BUILT_IN_MEMORY
    if soft == resource.RLIM_INFINITY or limit < soft:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def line_of(error: BaseException, file: str) -> int:
    """Return the line of the user's file ``file`` that raised the error.

    If the traceback has several lines of the file, this is the last one.
    """
    if isinstance(error, SyntaxError):
        return error.lineno or 1
    return next(
        (
            frame.lineno or 1
            for frame in reversed(traceback.extract_tb(error.__traceback__))
            if frame.filename == file
        ),
        1,
    )


if __name__ == "__main__":
    main()
