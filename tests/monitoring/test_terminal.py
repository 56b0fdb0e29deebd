"""Standard streams never end a run: the terminal may hang up, or a stream may be closed at the start."""

import errno
import io
import os
import pty
import subprocess
import sys

import pytest

from rlflow.monitoring.terminal import Steady, fitted, steady


class Broken:
    def __init__(self, number, descriptor):
        self.number, self.descriptor = number, descriptor

    def write(self, text):
        raise OSError(self.number, "no")

    def flush(self):
        raise OSError(self.number, "no")

    def fileno(self):
        return self.descriptor


def test_output_to_a_lost_terminal_is_discarded():
    other, terminal = pty.openpty()
    with open(terminal, "w", buffering=1) as stream:
        steady_stream = Steady(stream)
        print("heard", file=steady_stream)
        assert os.read(other, 100) == b"heard\r\n"
        assert steady_stream.isatty()
        os.close(other)
        print("not heard", file=steady_stream)
        print("nor this", file=steady_stream, flush=True)
        assert os.readlink(f"/proc/self/fd/{terminal}") == os.devnull


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE])
def test_other_errors_are_raised(number):
    with pytest.raises(OSError) as raised:  # noqa: PT011
        Steady(Broken(number, 2)).write("text")
    assert raised.value.errno == number
    with pytest.raises(OSError):  # noqa: PT011
        Steady(Broken(number, 2)).flush()


def test_only_terminals_are_replaced_and_only_temporarily(monkeypatch):
    other, terminal = pty.openpty()
    with open(terminal, "w") as stream, open(os.devnull, "w") as null:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", null)
        with steady():
            assert isinstance(sys.stdout, Steady)
            assert sys.stderr is null
            outer = sys.stdout
            with steady():
                assert sys.stdout is outer
        assert sys.stdout is stream
    os.close(other)


def test_closed_streams_are_discarded_and_never_reach_a_file(tmp_path):
    text = (
        "from rlflow.monitoring.terminal import open_all\nopen_all()\nimport sys\nfile = open(sys.argv[1], "
        "'w')\nprint('a'); print('b', file=sys.stderr); import os; os.write(1, b'c'); "
        "file.write(repr(sys.stdin.read())); file.flush()"
    )
    words = [sys.executable, "-c", text, str(tmp_path / "file")]
    assert subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *words]).returncode == 0
    assert (tmp_path / "file").read_text() == "''"


class Wide(io.StringIO):
    """A stream to a terminal."""

    def isatty(self):
        return True


def test_long_lines_are_broken_between_words_only_for_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    text = (
        "hard.py:41: stage 'favour_hard' needs column 'score', which it does not have\n"
        "  found:    columns prompt, answer, tokens, mask\n"
        "  remedy:   rlflow run /a/path/that/is/longer/than/a/line/of/the/terminal"
    )
    assert fitted(text, io.StringIO()) == text
    assert fitted(text, Wide()).splitlines() == [
        "hard.py:41: stage 'favour_hard' needs",
        "  column 'score', which it does not have",
        "  found:    columns prompt, answer,",
        "            tokens, mask",
        "  remedy:   rlflow run",
        "            /a/path/that/is/longer/than/a/line/of/the/terminal",
    ]
