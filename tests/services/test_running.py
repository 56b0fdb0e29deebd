"""Services as real processes on loopback."""

import contextlib
import json
import os
import secrets
import signal
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from rlflow.errors import PlanError
from rlflow.monitoring import served
from rlflow.monitoring.secrets import remember
from rlflow.processes.addresses import addresses
from rlflow.processes.clients.http import post
from rlflow.processes.declare import split_services
from rlflow.processes.watchdog import process_tag
from rlflow.services.running import Services

LITTLE = f"{sys.executable} {Path(__file__).parent / 'little.py'}"


def fetch(url, path="/health"):
    with urllib.request.urlopen(url + path, timeout=240) as answer:
        return json.load(answer)


class Notes(list):
    """The notes, and a way to wait for one."""

    def __init__(self):
        self.came = threading.Condition()

    def __call__(self, text):
        with self.came:
            self.append(text)
            self.came.notify_all()

    def awaited(self, word):
        with self.came:
            assert self.came.wait_for(lambda: any(word in text for text in self), 60), self


@contextlib.contextmanager
def running(tmp_path, **flags):
    services, _ = split_services(
        {f"service.{name.replace('__', '.')}": value for name, value in flags.items()}
    )
    places, notes, name = addresses(services), Notes(), secrets.token_hex(8)
    run = Services(services, places, {}, tmp_path / "aside", name, notes)
    run.name = name
    try:
        run.start()
        run.ready()
        yield run, {name: place.url for name, place in places.items()}, notes
    finally:
        run.close()
        assert process_tag.marked(name) == []
        assert not (tmp_path / "aside").exists()


def until(holds):
    """Check repeatedly, for at most four minutes."""
    limit, turn = time.monotonic() + 240, threading.Event()
    while not holds():
        assert time.monotonic() < limit
        turn.wait(0.05)


def state(folder, name):
    return {each.name: each.state for each in served.read(folder)}[name]


def test_a_service_finds_its_port_and_others_find_the_service(tmp_path):
    with running(
        tmp_path, judge=f"{LITTLE} {{port}} --asks {{search}}/retrieve", search=LITTLE, judge__cpus=2
    ) as (_, urls, _):
        assert fetch(urls["judge"], "/words")[1:] == [
            urls["judge"].rpartition(":")[2],
            "--asks",
            f"{urls['search']}/retrieve",
        ]
        variables = fetch(urls["judge"], "/variables")
        assert variables["RLFLOW_SERVICE_SEARCH"] == urls["search"] == os.environ["RLFLOW_SERVICE_SEARCH"]
        assert (variables["OMP_NUM_THREADS"], variables["CUDA_VISIBLE_DEVICES"]) == ("2", "")
        assert variables["PATH"].startswith(os.path.dirname(sys.executable))
    assert "RLFLOW_SERVICE_SEARCH" not in os.environ


def test_an_ended_service_is_reported_with_its_last_lines(tmp_path):
    with pytest.raises(PlanError) as error, running(tmp_path, search=f"{LITTLE} {{port}} --fails"):
        pass
    text = str(error.value)
    assert f"service 'search' does not serve: {LITTLE}" in text
    assert "it exited with code 1 after" in text
    assert "    the little service begins\n    it has no corpus\n" in text


def test_the_output_file_has_no_secrets_or_control_characters(tmp_path, monkeypatch):
    monkeypatch.setenv("OF_MINE_TOKEN", "SEKRET-by-its-variable")
    remember({"api_key": "SEKRET-by-its-flag"})
    with running(tmp_path, search=f"{LITTLE} {{port}} --prints=a:SEKRET-by-its-flag:\x1b[2J") as (
        services,
        _,
        _,
    ):
        services.settle(tmp_path)
    text = (tmp_path / "services" / "search.log").read_text()
    assert text.splitlines()[1:] == ["the little service begins", "a:***:\\x1b[2J", "***"]


def test_a_service_on_another_port_is_given_up_in_time(tmp_path):
    with (
        pytest.raises(PlanError, match="no answer: Connection refused, 0.3 s after its start"),
        running(tmp_path, search=f"{sys.executable} -c 'import time; time.sleep(1000)'", search__wait=0.3),
    ):
        pass


@pytest.mark.slow
def test_a_service_must_answer_with_200(tmp_path):
    with (
        pytest.raises(PlanError, match="status 404"),
        running(tmp_path, search=LITTLE, search__health="/ready", search__wait=5),
    ):
        pass


