"""A real HTTP server on loopback for OpenRLHF's remote reward protocol, with or without errors."""

import contextlib
import json
import socket
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Judge(ThreadingHTTPServer):
    """Answers with the length of each query's completion, or as ``behave(handler, question)`` does.
    ``questions``: all received requests."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, behave=None, seconds=0.0):
        super().__init__(("127.0.0.1", 0), Handler)
        self.behave, self.seconds, self.questions = behave, seconds, []
        self.lock, self.now, self.most = threading.Lock(), 0, 0
        self.released = threading.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/get_reward"

    def handle_error(self, request, client_address):
        """Ignore errors: clients are expected to hang up."""


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.questions.append((self.path, question))
            server.now += 1
            server.most = max(server.most, server.now)
        try:
            time.sleep(server.seconds)
            if server.behave is None or not server.behave(self, question):
                self.say({"rewards": lengths(question)})
        finally:
            with server.lock:
                server.now -= 1

    def say(self, answer, status=200):
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return True

    def reset(self):
        """End the connection like a process that dies."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.rfile = self.wfile = open("/dev/null", "r+b", buffering=0)  # noqa: SIM115
        return True

    def log_message(self, *words):
        pass


def lengths(question):
    return [
        float(len(query) - len(prompt))
        for query, prompt in zip(question["query"], question["prompts"], strict=True)
    ]


@contextlib.contextmanager
def serving(behave=None, seconds=0.0):
    server = Judge(behave, seconds)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
