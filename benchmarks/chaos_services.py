"""Services of a run that fail: they are killed, suspended, slow, or answer badly.

Also runs that are killed together with a service. Each row of the iteration with the failure is a fault.
Detected: the row's score is missing with the right cause, or the row was scored after the service was
restarted. Survived: the run reached its end. Wrong: a row has a wrong score.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import run_faults as faults  # of tests/runs
from chaos_folders import Outcome, Place

import rlflow
from rlflow.monitoring.reporter import Quiet
from rlflow.runs import resume

JUDGE = """
import json, os, pathlib, signal, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

mode, folder = sys.argv[1], pathlib.Path(sys.argv[2])
if mode == "tells":
    print(os.environ["OF_MINE_TOKEN"], sys.argv, os.environ, flush=True)
FAULTS = {"kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
          "kill the run": lambda: os.kill(os.getppid(), signal.SIGKILL)}

class Judge(BaseHTTPRequestHandler):
    def do_GET(self):
        self.say(b"{}")

    def do_POST(self):
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open(folder / "asked", "a") as file:
            file.write("x")
        answer = json.dumps({"rewards": [float(len(q) - len(p)) for q, p in zip(question["query"], question["prompts"])]}).encode()
        second = (folder / "asked").stat().st_size == 2
        if mode == "slow":
            time.sleep(0.2)
        if second and mode in FAULTS:
            FAULTS[mode]()
        self.say(answer[:-9] if second and mode == "truncated" else answer, 500 if second and mode == "500" else 200)

    def say(self, body, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass

ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Judge).serve_forever()
"""
MODES: dict[str, tuple[str, ...]] = {  # failure of the service → allowed causes of missing rows
    "kill": ("connection",),
    "stop": ("connection", "timeout"),
    "500": ("status",),
    "truncated": ("reply",),
    "slow": (),
}
ROWS, ITERATIONS = 16, 6


def failing(place: Place) -> Iterator[Outcome]:
    """Run six iterations with each failure. The service fails in the second iteration."""
    for mode in place.of(MODES, 5):
        folder = _folder(place, mode)
        code = faults.in_child(partial(_run, mode, folder))
        lines, rows = _lines(folder, "metrics"), _lines(folder, "samples")
        missing = sum(int(line["reward/missing"]) for line in lines)
        named = sum(
            int(line.get(f"reward/missing_get_reward/{cause}", 0)) for line in lines for cause in MODES[mode]
        )
        wrong = any(row["scores"] is not None and row["scores"] != len(row["completion"]) for row in rows)
        for _ in range(ROWS):
            yield Outcome(True, missing == named, code == 0 and len(lines) == ITERATIONS, wrong)


def killed(place: Place) -> Iterator[Outcome]:
    """Kill the run while its service scores rows.

    The service must end too. A resumed run must start a new service.
    """
    folder = _folder(place, "kill the run")
    code = faults.in_child(partial(_run, "kill the run", folder))
    again = faults.in_child(
        partial(
            resume.resume, folder / "grpo-1", {"service.judge": _command("kill the run", folder)}, Quiet()
        )
    )
    rows = _lines(folder, "samples")
    yield Outcome(
        True,
        code == -signal.SIGKILL,
        again == 0 and len(_lines(folder, "metrics")) == ITERATIONS,
        any(row["scores"] != len(row["completion"]) for row in rows),
    )


def telling(place: Place) -> Iterator[Outcome]:
    """Let a service print its environment and arguments.

    No file in the run's folder may contain the secret in them.
    """
    folder, secret = _folder(place, "tells"), "SEKRET-of-a-service"
    os.environ["OF_MINE_TOKEN"] = secret
    code = faults.in_child(partial(_run, "tells", folder))
    leaks = [
        path
        for path in (folder / "grpo-1").rglob("*")
        if path.is_file() and secret.encode() in path.read_bytes()
    ]
    masked = "***" in (folder / "grpo-1" / "services" / "judge.log").read_text()
    yield Outcome(True, masked, code == 0, bool(leaks))


def _folder(place: Place, mode: str) -> Path:
    folder = place.folder / mode.replace(" ", "-")
    folder.mkdir()
    (folder / "judge.py").write_text(JUDGE)
    return folder


def _command(mode: str, folder: Path) -> str:
    return shlex.join([sys.executable, str(folder / "judge.py"), mode, str(folder)])


def _run(mode: str, folder: Path) -> None:
    rlflow.run(
        "grpo",
        backend="null",
        prompts=8,
        iterations=ITERATIONS,
        threads=1,
        max_missing=1.0,
        held_out=0,
        save_every=1,
        reward="{judge}/get_reward",
        reward_timeout=10.0,
        max_bad=0,
        out=str(folder),
        **{"hp.samples": 2, "service.judge": _command(mode, folder), "service.judge.wait": 1.5},
    )


def _lines(folder: Path, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "grpo-1" / f"{file}.jsonl").read_text().splitlines()]


CLASSES: dict[str, Callable[[Place], Iterator[Outcome]]] = {
    "service is killed, stopped, slow, answers badly": failing,
    "run is killed while its service runs": killed,
    "secrets that a service prints": telling,
}
