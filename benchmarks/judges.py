"""Measure the time to score rows with rewards that wait for a slow judge: medians of warm calls.

    python benchmarks/judges.py [--rows 1024] [--seconds 0.2] [--workers 32] [--turns 3]

Three judges answer after the same time: a function that blocks for each row, an async function that awaits
for each row, and a loopback server that gets a batch. The first call starts the processes and is printed
separately.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rlflow import Batch
from rlflow.rewards import RewardPool, bind, parse_reward

FILE = """
import asyncio, time

def blocks(completion):
    time.sleep({seconds})
    return 1.0

async def awaits(completion):
    await asyncio.sleep({seconds})
    return 1.0
"""


@contextlib.contextmanager
def served(seconds: float) -> Iterator[str]:
    """Run a server that gives each row a reward of 1 after ``seconds``, and yield its URL."""

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            time.sleep(seconds)
            body = json.dumps({"rewards": [1.0] * len(question["query"])}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/get_reward"
        server.shutdown()


def measured(reward: str, workers: int | None, rows: int, turns: int) -> tuple[float, float]:
    """Return (seconds of the first call, median seconds of ``turns`` later calls)."""
    batch = Batch.of(prompt=["1+1="] * rows, completion=["2"] * rows, answer=["2"] * rows)
    with RewardPool(workers) as pool:
        (judge,) = bind([parse_reward(reward)], pool)
        times = []
        for _ in range(turns + 1):
            began = time.perf_counter()
            scores = judge.score(batch)
            times.append(time.perf_counter() - began)
            assert scores.values.tolist() == [1.0] * rows
    return times[0], statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, served(options.seconds) as url:
        file = Path(folder) / "judge.py"
        file.write_text(FILE.format(seconds=options.seconds))
        for what, reward, workers in [
            (f"blocks, {options.workers} workers", f"{file}:blocks", options.workers),
            ("blocks, default number of workers", f"{file}:blocks", None),
            ("awaits", f"{file}:awaits", None),
            ("server", url, None),
        ]:
            first, later = measured(reward, workers, options.rows, options.turns)
            print(
                f"{what}: {later:.2f} s for {options.rows} rows at {options.seconds:g} s; the first call "
                f"{first:.2f} s"
            )


if __name__ == "__main__":
    main()
