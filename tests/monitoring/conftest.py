"""Real runs of the null backend, and a pseudo-terminal to show them on."""

import dataclasses
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading

import pytest
from keyed import figures

import rlflow
from rlflow.cli.main import exit_code
from rlflow.monitoring import status
from rlflow.monitoring.reporter import RunInfo


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A folder of runs with one finished run. Tests that change it copy it first."""
    base = tmp_path_factory.mktemp("finished")
    # sampling takes the longest, so a short table shows it
    rlflow.run(
        "ppo",
        backend="null",
        iterations=3,
        prompts=4,
        out=str(base),
        **{"hp.max_tokens": 4, "actor.generate_seconds": 0.02},
    )
    return base


@pytest.fixture
def info(tmp_path):
    folder = tmp_path / "runs" / "ppo-1"
    folder.mkdir(parents=True)
    return RunInfo(
        folder, "ppo", 12, {"flow": "ppo", "hp": {"clip": 0.2}, "options": {"seed": 0}}, held_out=64
    )


@pytest.fixture
def metrics():
    """The metrics of an iteration as the loop reports them."""
    return figures(
        {
            "reward/mean": 0.625,
            "reward/missing": 0.0,
            "actor.update/clipped": 0.125,
            "actor.update/loss": float("nan"),
            "policy/kl_reference": 0.0042,
            "policy/entropy": 1.375,
            "response/length": 17.5,
            "response/truncated": 0.25,
            "response/tokens_per_second": 12345.0,
            "own/number": 7.0,
            "seconds": 2.0,
        }
    )


@pytest.fixture
def stages():
    """Seconds of nodes."""
    return {"actor.generate": 1.5, "actor.update": 0.5}


class Terminal:
    """Both ends of a pseudo-terminal; a thread reads the output."""

    def __init__(self, columns=100, rows=40):
        self.master, slave = pty.openpty()
        self.resize(columns, rows)
        self.stream = os.fdopen(slave, "w")
        self.seen = b""
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def resize(self, columns, rows):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _read(self):
        while True:
            try:
                part = os.read(self.master, 65536)
            except OSError:  # the other end is closed
                part = b""
            with self._changed:
                self.seen += part
                self._changed.notify_all()
            if not part:
                return

    def wait_for(self, text):
        with self._changed:
            assert self._changed.wait_for(lambda: text.encode() in self.seen, timeout=240), self.seen

    def end(self):
        """Return all output after closing the writing end."""
        if not self.stream.closed:
            self.stream.close()
        self._reader.join(20)
        return self.seen.decode()


@pytest.fixture
def on_terminal(terminal, tmp_path):
    """Start `rlflow …` on the terminal in a session of its own. Ctrl-C is ignored at the start, as for
    background jobs of a script; it must still work. The fixture kills all remains at the end."""
    started = []

    def start(*words):
        ends = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.stream)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the child inherits it
        try:
            command = [sys.executable, "-m", "rlflow.cli.main", *words]
            started.append(subprocess.Popen(command, cwd=tmp_path, start_new_session=True, **ends))
        finally:
            signal.signal(signal.SIGINT, before)
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    made = Terminal()
    yield made
    made.end()
    os.close(made.master)


@pytest.fixture
def written(tmp_path):
    """Write a run folder in runs/: settings, a line of metrics for each iteration, evaluations after some,
    and row accounting."""

    def write(name, settings=None, hp=None, rewards=(0.5,), evaluations=(), state="done", **options):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        hp = {"samples": 8, **(hp or {})}
        options = {"seed": 0, "prompts": 4, "name": name, "iterations": len(rewards), **options}
        content = {
            "flow": "grpo",
            "graph": "g1",
            "hp": hp,
            "options": options,
            "values": {"actor.lr": "1e-4"},
            **(settings or {}),
        }
        (folder / "settings.json").write_text(json.dumps(content))
        lines = [
            {"iteration": i, "evaluation/sampled": value, "evaluation/greedy": 1.0}
            for i, value in evaluations
        ]
        lines += [
            {
                "iteration": i,
                "reward/mean": value,
                "reward/missing": 0.0,
                "own/number": 10.0 * i,
                "seconds": 2.0,
            }
            for i, value in enumerate(rewards)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        count = {"groups": 4, "rows": 32, "tokens": 100}
        end = {
            "source": "actor.generate",
            "fate": "trained",
            "node": "actor.update",
            "groups": 3,
            "rows": 24,
            "tokens": 75,
        }
        left = {
            "source": "actor.generate",
            "fate": "left out",
            "node": "actor.update",
            "groups": 1,
            "rows": 8,
            "tokens": 25,
        }
        outcomes = [
            {"iteration": i, "sampled": {"actor.generate": count}, "opened": {}, "fates": [end, left]}
            for i in range(len(rewards))
        ]
        (folder / "fates.jsonl").write_text("".join(json.dumps(line) + "\n" for line in outcomes))
        begun = status.begun("grpo", options["iterations"])
        status.write(folder, dataclasses.replace(begun, state=state, iteration=len(rewards)))
        return folder

    return write


@pytest.fixture
def judged(written):
    """Write the folder of a run with two reward roles; the second has this mean. Takes the keywords of
    ``written``."""

    def write(name, mean, **keywords):
        folder = written(name, **keywords)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lines = [
            {**line, "style/mean": mean, "style/missing": 0.0} if "reward/mean" in line else line
            for line in lines
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder

    return write


@pytest.fixture
def called(monkeypatch, capsys, tmp_path):
    """Run a command in this process; return its exit code and output."""

    def call(*words):
        monkeypatch.chdir(tmp_path)
        return exit_code(list(map(str, words))), *capsys.readouterr()

    return call
