"""A model searches a corpus while it thinks."""

import json

import pytest
from servers import serving

from rlflow.rewards.environments.environment_pool import EnvironmentPool
from rlflow.rewards.environments.environment_spec import parse_environment
from rlflow.rewards.environments.shipped.search import Corpus, Search


@pytest.fixture
def corpus(tmp_path):
    rows = [
        {"title": "Ada", "text": "Ada was born in Lund."},
        {"text": "Lund lies in Sweden."},
        {"text": "Rain falls in Bergen."},
    ]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "corpus.jsonl"


def test_the_best_passages_come_first(corpus):
    passages = Corpus(corpus)
    assert passages.best("where was Ada born", 1) == ["Ada: Ada was born in Lund."]
    assert passages.best("Lund Sweden", 3)[0] == "Lund lies in Sweden."
    assert passages.best("zebra", 3) == []
    assert passages.best("", 3) == []
    assert len(passages.best("Lund rain Ada", 9)) == 3


def test_a_search_is_answered_and_an_answer_ends(corpus):
    episode = Search(corpus=corpus, topk=1)
    turn = episode.step("I look. <search>Ada</search>")
    assert turn.says == " <information>Ada: Ada was born in Lund.</information> "
    assert not turn.done
    assert episode.step("<search>zebra</search>").says == " <information>nothing was found</information> "
    last = episode.step("<search>x</search><answer>Lund</answer>")
    assert (last.done, last.says, dict(last.log)) == (True, "", {"searches": 2})
    assert Search(corpus=corpus).step("I do not know.").done


def test_the_environment_needs_no_file_and_its_corpus_is_a_path(corpus, monkeypatch):
    monkeypatch.chdir(corpus.parent)
    spec = parse_environment("search", {"corpus": "corpus.jsonl", "topk": "2", "parallel": "1"})
    assert (spec.name, spec.settings["corpus"]) == ("search", str(corpus))
    assert not spec.source.scores  # the run's rewards score the answer
    pool = EnvironmentPool(spec)
    try:
        episodes, _ = pool.open([{}], [0])
        (answer,) = pool.step(episodes, ["<search>rain</search>"])
        assert "Bergen" in answer["says"]
    finally:
        pool.close()


def test_a_busy_retriever_is_retried():
    found = {"result": [[{"document": {"text": "Rain falls in Bergen."}, "score": 1.0}]]}

    def busy_once(handler, question):
        return handler.say(b"", 503) if len(handler.server.questions) == 1 else handler.say(found)

    with serving(busy_once) as server:
        assert "Bergen" in Search(retriever=server.url).step("<search>rain</search>").says
    assert [question for _, question in server.questions] == [
        {"queries": ["rain"], "topk": 3, "return_scores": True}
    ] * 2
