import socket
import urllib.request
from pathlib import Path

import pytest
from keyed import figures

from rlflow.errors import PlanError
from rlflow.monitoring.reporter import RunInfo
from rlflow.monitoring.scraped import Scraped


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def test_the_last_numbers_of_a_run_are_served():
    port = free_port()
    reporter = Scraped(port)
    reporter.start(RunInfo(Path(), "grpo", 9))
    for number in range(2):
        numbers = {"reward/mean": number / 2, "iterations": 5.0, "a/b_c": 1.0, "a_b/c": 2.0}
        reporter.iteration(number, figures(numbers), [], {"actor.update": 0.25})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=240) as answer:
        text = answer.read().decode()
    reporter.close("done")
    for line in (
        "rlflow_iterations 9.0",
        "rlflow_iteration 2.0",
        "rlflow_reward_mean 0.5",
        "rlflow_node_seconds_actor_update 0.25",
        "rlflow_iterations_ 5.0",
        "rlflow_a_b_c 1.0",
        "rlflow_a_b_c_ 2.0",
    ):
        assert f"\n{line}\n" in text
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))


def test_a_taken_port_is_reported_before_the_run():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        with pytest.raises(PlanError, match="the run's metrics cannot be served on port"):
            Scraped(listening.getsockname()[1])
