"""A small service for tests: a real HTTP server in a process of its own, controlled by its options.

Run as ``python little.py [PORT] [--slow-start FILE] [--lies] [--prints=TEXT]``. GET /health answers with the
process id; POST /get_reward gives 1 for each query.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        known = {"/health": os.getpid(), "/variables": dict(os.environ), "/words": sys.argv}
        self.say(known.get(self.path), 200 if self.path in known else 404)

    def do_POST(self):
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.say({"rewards": [1.0] * len(question.get("query", ()))}, 200)

    def say(self, answer, status):
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass


def main():
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    print("the little service begins", flush=True)
    for word in filter(lambda word: word.startswith("--prints="), sys.argv):
        print(f"{word.partition('=')[2]}\n{os.environ.get('OF_MINE_TOKEN')}\r", flush=True)
    if "--child" in sys.argv:  # this process leaves its session
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    if "--stubborn" in sys.argv:
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "--fails" in sys.argv:
        sys.exit("it has no corpus")
    ThreadingHTTPServer(
        ("127.0.0.1", int(words[0] if words else os.environ["PORT"])), Handler
    ).serve_forever()


if __name__ == "__main__":
    main()
