"""`rlflow watch` on a terminal and elsewhere: its final output and its exit status."""

import json
import signal
import sys
import threading

import pytest

from rlflow.cli.watch import watch_run
from rlflow.monitoring import status


class Screen:
    """A standard output, terminal or not, that keeps all writes."""

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
    """Standard output as a terminal or not; the terminal has no size, and the view must not read one."""

    def stand(terminal):
        screen = Screen(terminal)
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setattr("os.get_terminal_size", lambda file=0: (100, 40))
        monkeypatch.setattr(sys, "stdout", screen)
        return screen

    return stand


@pytest.fixture
def interrupt():
    """Restore the previous handler of ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # like the background jobs of a script
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def run(tmp_path):
    """A run of two iterations with the given end."""

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
def test_watch_exits_like_the_run_and_leaves_no_thread(run, screen, interrupt, terminal, state, code):
    shown = screen(terminal)
    assert watch_run(run(state), once=False) == code
    assert "live view" not in [thread.name for thread in threading.enumerate()]
    assert ("\x1b[?25h" in shown.text) == terminal  # the cursor is visible again
    # the handler for leaving, also if the signal was ignored
    assert (signal.getsignal(signal.SIGINT) is signal.default_int_handler) == terminal
    assert state in shown.text


@pytest.mark.parametrize("state", ["done", "failed"])
def test_a_single_view_is_printed_and_exits_with_0(run, screen, interrupt, state):
    shown = screen(False)
    assert watch_run(run(state), once=True) == 0
    assert shown.text.count("grpo-1") == 1
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
