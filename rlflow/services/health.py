"""Whether a service serves: it answers its health path with status 200, or, where it has none, takes a connection."""

from __future__ import annotations

import http.client
import socket
from urllib.parse import urlsplit

READ = 1 << 16  # most bytes of an answer that are read


def unhealthy(url: str, path: str, seconds: float) -> str:
    """Why a service does not serve now; empty where it does. ``url``: of the service; ``path``: of its health, or an empty text;
    ``seconds``: how long it may take to answer."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    try:
        if not path:
            socket.create_connection((parts.hostname or "", port), seconds).close()
            return ""
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        return _asked(kind(parts.hostname or "", port, timeout=seconds), parts.path + path)
    except TimeoutError:
        return f"no answer within {seconds:g} s"
    except (OSError, http.client.HTTPException) as error:
        return f"no answer: {error.strerror if isinstance(error, OSError) and error.strerror else error or type(error).__name__}"


def _asked(connection: http.client.HTTPConnection, path: str) -> str:
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read(READ)
        return "" if answer.status == http.client.OK else f"status {answer.status} {answer.reason}"
    finally:
        connection.close()
