"""Another process can read the heartbeat page at once, without help of the writing process."""

import os
import threading

from rlflow.processes.watchdog.heartbeat_page import PLACES, HeartbeatPage, NodeUnderWay


def test_another_process_reads_the_running_nodes():
    heartbeat_page = HeartbeatPage.new()
    seen, told = os.pipe()
    with (
        heartbeat_page.during("judge", 3, 2.5),
        heartbeat_page.during("a name of more than eighty-eight bytes, é" * 3, 4, float("inf")),
    ):
        heartbeat_page.beat()
        pid = os.fork()
        if pid == 0:
            found = HeartbeatPage(heartbeat_page.file)
            os.write(told, repr((found.beats, [tuple(entry) for entry in found.entries()])).encode())
            os._exit(0)
        os.waitpid(pid, 0)
    beats, entries = eval(os.read(seen, 1 << 16), {"inf": float("inf")})
    assert beats == 1
    assert entries[0] == (1, 2.5, 3, "judge")
    assert entries[1][2:][0] == 4
    assert len(entries[1][3].encode()) <= 88
    assert HeartbeatPage(heartbeat_page.file).entries() == []
    for file in (seen, told):
        os.close(file)


def test_nodes_have_numbers_and_nest_within_a_thread():
    heartbeat_page = HeartbeatPage.new()
    assert not heartbeat_page.inside
    with heartbeat_page.during("one", 0, 1.0):
        (first,) = heartbeat_page.entries()
        assert heartbeat_page.inside
        with heartbeat_page.during("two", 0, 1.0):
            assert heartbeat_page.inside
        assert heartbeat_page.inside
    with heartbeat_page.during("one", 0, 1.0):
        (second,) = heartbeat_page.entries()
    assert not heartbeat_page.inside
    assert first.number != second.number
    assert first._replace(number=0) == second._replace(number=0) == NodeUnderWay(0, 1.0, 0, "one")


def test_only_threads_that_run_a_node_are_inside():
    heartbeat_page, beside = HeartbeatPage.new(), []
    with heartbeat_page.during("one", 0, 1.0):
        thread = threading.Thread(target=lambda: beside.append(heartbeat_page.inside))
        thread.start()
        thread.join()
    assert beside == [False]


def test_more_nodes_than_places_still_run():
    heartbeat_page = HeartbeatPage.new()
    open_ones = [heartbeat_page.during(f"node {i}", 0, 1.0) for i in range(PLACES + 3)]
    for each in open_ones:
        each.__enter__()
    assert len(heartbeat_page.entries()) == PLACES
    assert heartbeat_page.inside
    for each in reversed(open_ones):
        each.__exit__(None, None, None)
    assert heartbeat_page.entries() == []
    assert not heartbeat_page.inside


def test_a_heartbeat_page_without_a_reader_tracks_threads():
    heartbeat_page = HeartbeatPage()
    with heartbeat_page.during("one", 0, 1.0):
        assert heartbeat_page.inside
        heartbeat_page.beat()
    assert not heartbeat_page.inside
