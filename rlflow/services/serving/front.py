"""Hands each request to the replica of a service that has the fewest under way, and to another where that one is not there.

Run as ``python -m rlflow.services.serving.front PORT URL…``. A request whose replica dies under it is asked again of another, so a service
with replicas must give a question that comes twice the same answer.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

from rlflow.extras import require
from rlflow.services.serving.server import EXTRA, serve

METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"]
OWN = ("host", "content-length", "transfer-encoding", "connection")  # headers of each connection of its own


class Front:
    """Sends requests on."""

    def __init__(self, urls: Sequence[str]) -> None:
        httpx = require("httpx", EXTRA)
        self._under_way = dict.fromkeys(urls, 0)
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=5.0), limits=httpx.Limits(max_connections=None))
        self._fails = httpx.TransportError

    def order(self) -> list[str]:
        """The replicas, whoever has the fewest requests under way first; of equals whoever was asked longest ago."""
        return sorted(self._under_way, key=self._under_way.__getitem__)

    async def answer(self, method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes) -> Any:
        """The first answer of a replica; None where none gives one."""
        for url in self.order():
            self._under_way[url] = self._under_way.pop(url) + 1  # which puts it behind its equals
            try:
                return await self._client.request(method, url + path, headers=list(headers), content=body)
            except self._fails:
                continue
            finally:
                self._under_way[url] -= 1
        return None

    async def close(self) -> None:
        """End all connections."""
        await self._client.aclose()


def application(urls: Sequence[str]) -> Any:
    """The application that hands requests on."""
    fastapi, front = require("fastapi", EXTRA), Front(urls)

    @contextlib.asynccontextmanager
    async def living(app: Any) -> AsyncIterator[None]:
        yield
        await front.close()

    app = fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=living)

    async def passed(request: Any) -> Any:
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers = [(name, value) for name, value in request.headers.items() if name not in OWN]
        answer = await front.answer(request.method, path, headers, await request.body())
        if answer is None:
            return fastapi.Response("no replica answers", 502)
        received = {name: value for name, value in answer.headers.items() if name not in (*OWN, "content-encoding")}
        return fastapi.Response(answer.content, answer.status_code, received)

    app.add_route("/{path:path}", passed, methods=METHODS)
    return app


def main() -> None:
    """Serve at the port of the first argument for the URLs of the others."""
    serve(application(sys.argv[2:]), "127.0.0.1", int(sys.argv[1]))


if __name__ == "__main__":
    main()