def test_a_service_without_a_health_path_must_accept_connections(tmp_path):
    with running(tmp_path, search=LITTLE, search__health="") as (_, urls, _):
        assert fetch(urls["search"]) > 0


def test_a_missing_command_leaves_nothing(tmp_path):
    with (
        pytest.raises(PlanError, match="service 'judge' cannot be started: no-such-program"),
        running(tmp_path, search=LITTLE, judge="no-such-program --port {port}"),
    ):
        pass


def test_an_external_service_is_awaited_and_never_stopped(tmp_path):
    with running(tmp_path, search=LITTLE) as (_, urls, _):
        with running(tmp_path / "other", far=urls["search"]) as (other, far, _):
            assert (far["far"], other.members) == (urls["search"], [])
            assert os.environ["RLFLOW_SERVICE_FAR"] == urls["search"]
            (tmp_path / "other").mkdir()
            other.settle(tmp_path / "other")
        assert list(served.lines(tmp_path / "other")) == [f"far at {urls['search']}, not started by this run"]
        assert fetch(urls["search"]) > 0
    with (
        pytest.raises(PlanError, match="service 'far', which this run does not start, does not serve"),
        running(tmp_path, far=urls["search"], far__wait=0.2),
    ):
        pass


def test_the_longest_allowed_outage_is_known(tmp_path):
    services, _ = split_services(
        {"service.search": LITTLE, "service.search.wait": 3, "service.far": "http://far"}
    )
    assert Services(services, addresses(services), {}, tmp_path / "aside", "run").away == 3 * 3 + 0 + 1 + 5
    assert Services((), {}, {}, tmp_path, "run").away == 0


@pytest.mark.slow
def test_a_dead_service_is_restarted_up_to_three_times(tmp_path):
    with running(tmp_path, search=LITTLE) as (run, urls, notes):
        run.settle(tmp_path)
        (_member,) = run.members
        for number in (1, 2, 3):
            until(lambda: state(tmp_path, "search") == "serving")
            os.kill(fetch(urls["search"]), signal.SIGKILL)
            notes.awaited(f"restarting it ({number} of 3)")
        # the third start comes after a pause of 5 s
        waited = post(f"{urls['search']}/get_reward", {"query": ["?"]}, seconds=5.0)
        assert waited == {"rewards": [1.0]}
        until(lambda: state(tmp_path, "search") == "serving")
        os.kill(fetch(urls["search"]), signal.SIGKILL)
        notes.awaited("was killed by SIGKILL, and is not restarted any more")
        assert state(tmp_path, "search") == "dead"
    (shown,) = served.lines(tmp_path)
    assert shown.startswith(
        f"search at {urls['search']}: dead, started 4 times: {LITTLE} (log: services/search.log)"
    )
    assert (tmp_path / "services" / "search.log").read_text().count("the little service begins") == 4


@pytest.mark.slow
def test_a_silent_idle_service_is_restarted(tmp_path):
    with running(tmp_path, search=LITTLE, search__wait=5) as (_, urls, notes):
        first = fetch(urls["search"])
        os.kill(first, signal.SIGSTOP)
        notes.awaited("was silent and idle for 5 s")
        until(lambda: _answers(urls["search"]))
        assert fetch(urls["search"]) != first


def _answers(url):
    try:
        return fetch(url)
    except OSError:
        return False


def test_processes_started_by_a_service_end_with_it(tmp_path):
    with running(tmp_path, search=f"{LITTLE} --child --stubborn") as (run, _, _):
        assert len(process_tag.marked(run.name)) == 2
        run.members[0].process.child.signal_group()  # running() checks that nothing is left


def test_a_service_stays_for_its_delay_after_a_good_end(tmp_path):
    with running(tmp_path, long=LITTLE, short=LITTLE, long__delay=0.8) as (run, urls, _):
        ended = threading.Thread(target=run.close, args=(True,))
        ended.start()
        until(lambda: not _answers(urls["short"]))
        assert _answers(urls["long"])
        ended.join()
        assert not _answers(urls["long"])


def test_a_second_process_of_a_run_keeps_earlier_service_output(tmp_path):
    for _ in range(2):
        with running(tmp_path, search=LITTLE) as (run, _, _):
            run.settle(tmp_path)
    assert sorted(path.name for path in (tmp_path / "services").iterdir()) == ["search.2.log", "search.log"]
