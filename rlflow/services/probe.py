"""The health check of a service.

A service is healthy if its health path returns status 200 or, if it has no health path, if it accepts a
connection.
"""

from __future__ import annotations

import http.client
import socket
from urllib.parse import urlsplit

from rlflow.processes.clients.http import HttpClient


def unhealthy(url: str, path: str, seconds: float) -> str:
    """Return why a service isn't serving right now, or "" if it is.

    ``path``: the service's health path, or "". ``seconds``: time limit for the check.
    """
    try:
        if not path:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            socket.create_connection((parts.hostname or "", port), seconds).close()
            return ""
        reply = HttpClient().once("GET", url + path, b"", seconds, {})
        return "" if reply.status == http.client.OK else f"status {reply.said}"
    except TimeoutError:
        return f"no answer within {seconds:g} s"
    except (OSError, http.client.HTTPException) as error:
        return f"no answer: {error.strerror if isinstance(error, OSError) and error.strerror else error or type(error).__name__}"
