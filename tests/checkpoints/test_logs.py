"""Logs: appended lines are there, in order and once, despite full disks and remains of earlier processes."""

import contextlib
import json
import os
import resource
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.checkpoints import logs
from rlflow.checkpoints.logs import TAIL, Growing, Log, cut, objects, read_object, tail

NUMBERS, JUNK = (
    st.integers(0, 9).map(lambda n: b"%d\n" % n),
    st.binary(max_size=6).map(lambda b: b.replace(b"\n", b"") + b"\n"),
)
LINES = st.lists(st.one_of(NUMBERS, JUNK))


def below(limit):
    return lambda line: not line.strip().isdigit() or int(line) < limit


@given(LINES, st.binary(max_size=4).filter(lambda rest: b"\n" not in rest), st.integers(0, 9))
def test_truncation_leaves_the_wanted_complete_lines(tmp_path_factory, lines, torn, limit):
    path = tmp_path_factory.mktemp("logs") / "log"
    path.write_bytes(b"".join(lines) + torn)
    cut(path, below(limit))
    assert path.read_bytes() == b"".join(line for line in lines if below(limit)(line))
    assert [each.name for each in path.parent.iterdir()] == ["log"]


@pytest.fixture
def limited():
    """Limit the size of this process's files, as on a full disk, until the limit is removed."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size=before[0]: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_truncation_without_space_drops_later_lines(tmp_path, limited):
    path = tmp_path / "log"
    path.write_bytes(b"1\n2\n5\n3\n")
    limited(0)
    cut(path, below(4))
    limited()
    assert path.read_bytes() == b"1\n2\n"


@given(st.lists(st.tuples(st.integers(1, 40), st.one_of(st.none(), st.integers(0, 300))), max_size=12))
def test_lines_refused_by_a_full_disk_are_written_later(tmp_path_factory, steps):
    path = tmp_path_factory.mktemp("logs") / "log"
    before, failures = resource.getrlimit(resource.RLIMIT_FSIZE), []
    with contextlib.ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGXFSZ, signal.signal(signal.SIGXFSZ, signal.SIG_IGN))
        stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, before)
        log = Log(path, failures.append)
        for number, (length, room) in enumerate(steps):
            resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if room is None else room, before[1]))
            log.add(f"{number} {'x' * length}\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        log.close()
    written = path.read_text() if path.exists() else ""
    assert written == "".join(f"{number} {'x' * length}\n" for number, (length, _) in enumerate(steps))


def test_an_unwanted_torn_line_is_removed(tmp_path, limited):
    path, failures = tmp_path / "log", []
    log = Log(path, failures.append)
    log.add("1\n")
    limited(4)
    log.add("55555\n")
    assert path.read_bytes() == b"1\n55"
    limited()
    log.keep_only(below(4))
    log.add("2\n")
    log.close()
    assert path.read_bytes() == b"1\n2\n"


def test_a_wanted_torn_line_is_completed(tmp_path, limited):
    path = tmp_path / "log"
    log = Log(path, lambda error: None)
    log.add("1\n")
    limited(4)
    log.add("33333\n")
    limited()
    log.keep_only(lambda line: True)
    log.close()
    assert path.read_bytes() == b"1\n33333\n"


def test_lines_beyond_the_memory_limit_are_lost_completely(tmp_path, limited, monkeypatch):
    monkeypatch.setattr(logs, "LIMIT", 10)
    log = Log(tmp_path / "log", lambda error: None)
    limited(0)
    for line in ("11111\n", "222222\n", "333\n"):
        log.add(line)
    limited()
    log.add("4\n")
    log.close()
    assert (tmp_path / "log").read_text() == "11111\n333\n4\n"


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_only_regular_files_are_read_and_written(tmp_path, kind):
    path, outside, failures = tmp_path / "log", tmp_path / "outside", []
    outside.write_text("1\n")
    {"pipe": os.mkfifo, "link": lambda path: path.symlink_to(outside), "folder": os.mkdir}[kind](path)
    log = Log(path, failures.append, below(0))
    log.add("2\n")
    log.close()
    assert outside.read_text() == "1\n"
    assert len(failures) >= 2


def test_a_log_accepts_lines_while_it_is_flushed(tmp_path):
    log = Log(tmp_path / "log", lambda error: None)
    log.flush()
    log.add(json.dumps({"a": "\ud800"}) + "\n")
    log.add("\ud800\n")
    log.flush()
    log.close()
    assert (tmp_path / "log").read_text() == '{"a": "\\ud800"}\n\\ud800\n'


def test_every_line_is_accepted_by_default():
    assert logs.everything(b"") is True


def test_a_growing_file_is_read_once_line_by_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    growing = Growing(path)
    assert growing.lines() == []  # the file does not exist yet
    path.write_bytes(b"one\ntwo\nthr")
    assert growing.lines() == [b"one", b"two"]
    assert growing.lines() == []  # the third line is incomplete
    path.write_bytes(b"one\ntwo\nthree\n")
    assert growing.lines() == [b"three"]
    path.write_bytes(b"anew\n")
    assert growing.lines() == [b"anew"]
    path.write_bytes(b"anew\nagain\n")
    assert growing.lines() == [b"again"]


def test_the_last_lines_are_complete(tmp_path):
    path = tmp_path / "samples.jsonl"
    assert tail(path) == []
    path.write_bytes(b"one\n\ntwo\nthr")
    assert tail(path) == [b"one", b"two"]
    lines = [str(number).encode().rjust(99) for number in range(TAIL // 50)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    assert tail(path) == lines[-len(tail(path)) :]
    assert TAIL - 200 < 100 * len(tail(path)) <= TAIL


def test_lines_without_an_object_are_skipped():
    assert objects([b'{"a": 1}', b"[1]", b'{"a": ', b"\xff", b"[" * 100_000, b"{}"]) == [{"a": 1}, {}]


def test_a_missing_or_invalid_file_reads_as_empty(tmp_path):
    path = tmp_path / "settings.json"
    assert read_object(path) == {}
    path.write_bytes(b'{"a": 1}')
    assert read_object(path) == {"a": 1}
    assert read_object(path, 6) == {}
    path.write_bytes(b"[1]")
    assert read_object(path) == read_object(tmp_path) == {}
