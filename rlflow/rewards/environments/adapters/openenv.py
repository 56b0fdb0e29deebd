"""`--env openenv:URL`: an environment on an OpenEnv server, reached over the server's WebSocket.

Each episode is one session on the server (https://github.com/meta-pytorch/OpenEnv). This needs
``--reward-network true``, because environment processes otherwise have no network access.
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
    """The server answered with an error that isn't the model's fault."""


class OpenEnvSession:
    """One episode on an OpenEnv server.

    The model's reply fills one field of the action, and the model reads one field of the observation.
    """

    repeatable = False  # the server may use randomness

    def __init__(
        self, *, id: str, action: str = "message", observation: str = "", chat: bool = False
    ) -> None:
        """Connect to a server.

        id: URL of the server. action: the action's field for the model's reply. observation: the
        observation's field that the model reads; by default the only text field, or the complete observation
        as JSON if there are several. chat: True to send the answer as a message with the role user, False to
        append it as text.
        """
        client: Any = require("websockets.sync.client", extra="environments")
        scheme, _, rest = id.rstrip("/").partition("://")
        url = f"{ {'http': 'ws', 'https': 'wss'}.get(scheme, scheme) }://{rest}/ws"
        self.socket = Patience().answer(partial(_connected, client.connect, url), left())
        self.action, self.observation, self.chat = action, observation, chat

    def reset(self, prompt: str, answer: str = "", *, seed: int, **fields: Any) -> Any:
        """Start an episode, and return the first text or message for the model.

        Of the record's data fields (``fields``), those that the server's ``reset`` accepts are sent along.
        """
        return self._read(
            self._request("reset", {"seed": seed, "prompt": prompt, "answer": answer, **fields})[
                "observation"
            ]
        )

    def step(self, text: str) -> Turn:
        """Send the model's reply as an action, and return the server's answer as a turn."""
        result = self._request("step", {self.action: text})
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

    def _request(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        self.socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self.socket.recv(left()))
        if answer["type"] == "error":
            raise ServerError(f"{kind}: {answer['data'].get('message', answer['data'])}")
        result: dict[str, Any] = answer["data"]
        return result

    def _read(self, observation: dict[str, Any]) -> Any:
        """Return the part of an observation that the model reads, as a string or a message."""
        texts = [
            value for name, value in observation.items() if isinstance(value, str) and name != "metadata"
        ]
        whole = texts[0] if len(texts) == 1 else json.dumps(observation)
        text = str(observation[self.observation]) if self.observation else whole
        return [{"role": "user", "content": text}] if self.chat and text else text


def _connected(connect: Callable[..., Any], url: str, seconds: float) -> Any:
    """Connect to a server's WebSocket, which may redirect to another URL on the same host.

    Raises Unanswered if there is no connection within ``seconds``.
    """
    exceptions: Any = require("websockets.exceptions", extra="environments")
    for _ in range(REDIRECTS):
        try:
            # Entered without "with", because the connection stays open until the end of the episode.
            return connect(url, max_size=1 << 24, open_timeout=seconds).__enter__()
        except exceptions.InvalidStatus as error:
            reply = _reply(error.response)
            target = moved(url, reply.status, reply.headers.get("Location"))
            if target is None:
                raise refused(reply) from error
            url = target
        except (OSError, exceptions.InvalidHandshake) as error:
            # A connection that ends during the handshake has an EOFError as cause.
            cause = error if isinstance(error, OSError) else error.__cause__
            kind = (
                Passing
                if isinstance(cause, EOFError) or (cause is not None and passes(cause))
                else Unanswered
            )
            raise kind("connection", f"{url} cannot be reached: {error}") from error
    raise refused(reply)


def _reply(response: Any) -> Reply:
    """Convert the HTTP response of a server that refused to open a WebSocket to a ``Reply``."""
    headers = http.client.HTTPMessage()
    for name, value in response.headers.raw_items():
        headers[name] = value
    return Reply(response.status_code, response.reason_phrase, headers, bytes(response.body or b""))
