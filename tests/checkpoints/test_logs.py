"""Logs: what is added is there, in order and once, whatever the disk takes and whatever an earlier process
left."""

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
def test_a_cut_leaves_the_whole_lines_that_are_wanted(tmp_path_factory, lines, torn, limit):
    path = tmp_path_factory.mktemp("logs") / "log"
    path.write_bytes(b"".join(lines) + torn)
    cut(path, below(limit))
    assert path.read_bytes() == b"".join(line for line in lines if below(limit)(line))
    assert [each.name for each in path.parent.iterdir()] == ["log"]


@pytest.fixture
def limited():
    """Files of this process can have so many bytes and no more, as on a disk that is full, until it is
    undone."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size=before[0]: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_without_room_a_cut_gives_up_later_lines_rather_than_leave_one_twice(tmp_path, limited):
    path = tmp_path / "log"
    path.write_bytes(b"1\n2\n5\n3\n")
    limited(0)
    cut(path, below(4))
    limited()
    assert path.read_bytes() == b"1\n2\n"


@given(st.lists(st.tuples(st.integers(1, 40), st.one_of(st.none(), st.integers(0, 300))), max_size=12))
def test_what_a_full_disk_does_not_take_comes_later_whole_and_in_order(tmp_path_factory, steps):
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


def test_a_line_that_is_torn_by_a_full_disk_and_then_not_wanted_goes(tmp_path, limited):
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


def test_a_line_that_is_torn_by_a_full_disk_and_still_wanted_comes_whole(tmp_path, limited):
    path = tmp_path / "log"
    log = Log(path, lambda error: None)
    log.add("1\n")
    limited(4)
    log.add("33333\n")
    limited()
    log.keep_only(lambda line: True)
    log.close()
    assert path.read_bytes() == b"1\n33333\n"


def test_what_memory_does_not_hold_is_lost_whole(tmp_path, limited, monkeypatch):
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
def test_what_is_no_regular_file_is_neither_read_nor_written(tmp_path, kind):
    path, outside, failures = tmp_path / "log", tmp_path / "outside", []
    outside.write_text("1\n")
    {"pipe": os.mkfifo, "link": lambda path: path.symlink_to(outside), "folder": os.mkdir}[kind](path)
    log = Log(path, failures.append, below(0))
    log.add("2\n")
    log.close()
    assert outside.read_text() == "1\n"
    assert len(failures) >= 2


def test_a_log_is_on_the_disk_when_it_is_flushed_and_takes_lines_meanwhile(tmp_path):
    log = Log(tmp_path / "log", lambda error: None)
    log.flush()
    log.add(json.dumps({"a": "\ud800"}) + "\n")
    log.add("\ud800\n")
    log.flush()
    log.close()
    assert (tmp_path / "log").read_text() == '{"a": "\\ud800"}\n\\ud800\n'


def test_every_line_is_taken_where_nothing_else_is_said():
    assert logs.everything(b"") is True


def test_a_file_that_grows_is_read_line_by_line_once_and_anew_where_it_has_shrunk(tmp_path):
    path = tmp_path / "metrics.jsonl"
    growing = Growing(path)
    assert growing.lines() == []  # it is not there yet
    path.write_bytes(b"one\ntwo\nthr")
    assert growing.lines() == [b"one", b"two"]
    assert growing.lines() == []  # the third is not whole
    path.write_bytes(b"one\ntwo\nthree\n")
    assert growing.lines() == [b"three"]
    path.write_bytes(b"anew\n")
    assert growing.lines() == [b"anew"]
    path.write_bytes(b"anew\nagain\n")
    assert growing.lines() == [b"again"]


def test_the_last_lines_are_whole_and_within_the_end_of_the_file(tmp_path):
    path = tmp_path / "samples.jsonl"
    assert tail(path) == []
    path.write_bytes(b"one\n\ntwo\nthr")
    assert tail(path) == [b"one", b"two"]
    lines = [str(number).encode().rjust(99) for number in range(TAIL // 50)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    assert tail(path) == lines[-len(tail(path)) :]
    assert TAIL - 200 < 100 * len(tail(path)) <= TAIL


def test_lines_that_hold_no_object_are_passed_over():
    assert objects([b'{"a": 1}', b"[1]", b'{"a": ', b"\xff", b"[" * 100_000, b"{}"]) == [{"a": 1}, {}]


def test_a_file_that_is_not_there_is_no_object_or_is_too_long_is_read_as_an_empty_one(tmp_path):
    path = tmp_path / "settings.json"
    assert read_object(path) == {}
    path.write_bytes(b'{"a": 1}')
    assert read_object(path) == {"a": 1}
    assert read_object(path, 6) == {}
    path.write_bytes(b"[1]")
    assert read_object(path) == read_object(tmp_path) == {}
