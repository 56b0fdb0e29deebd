"""Replicas as real servers behind a front."""

import threading

import fastapi
from served import asking

from rlflow.services.serving.front import application


def replica(name, held=None, entered=None):
    app = fastapi.FastAPI()

    @app.post("/who/{number}")
    def who(number: int, question: dict, kind: str = ""):
        if held is not None:
            entered.set()
            held.wait(20)
        return {"name": name, "number": number, "question": question, "kind": kind}

    return app


def test_replicas_take_turns_and_requests_come_as_they_were():
    with asking(replica("a")) as a, asking(replica("b")) as b, asking(application([a.url, b.url])) as front:
        answers = [front.post("/who/3?kind=x", {"q": [1]})[1] for _ in range(4)]
    assert [answer["name"] for answer in answers] == ["a", "b", "a", "b"]
    assert answers[0] == {"name": "a", "number": 3, "question": {"q": [1]}, "kind": "x"}


def test_a_replica_that_is_not_there_or_busy_costs_no_request():
    held, entered = threading.Event(), threading.Event()
    with asking(replica("busy", held, entered)) as busy, asking(replica("free")) as free, \
         asking(application([busy.url, "http://127.0.0.1:9", free.url])) as front:  # fmt: skip
        waiting = threading.Thread(target=front.post, args=("/who/1", {}))
        waiting.start()
        assert entered.wait(20)
        answers = [front.post("/who/2", {})[1]["name"] for _ in range(3)]
        held.set()
        waiting.join()
    assert answers == ["free"] * 3


def test_where_no_replica_answers_that_is_said():
    with asking(application(["http://127.0.0.1:9"])) as front:
        assert front.post("/who/1", {}) == (502, "no replica answers")
