"""What all servers have in common: address, token, `/health`, and `/metrics` for Prometheus."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from rlflow.errors import PlanError
from rlflow.extras import require

# a variable instead of a flag, since other users can see the flags of a process
from rlflow.processes.clients.http import TOKEN, token
from rlflow.processes.declare import PORT

DEFAULT_PORT = 8000
EXTRA = "services"
OPEN = ("/health",)  # paths that need no token
LONGEST = 64 << 20  # maximum size of a request's body in bytes


def application(
    name: str,
    health: Callable[[], Mapping[str, Any]],
    longest: int = LONGEST,
    end: Callable[[], object] = lambda: None,
) -> Any:
    """Return a FastAPI application with `/health` and `/metrics`.

    `/health` returns the result of ``health``. If the environment variable RLFLOW_SERVE_TOKEN is set, all
    other paths require this token as ``Authorization: Bearer``. ``longest``: maximum size of a request body,
    in bytes. ``end``: called when the server ends. Raises PlanError if a package is missing.
    """
    fastapi, prometheus = require("fastapi", EXTRA), require("prometheus_client", EXTRA)
    responses, exceptions = require("fastapi.responses", EXTRA), require("fastapi.exceptions", EXTRA)

    @contextlib.asynccontextmanager
    async def living(app: Any) -> AsyncIterator[None]:
        yield
        end()

    app = fastapi.FastAPI(title=f"rlflow serve {name}", docs_url=None, redoc_url=None, lifespan=living)
    registry = prometheus.CollectorRegistry()

    async def malformed(request: Any, error: Any) -> Any:
        """Return a response that describes the error without quoting the request.

        The request's text could contain a lone surrogate, which can't be sent.
        """
        detail = [{"loc": each["loc"], "msg": each["msg"]} for each in error.errors()]
        return fastapi.Response(json.dumps({"detail": detail}), 422, media_type="application/json")

    async def healthy() -> dict[str, Any]:
        return {"status": "ok", "server": name, **health()}

    async def metrics() -> Any:
        return fastapi.Response(
            prometheus.generate_latest(registry), media_type=prometheus.CONTENT_TYPE_LATEST
        )

    app.middleware("http")(_counted(app, registry, prometheus, responses))
    app.add_middleware(
        _Bounded,
        longest=longest,
        refusal=responses.JSONResponse({"detail": f"found a body of more than {longest} bytes"}, 413),
    )
    app.add_exception_handler(exceptions.RequestValidationError, malformed)
    app.add_api_route("/health", healthy, methods=["GET"])
    app.add_api_route("/metrics", metrics, methods=["GET"], response_model=None)
    return app


def _counted(app: Any, registry: Any, prometheus: Any, responses: Any) -> Callable[..., Awaitable[Any]]:
    """Return middleware that requires the token, and counts and times requests in ``registry``."""
    requests = prometheus.Counter(
        "rlflow_requests", "Requests, by path and status.", ("path", "status"), registry=registry
    )
    seconds = prometheus.Histogram(
        "rlflow_request_seconds", "Seconds of a request.", ("path",), registry=registry
    )
    wanted, paths = token(), _Paths(app)

    async def counted(request: Any, go_on: Callable[[Any], Awaitable[Any]]) -> Any:
        began, path = time.perf_counter(), request.url.path
        if path in OPEN or allowed(request.headers.get("authorization", ""), wanted):
            answer = await go_on(request)
        else:
            answer = responses.JSONResponse({"detail": f"the token of {TOKEN} is missing or wrong"}, 401)
        known = path if path in paths else "other"
        requests.labels(known, str(answer.status_code)).inc()
        seconds.labels(known).observe(time.perf_counter() - began)
        return answer

    return counted


class _Bounded:
    """Rejects requests with a body of more than ``longest`` bytes.

    If the request states its length, it is rejected before the body is read, otherwise as soon as too many
    bytes have arrived.
    """

    def __init__(self, app: Any, longest: int, refusal: Any) -> None:
        self._app, self._longest, self._refusal = app, longest, refusal

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        lengths = [value for name, value in scope.get("headers", ()) if name == b"content-length"]
        if any(not value.isdigit() or len(value) > 18 or int(value) > self._longest for value in lengths):
            await self._refusal(scope, receive, send)
            return
        left = self._longest

        async def received() -> Any:
            nonlocal left
            message = await receive()
            before, left = left, left - len(message.get("body", b""))
            if left < 0 <= before:
                await self._refusal(scope, receive, send)
            return message if left >= 0 else {"type": "http.disconnect"}

        async def sent(message: Any) -> None:
            if left >= 0:  # otherwise the refusal has already been sent
                await send(message)

        await self._app(scope, received, sent)


class _Paths:
    """An application's paths, including those added later."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def __contains__(self, path: str) -> bool:
        return any(getattr(route, "path", None) == path for route in self._app.routes)


def allowed(header: str, token: str) -> bool:
    """Return whether to answer a request. Without a token (""), every request is answered.

    ``header``: the request's Authorization header.
    """
    return not token or hmac.compare_digest(header.encode(), f"Bearer {token}".encode())


def check_host(host: str) -> None:
    """Raise PlanError if no token is set although other machines can reach ``host``."""
    try:
        inside = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        inside = False
    if not inside and not token():
        found = (
            f"only blanks in the variable {TOKEN}"
            if os.environ.get(TOKEN)
            else f"the variable {TOKEN} is not set"
        )
        raise PlanError.of(
            "serve-token",
            f"other machines could use a server at {host} without a token",
            found=found,
            expected="a loopback address, or a token that clients must send",
            remedy=f"omit --host, or set {TOKEN}; clients then send it as 'Authorization: Bearer …'",
        )


def chosen_port(port: int | None) -> int:
    """Return the port to listen on: ``port`` or else the environment variable PORT or else 8000.

    A run sets PORT for its services. Raises PlanError if PORT is invalid.
    """
    written = os.environ.get(PORT, "")
    if port is None and written and not (written.isdigit() and 0 < int(written) < 1 << 16):
        raise PlanError.of(
            "serve-port",
            f"the variable {PORT} is not a port",
            found=written,
            expected="a number from 1 to 65535",
            remedy="--port NUMBER",
        )
    return port if port is not None else int(written or DEFAULT_PORT)


def serve(app: Any, host: str, port: int) -> None:
    """Serve an application until a signal ends the server."""
    uvicorn = require("uvicorn", EXTRA)
    uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=2)
