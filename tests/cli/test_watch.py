"""`rlflow watch` where its output goes to a terminal and where it does not: what it leaves behind, and the
status it exits with."""

import json
import signal
import sys
import threading

import pytest

from rlflow.cli.watch import watch_run
from rlflow.monitoring import status


class Screen:
    """A standard output, terminal or not, that keeps what is written to it."""

    def __init__(self, terminal):
        self.terminal, self.written = terminal, []

    def isatty(self):
        return self.terminal

    def write(self, text):
        self.written.append(text)
        return len(text)

    def flush(self):
        pass

    def fileno(self):
        return 1

    @property
    def text(self):
        return "".join(self.written)


@pytest.fixture
def screen(monkeypatch):
    """Standard output as a terminal or not; a terminal of no size, which is not asked for it."""

    def stand(terminal):
        screen = Screen(terminal)
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setattr("os.get_terminal_size", lambda file=0: (100, 40))
        monkeypatch.setattr(sys, "stdout", screen)
        return screen

    return stand


@pytest.fixture
def interrupt():
    """What ctrl-C did before, which is put back."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a script starts its background jobs
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def run(tmp_path):
    """A run of two iterations that came to this end."""

    def ended(state):
        folder = tmp_path / "runs" / "grpo-1"
        folder.mkdir(parents=True)
        (folder / "settings.json").write_text(
            json.dumps({"flow": "grpo", "hp": {}, "options": {"iterations": 2}})
        )
        lines = [{"iteration": i, "reward/mean": 0.5, "seconds": 1.0} for i in (0, 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / status.FILE).write_text(
            json.dumps({"state": state, "iteration": 2, "iterations": 2, "flow": "grpo", "updated": 0.0})
        )
        return str(folder)

    return ended


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(("state", "code"), [("done", 0), ("failed", 1), ("interrupted", 1)])
def test_it_exits_as_the_run_came_to_its_end_and_leaves_no_thread(
    run, screen, interrupt, terminal, state, code
):
    shown = screen(terminal)
    assert watch_run(run(state), once=False) == code
    assert "live view" not in [thread.name for thread in threading.enumerate()]
    assert ("\x1b[?25h" in shown.text) == terminal  # the cursor is back
    # the way out, also where it was ignored
    assert (signal.getsignal(signal.SIGINT) is signal.default_int_handler) == terminal
    assert state in shown.text


@pytest.mark.parametrize("state", ["done", "failed"])
def test_one_picture_is_printed_once_and_is_no_failure(run, screen, interrupt, state):
    shown = screen(False)
    assert watch_run(run(state), once=True) == 0
    assert shown.text.count("grpo-1") == 1
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
