"""A reward server on loopback: its answers count, and a failed row is missing with its cause, never 0."""

import math
import socket
import threading

import pytest
import torch
from servers import serving

import rlflow
from rlflow import PlanError
from rlflow.data import open_data
from rlflow.rewards import RewardPool, RewardSpec, bind, parse_reward, score_all
from rlflow.rewards.remote import ANSWER, BATCH, IN_FLIGHT
from rlflow.rewards.reward_spec import wanted


def reward_of(url, *completions, timeout=20.0):
    with RewardPool() as pool:
        (reward,) = bind([parse_reward(url)], pool, timeout=timeout)
        count = len(completions)
        return reward.score(
            rlflow.Batch.of(prompt=["p: "] * count, completion=list(completions), answer=["1"] * count)
        )


@pytest.mark.parametrize(
    ("written", "spec"),
    [
        ("http://judge:8000/get_reward", ("get_reward", 1.0, "http://judge:8000/get_reward")),
        ("https://judge/get_reward:0.5", ("get_reward", 0.5, "https://judge/get_reward")),
        ("http://judge:8000", ("judge", 1.0, "http://judge:8000")),
        ("http://[::1]:8000/r.py:2", ("r.py", 2.0, "http://[::1]:8000/r.py")),
    ],
)
def test_a_server_is_named_by_its_url_with_a_port_and_a_weight(written, spec):
    name, weight, url = spec
    assert parse_reward(written) == RewardSpec("remote", name, weight, path=url)


@pytest.mark.parametrize(
    "written",
    ["http://", "http:///get_reward", "http://judge:port/x", "http://me:secret@judge/x", "http://judge:0/x"],
)
def test_an_invalid_url_is_refused_without_its_password(written):
    with pytest.raises(PlanError, match="URL is invalid") as error:
        parse_reward(written)
    assert "secret" not in str(error.value)


def test_rows_go_in_batches_and_come_back_in_order():
    rows = ["x" * (i % 7) for i in range(2 * BATCH + 5)]
    with serving() as server:
        scores = reward_of(server.url, *rows)
    assert scores.values.tolist() == [len(row) for row in rows]
    assert sorted(len(question["query"]) for _, question in server.questions) == [5, BATCH, BATCH]
    assert {path for path, _ in server.questions} == {"/get_reward"}
    assert all(question.keys() == {"query", "prompts", "labels"} for _, question in server.questions)
    assert sorted(query for _, question in server.questions for query in question["query"]) == sorted(
        f"p: {row}" for row in rows
    )
    assert {label for _, question in server.questions for label in question["labels"]} == {"1"}


def test_the_number_of_concurrent_batches_is_limited():
    gate = threading.Barrier(IN_FLIGHT)

    def meet(handler, question):
        gate.wait(20)

    with serving(meet) as server:
        assert not reward_of(server.url, *["x"] * (2 * IN_FLIGHT * BATCH)).missing
    assert server.most == IN_FLIGHT


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        ({"rewards": [1.0, math.nan, math.inf, 2.0]}, {"nan": 2}),
        ({"rewards": [1.0, "1", [1.0], 2.0]}, {"type": 2}),
        ({"rewards": [1.0, None, None, 2.0]}, {"none": 2}),
        ({"rewards": [1.0, 2.0]}, {"count": 4}),
        ({"rewards": []}, {"count": 4}),
        ({"rewards": 1.0}, {"reply": 4}),
        ({"reward": [1.0] * 4}, {"reply": 4}),
        ([1.0] * 4, {"reply": 4}),
        (b"<html>", {"reply": 4}),
        (b"\xff", {"reply": 4}),
        (b"[" * 100_000, {"reply": 4}),
        (b"", {"reply": 4}),
    ],
)
def test_an_answer_without_a_number_is_missing_with_its_cause(answer, cause):
    with serving(lambda handler, question: handler.say(answer)) as server:
        scores = reward_of(server.url, "a", "b", "c", "d")
    assert scores.missing == cause
    assert int(torch.isnan(scores.values).sum()) == sum(cause.values())
    assert scores.first.keys() == cause.keys()
    assert all(
        message.startswith(f"{server.url}: ") and "function" not in message
        for message in scores.first.values()
    )
    assert len(server.questions) == 1  # the server got no second request


