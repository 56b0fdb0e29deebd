"""`--env openenv:URL`: an environment that an OpenEnv server holds (https://github.com/meta-pytorch/OpenEnv),
over its WebSocket.

A session of the server is an episode. The processes of environments have a network with ``--reward-network
true`` alone.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from functools import partial
from typing import Any

from rlflow.author.turn import Turn
from rlflow.extras import require
from rlflow.processes.clients.http import REDIRECTS, Reply, moved, passes, refused
from rlflow.processes.clients.patience import Passing, Patience, Unanswered, left


class ServerError(RuntimeError):
    """The server answered with an error: none of the model's making."""


class OpenEnvSession:
    """One episode. What the model says is one field of the action; what it reads is one field of the
    observation."""

    repeatable = False  # nothing is known of what the server does by chance

    def __init__(
        self, *, id: str, action: str = "message", observation: str = "", chat: bool = False
    ) -> None:
        """id: URL of the server. action: the action's field for what the model said. observation: the field
        that the model reads; without, the only one with text, or else all as JSON. chat: whether that is a
        message of the role user, or text."""
        client: Any = require("websockets.sync.client", extra="environments")
        scheme, _, rest = id.rstrip("/").partition("://")
        url = f"{ {'http': 'ws', 'https': 'wss'}.get(scheme, scheme) }://{rest}/ws"
        self.socket = Patience().answer(partial(_connected, client.connect, url), left())
        self.action, self.observation, self.chat = action, observation, chat

    def reset(self, prompt: str, answer: str = "", *, seed: int, **fields: Any) -> Any:
        """Begin. The server's ``reset`` gets those of the record's fields that it takes."""
        return self._read(
            self._asked("reset", {"seed": seed, "prompt": prompt, "answer": answer, **fields})["observation"]
        )

    def step(self, text: str) -> Turn:
        """Act."""
        result = self._asked("step", {self.action: text})
        done = bool(result.get("done"))
        return Turn(
            says="" if done else self._read(result["observation"]),
            reward=float(result.get("reward") or 0.0),
            done=done,
        )

    def close(self) -> None:
        """End the session."""
        self.socket.send(json.dumps({"type": "close"}))
        self.socket.close()

    def _asked(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        self.socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self.socket.recv(left()))
        if answer["type"] == "error":
            raise ServerError(f"{kind}: {answer['data'].get('message', answer['data'])}")
        result: dict[str, Any] = answer["data"]
        return result

    def _read(self, observation: dict[str, Any]) -> Any:
        """The text of an observation that the model reads, or its message."""
        texts = [
            value for name, value in observation.items() if isinstance(value, str) and name != "metadata"
        ]
        whole = texts[0] if len(texts) == 1 else json.dumps(observation)
        text = str(observation[self.observation]) if self.observation else whole
        return [{"role": "user", "content": text}] if self.chat and text else text


def _connected(connect: Callable[..., Any], url: str, seconds: float) -> Any:
    """The connection to a server, which may redirect within its host. Raises Unanswered for one that cannot
    be had within so many seconds."""
    exceptions: Any = require("websockets.exceptions", extra="environments")
    for _ in range(REDIRECTS):
        try:
            # it lives as long as the episode
            return connect(url, max_size=1 << 24, open_timeout=seconds).__enter__()
        except exceptions.InvalidStatus as error:
            reply = _reply(error.response)
            target = moved(url, reply.status, reply.headers.get("Location"))
            if target is None:
                raise refused(reply) from error
            url = target
        except (OSError, exceptions.InvalidHandshake) as error:
            # of a connection that ends within the handshake
            cause = error if isinstance(error, OSError) else error.__cause__
            kind = (
                Passing if isinstance(cause, EOFError) or cause is not None and passes(cause) else Unanswered
            )
            raise kind("connection", f"{url} cannot be reached: {error}") from error
    raise refused(reply)


def _reply(response: Any) -> Reply:
    """The answer of a server that does not open a WebSocket."""
    headers = http.client.HTTPMessage()
    for name, value in response.headers.raw_items():
        headers[name] = value
    return Reply(response.status_code, response.reason_phrase, headers, bytes(response.body or b""))
