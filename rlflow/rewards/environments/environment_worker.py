"""The process that runs episodes, answers their calls, and ends with its parent.

It replies to calls in the order in which they arrive. Run as ``python -m
rlflow.rewards.environments.environment_worker PARENT REPLIES SANDBOX``, with the arguments of
`rlflow.rewards.reward_worker`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import numbers
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlflow.author.messages import (
    CHANGES,
    cut_to,
    fault,
    is_messages,
    packed,
    without_invalid_characters,
)
from rlflow.author.turn import Turn
from rlflow.data.json_fields import given_back
from rlflow.processes.clients.later import TimeLimit
from rlflow.processes.clients.patience import within
from rlflow.processes.declare import from_environment
from rlflow.processes.watchdog import process_tag
from rlflow.rewards import hints, values
from rlflow.rewards.reward_worker import RequestWorker, begun
from rlflow.rewards.scorers import user_module
from rlflow.rewards.together import SideBySide

LONGEST = 1 << 17  # maximum number of characters in an environment message; longer text is cut
LOGGED = 32  # most numbers in a turn's log

# ["open", number, columns, seed], ["step", number, said], ["tools", number, calls] or ["end", number]
Call = Sequence[Any]


def main() -> None:
    """Read the command line, enter the sandbox, and answer requests until standard input is closed."""
    EnvironmentWorker(*begun()).serve()


class Refused(Exception):
    """An environment returned an invalid answer. ``cause``: one of the causes of ``Failure``."""

    def __init__(self, message: str, cause: str = "type") -> None:
        super().__init__(message)
        self.cause = cause


class EnvironmentWorker(RequestWorker):
    """Runs episodes of the class that it has loaded, and answers their calls."""

    def __init__(self, requests: int, replies: int) -> None:
        super().__init__(requests, replies)
        self._make: Callable[[], Any] = lambda: None
        self._later = False
        self._episodes: dict[int, Any] = {}
        self._together = SideBySide()

    def load(self, key: str, packed: dict[str, Any]) -> None:
        """Load the environment's class and its settings. May raise any exception."""
        kind = getattr(user_module(packed["file"], packed["source"], packed["module"]), packed["class"])
        settings = {
            name: Path(value) if name in packed["paths"] else from_environment(value)
            for name, value in packed["settings"].items()
        }
        self._make, self._later = lambda: kind(**settings), packed["later"]

    def answers(self, request: dict[str, Any]) -> Iterator[Any]:
        """Drop the episodes that the request lists as finished. Return an iterator over its calls' answers."""
        for over in request["over"]:
            self._episodes.pop(over, None)
        calls, seconds = request["calls"], request["seconds"]
        return (
            self._together.results([self._awaited(call, seconds) for call in calls])
            if self._later
            else self._in_turn(calls, seconds)
        )

    def _in_turn(self, calls: Sequence[Call], seconds: float) -> Iterator[Any]:
        for call in calls:
            with process_tag.here_alone(), within(seconds):
                answer = self._attempted(call)
            yield answer

    def _attempted(self, call: Call) -> Any:
        try:
            return checked(call, self._called(call))
        except BaseException as error:  # a user's method may raise anything, SystemExit included
            self._failed(call[1])
            return failed(error)

    def _failed(self, number: int) -> Any:
        """Drop the failed episode ``number`` and close its environment.

        Returns an awaitable if ``close`` is async.
        """
        episode = self._episodes.pop(number, None)
        with contextlib.suppress(Exception):  # only the episode's own failure is reported
            return _close(episode)
        return None

    async def _awaited(self, call: Call, seconds: float) -> Any:
        """Return the answer to a call of an async method, or a failure after ``seconds``.

        Several such calls run at once, each with its own deadline.
        """
        limit = TimeLimit(seconds)
        try:
            async with limit:
                answer = self._called(call)
                return checked(call, await answer if inspect.isawaitable(answer) else answer)
        except BaseException as error:  # as above
            if limit.expired():  # the episode gets no further calls
                self._episodes.pop(call[1], None)
                return ["timeout", f"no answer after {seconds:g} s"]
            with contextlib.suppress(Exception):
                if inspect.isawaitable(closing := self._failed(call[1])):
                    await asyncio.wait_for(closing, seconds)
            return failed(error)

    def _called(self, call: Call) -> Any:
        """Run the method named by a call. Return its value or, if it's async, an awaitable."""
        kind, number, *rest = call
        if kind == "open":
            columns, seed = rest
            self._episodes[number] = self._make()
            reset = getattr(self._episodes[number], "reset", None)
            return (
                reset(**given_back(columns), **({"seed": seed} if _takes_seed(reset) else {}))
                if reset is not None
                else None
            )
        if number not in self._episodes:  # a class without ``reset``
            self._episodes[number] = self._make()
        if kind == "step":
            return self._episodes[number].step(*rest)
        if kind == "tools":
            return self._used(self._episodes[number], rest[0])
        return self._ended(self._episodes.pop(number))

    async def _used_later(self, episode: Any, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        return [
            await used if inspect.isawaitable(used := _use(episode, name, arguments)) else used
            for name, arguments in calls
        ]

    def _used(
        self, episode: Any, calls: Sequence[tuple[str, Mapping[str, Any]]]
    ) -> list[str] | Awaitable[list[str]]:
        """Call an episode's tools, and return their results as text, in order.

        ``calls``: (tool name, arguments) of each call. Returns an awaitable if any tool is async.
        """
        return (
            self._used_later(episode, calls)
            if self._later
            else [_use(episode, name, arguments) for name, arguments in calls]
        )

    def _ended(self, episode: Any) -> Any:
        """End an episode by calling ``score`` and then ``close``.

        Returns the score, or None if the class has no ``score``. With async methods, returns an awaitable for
        the score.
        """
        if self._later:
            return _ended_later(episode)
        score = episode.score() if hasattr(episode, "score") else None
        _close(episode)
        return score


async def _ended_later(episode: Any) -> Any:
    score = episode.score() if hasattr(episode, "score") else None
    score = await score if inspect.isawaitable(score) else score
    if inspect.isawaitable(closing := _close(episode)):
        await closing
    return score


def _close(episode: Any) -> Any:
    return episode.close() if hasattr(episode, "close") else None


def _takes_seed(reset: Callable[..., Any]) -> bool:
    parameters = inspect.signature(reset).parameters
    return "seed" in parameters or any(
        each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()
    )


def _use(episode: Any, name: str, arguments: Mapping[str, Any]) -> Any:
    """Call a tool and return its result as text: strings unchanged, other values as JSON.

    If the tool raises an exception, the result is the error's text, so that the model can call the tool
    differently. If a service can't be reached, that isn't the model's fault, and the exception is passed on.
    For an async tool, returns an awaitable.
    """
    try:
        result = getattr(episode, name)(**arguments)
    except Exception as error:
        if is_service_error(error):
            raise
        return as_result(error)
    return _awaited_tool(result) if inspect.isawaitable(result) else shown(result)


async def _awaited_tool(result: Awaitable[Any]) -> str:
    try:
        return shown(await result)
    except asyncio.CancelledError:
        raise
    except Exception as error:
        if is_service_error(error):
            raise
        return as_result(error)


def is_service_error(error: BaseException) -> bool:
    """True if an error means that a service didn't answer.

    These are network errors, even if a library has wrapped them, and errors whose class has ``service =
    True``.
    """
    return any(
        getattr(each, "service", False) or isinstance(each, ConnectionError | TimeoutError)
        for each in hints.causes(error)
    )


def as_result(error: Exception) -> str:
    """Return what the model gets to read when a tool raises ``error``."""
    return f"{type(error).__name__}: {error}"


def shown(value: Any) -> str:
    """Return a tool's result as the text that the model reads."""
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str, ensure_ascii=False)


