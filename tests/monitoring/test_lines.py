"""Partial output of processes becomes lines, which wait at a worker until it answers."""

import itertools
import threading

from hypothesis import given
from hypothesis import strategies as st

from rlflow.monitoring.lines import LINE, WAITING, Lines, WaitingLines


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=8))
def test_lines_do_not_depend_on_how_output_is_split(text, places):
    cuts = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    heard = []
    one = Lines(heard.append)
    for start, end in itertools.pairwise(cuts):
        if start < end:
            one.on_output(text[start:end])
    one.close()
    assert heard == (text[:-1] if text.endswith(b"\n") else text).split(b"\n") if text else heard == []


def test_an_empty_piece_ends_a_line_and_long_lines_are_cut():
    heard = []
    one = Lines(heard.append)
    one.on_output(b"begun")
    assert heard == []
    one.on_output(b"")
    one.on_output(b"x" * (LINE + 1))
    assert heard == [b"begun", b"x" * (LINE + 1)]


def test_lines_of_threads_do_not_mix():
    heard = []
    one = Lines(heard.append)
    one.on_output(b"first ")
    other = threading.Thread(target=one.on_output, args=(b"second\n",))
    other.start()
    other.join()
    one.on_output(b"ends\n")
    assert heard == [b"second", b"first ends"]


def test_waiting_lines_are_taken_once_and_the_oldest_are_dropped():
    waiting = WaitingLines()
    waiting.on_output(b"one\ntwo\nthr")
    assert waiting.take() == b"one\ntwo\n"
    waiting.on_output(b"ee\n")
    assert (waiting.take(), waiting.take()) == (b"three\n", b"")
    waiting.on_output(b"".join(b"%d\n" % number for number in range(WAITING + 2)))
    assert waiting.take() == b"".join(b"%d\n" % number for number in range(2, WAITING + 2))