def test_an_answer_beyond_the_limit_is_missing():
    longest = b'{"rewards": [1.0], "extra": ""}'.replace(b'""', b'"%s"' % (b"x" * (ANSWER - 31)))
    assert len(longest) == ANSWER
    with serving(lambda handler, question: handler.say(longest)) as server:
        assert reward_of(server.url, "a").values.tolist() == [1]
    with serving(lambda handler, question: handler.say(longest + b" ")) as server:
        scores = reward_of(server.url, "a")
    assert scores.missing == {"reply": 1}
    assert scores.first["reply"] == (
        f"{server.url}: the answer has more than 4 MiB: the server must send a shorter one"
    )
    assert len(server.questions) == 1  # the server got no second request


@pytest.mark.parametrize(
    ("status", "often"), [(404, False), (302, False), (204, False), (500, True), (503, True), (429, True)]
)
def test_only_a_temporary_status_is_retried(status, often):
    with serving(lambda handler, question: handler.say({"rewards": [0.0]}, status)) as server:
        scores = reward_of(server.url, "a", timeout=0.3)
    assert scores.missing == {"status": 1}
    assert scores.first["status"].startswith(f"{server.url}: the server answered {status}")
    assert (len(server.questions) > 1) == often


def test_a_busy_server_is_retried_until_it_answers():
    def busy_once(handler, question):
        return handler.say(b"overloaded", 503) if len(handler.server.questions) == 1 else None

    with serving(busy_once) as server:
        scores = reward_of(server.url, "a", "abc")
    assert (scores.values.tolist(), scores.missing) == ([1, 3], {})


@pytest.mark.parametrize("trickles", [False, True])
def test_a_late_server_is_missing_at_the_deadline(trickles):
    def wait(handler, question):
        if trickles:
            handler.send_response(200)
            handler.end_headers()
        while not handler.server.released.wait(0.05):
            if trickles:
                handler.wfile.write(b" ")
        return True

    with serving(wait) as server:
        scores = reward_of(server.url, "a", "b", timeout=0.4)
    assert scores.missing == {"timeout": 2}
    assert len(server.questions) <= 1  # the server is not called again


def test_failed_connections_are_retried():
    def reset_twice(handler, question):
        return handler.reset() if len(handler.server.questions) <= 2 else None

    with serving(reset_twice) as server:
        assert reward_of(server.url, "ab").values.tolist() == [2]
    assert len(server.questions) == 3


def test_an_absent_server_is_missing_after_the_last_try():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    scores = reward_of(f"http://127.0.0.1:{port}/get_reward", "a", "b", timeout=0.3)
    assert scores.missing == {"connection": 2}
    assert "no connection: ConnectionRefusedError" in scores.first["connection"]
    assert "tries in" in scores.first["connection"]
    assert ".py" not in scores.first["connection"]


def test_closing_ends_running_requests():
    inside = threading.Event()

    def wait(handler, question):
        inside.set()
        return handler.server.released.wait(60)

    with serving(wait) as server, RewardPool() as pool:
        (reward,) = bind([parse_reward(server.url)], pool)
        failures = []

        def score():
            try:
                reward.score(rlflow.Batch.of(prompt=["p"], completion=["c"], answer=["1"]))
            except RuntimeError as error:
                failures.append(str(error))

        thread = threading.Thread(target=score)
        thread.start()
        assert inside.wait(20)
        pool.close()
        thread.join(20)
        assert failures == ["the remote reward is closed"]


def test_a_server_among_several_rewards_gets_labels_unchanged(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"input": "p", "label": {"right": [1]}}\n')
    with serving() as server, RewardPool() as pool:
        specs = [parse_reward(f"{server.url}:0.5"), parse_reward(server.url)]
        data = open_data(tmp_path / "d.jsonl", wanted=wanted(specs))
        batch = data.batch([0, 0])
        batch |= rlflow.author.batch.Batch(
            batch.axis, {"completion": rlflow.author.batch.Data(rlflow.text, ("ab", "abcd"))}
        )
        assert score_all(bind(specs, pool, data), batch, torch.float64).values.tolist() == [3, 6]
    assert server.questions[0][1]["labels"] == [{"right": [1]}] * 2
