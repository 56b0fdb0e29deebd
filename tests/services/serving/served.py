"""Applications of `rlflow serve` on a real server in this process."""

import contextlib
import json
import threading
import urllib.error
import urllib.request

import uvicorn


class Client:
    def __init__(self, url):
        self.url = url

    def get(self, path, **headers):
        return self._asked(urllib.request.Request(self.url + path, headers=headers))

    def post(self, path, body, **headers):
        """Return (status, content) of an answer, decoded if it is JSON."""
        headers = {"Content-Type": "application/json", **headers}
        return self._asked(urllib.request.Request(self.url + path, json.dumps(body).encode(), headers))

    def _asked(self, request):
        try:
            with urllib.request.urlopen(request, timeout=240) as answer:
                return answer.status, self._content(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, self._content(error)

    def _content(self, answer):
        text = answer.read().decode()
        return json.loads(text) if answer.headers.get_content_type() == "application/json" else text


@contextlib.contextmanager
def asking(app):
    """A client of an application."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", loop="asyncio"))
    began, startup = threading.Event(), server.startup

    async def started(sockets=None):
        await startup(sockets)
        began.set()

    server.startup = started
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert began.wait(20)
    try:
        yield Client(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}")
    finally:
        server.should_exit = True
        thread.join()
