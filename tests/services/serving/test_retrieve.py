"""Requests have the forms of verl's retrieval server and of SkyRL-gym's search tool."""

import json

import pytest
from served import asking
from sources import TASKS

from rlflow.errors import PlanError
from rlflow.rewards.environments.shipped.passages import Passages
from rlflow.rewards.environments.shipped.search import Search
from rlflow.services.serving.retrieve import retriever

RAIN = {"id": "1", "contents": "Rain falls in Bergen.", "text": "Rain falls in Bergen."}
LUND = {"id": "7", "contents": "Lund\nLund lies in Sweden.", "text": "Lund: Lund lies in Sweden."}
MODEL = TASKS / "arithmetic_model"
ROWS = [{"id": "7", "title": "Lund", "text": "Lund lies in Sweden."}, {"contents": "Rain falls in Bergen."}]


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path / "corpus.jsonl"


def test_both_clients_and_the_search_environment_are_answered(corpus):
    with asking(retriever(corpus, None, 2)) as client:
        status, answer = client.post(
            "/retrieve", {"queries": ["rain", "Lund in Sweden"], "topk": 1, "return_scores": True}
        )
        assert status == 200
        assert [[each["document"] for each in row] for row in answer["result"]] == [[RAIN], [LUND]]
        assert all(row[0]["score"] > 0 for row in answer["result"])
        assert client.post("/retrieve", {"query": "rain"}) == (200, {"result": [[RAIN]]})
        assert client.post("/retrieve", {"query": "zebra"}) == (200, {"result": [[]]})
        assert client.post("/retrieve", {"queries": ["rain"], "topk": 0})[0] == 422
        assert client.get("/health")[1]["passages"] == 2
        episode = Search(retriever=f"{client.url}/retrieve", topk=1)
        assert (
            episode.step("<search>Lund</search>").says
            == " <information>Lund: Lund lies in Sweden.</information> "
        )
        episode = Search(retriever=f"{client.url}/retrieve", topk=1)
        assert (
            episode.step("<search>rain</search>").says == " <information>Rain falls in Bergen.</information> "
        )


@pytest.mark.parametrize(
    "asked",
    [
        {"query": "rain", "topk": 10**30},
        {"query": "rain " * 60_000},
        {"queries": ["rain " * 1_000] * 60},
        {"queries": ["rain"] * 1001},
    ],
    ids=["topk", "query", "queries", "count"],
)
def test_a_request_that_would_delay_others_is_refused(corpus, asked):
    with asking(retriever(corpus, None, 2)) as client:
        assert client.post("/retrieve", asked)[0] == 422


def test_search_needs_one_source_of_passages(corpus):
    for settings in ({}, {"corpus": corpus, "retriever": "http://far/retrieve"}):
        with pytest.raises(ValueError, match="either --env.corpus FILE or --env.retriever URL"):
            Search(**settings)


@pytest.mark.slow
def test_an_encoder_ranks_by_its_vectors(corpus):
    pytest.importorskip("faiss")
    with asking(retriever(corpus, MODEL, 2)) as client:
        _, answer = client.post("/retrieve", {"query": "Rain falls in Bergen.", "return_scores": True})
    ((best, other),) = answer["result"]
    assert best["document"]["contents"] == "Rain falls in Bergen."
    assert best["score"] == pytest.approx(1.0, abs=1e-4)
    assert other["score"] < best["score"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]\n",
        '{"title": "no text"}\n',
        "[" * 100_000,
        '{"text": NaN}\n',
        '{"text": "\\ud800"}\n',
        '{"text": "a", "title": []}\n',
    ],
    ids=lambda text: text[:40],
)
def test_a_file_without_a_corpus_is_reported(tmp_path, text):
    (tmp_path / "corpus.jsonl").write_text(text)
    with pytest.raises(PlanError, match="corpus.jsonl' cannot be read"):
        Passages.of(tmp_path / "corpus.jsonl")


def test_only_json_line_ends_separate_lines(tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"text": "one\u2028line"}\n')
    assert Passages.of(tmp_path / "corpus.jsonl").texts == ["one\u2028line"]