def failed(error: BaseException) -> list[Any]:
    """Return [cause, reason] for a call that raised an exception."""
    return [error.cause, str(error)] if isinstance(error, Refused) else values.raised(error)


def checked(call: Call, answer: Any) -> dict[str, Any]:
    """Return an environment's answer to a call as plain values. Raises Refused if the answer is invalid."""
    kind = call[0]
    if kind == "open":
        said, changes = _said(answer if answer is not None else "", "reset")
        return {"says": said, **changes}
    if kind == "end":
        return {} if answer is None else {"score": _number(answer, "score returned")}
    if kind == "tools":
        results = [_said(result, "a tool") for result in answer]
        return {"results": [said for said, _ in results], **_together([changes for _, changes in results])}
    if answer is None:
        raise Refused(
            "step returned None, like a method without a return statement: return rlflow.Turn(…), and "
            "Turn(done=True) at the end"
        )
    if not isinstance(answer, Turn):
        raise Refused(
            f"step returned {type(answer).__name__}, not a rlflow.Turn: Turn(says=…, reward=…, done=…)"
        )
    if answer.done not in (True, False):
        raise Refused(f"Turn.done: found {answer.done!r}, expected True or False")
    log = {
        str(name): float(value)
        for name, value in list(answer.log.items())[:LOGGED]
        if isinstance(value, numbers.Real) and values.KEY.fullmatch(str(name)) and math.isfinite(value)
    }
    (says, changes), reward = _said(answer.says, "Turn.says"), _number(answer.reward, "Turn.reward is")
    return {"says": says, "reward": reward, "done": bool(answer.done), "log": log, **changes}


def _together(changes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {
        name: sum(each.get(name, 0.0) for each in changes)
        for name in CHANGES
        if any(name in each for each in changes)
    }


def _said(value: Any, what: str) -> tuple[Any, dict[str, float]]:
    """Cut what an environment says to the model to its length limit, and replace invalid characters.

    Returns (text or chat messages, changes). ``changes`` counts the changes made, with keys from CHANGES.
    ``what``: the value's name in error messages. Raises Refused if the value is neither text nor messages.
    """
    short = cut_to(value, LONGEST)
    cut = short is not value
    value, replaced = without_invalid_characters(short)
    changes = {"replaced": float(replaced)} if replaced else {}
    changes |= {"cut": 1.0} if cut else {}
    if is_messages(value):
        messages = [dict(message) for message in value]
        if (over := len(packed(messages)) - LONGEST) > 0:
            content = messages[-1].get("content") or ""
            if len(content) < over:
                raise Refused(
                    f"{what}: found messages of more than {LONGEST} characters, and the last one is "
                    "too short to be cut",
                )
            messages[-1]["content"], changes["cut"] = content[: len(content) - over], 1.0
        return messages, changes
    if not isinstance(value, str):
        wrong = next(filter(None, map(fault, value)), "") if isinstance(value, list) else ""
        found = f"found an invalid message: {wrong}" if wrong else f"found {type(value).__name__}"
        raise Refused(f"{what}: {found}, expected text, or messages such as [{{'role': …, 'content': …}}]")
    return value, changes


def _number(value: Any, what: str) -> float:
    number = values.number(value, what)
    if isinstance(number, float):
        return number
    raise Refused(number[1], "overflow" if number[0] == "overflow" else "type")


if __name__ == "__main__":
    main()
