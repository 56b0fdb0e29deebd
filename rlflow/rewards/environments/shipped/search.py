"""`--env search`: the model searches a corpus while it reasons, as in Search-R1 (Jin et al. 2025).

See arXiv:2503.09516. The environment answers ``<search>query</search>`` with
``<information>passages</information>``, and a turn with ``<answer>text</answer>`` ends the episode. The
corpus is a JSON Lines file with the field ``text`` and optionally ``title``, and its passages are ranked with
BM25. Instead of a file, the user can name a server that ranks passages, such as `rlflow serve retrieve`.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from rlflow.author.turn import Turn
from rlflow.processes.clients.http import post
from rlflow.rewards.environments.shipped.passages import BM25, Passages

ASKED = re.compile(r"<search>(.*?)</search>", re.DOTALL)
ANSWERED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Corpus:
    """The passages of a file, ranked by BM25."""

    def __init__(self, file: Path) -> None:
        self.passages = Passages.of(file).texts
        self.index = BM25(self.passages)

    def best(self, query: str, count: int) -> list[str]:
        """Return the ``count`` passages that best match a query, best first. Empty if it has no words."""
        return [self.passages[number] for number, _ in self.index.ranked(query, count)]


class Retriever:
    """A server that ranks passages, such as `rlflow serve retrieve`."""

    def __init__(self, url: str) -> None:
        self.url = url

    def best(self, query: str, count: int) -> list[str]:
        """Return the ``count`` passages that best match a query, best first.

        Raises ConnectionError or ValueError if the server fails.
        """
        (documents,) = post(self.url, {"queries": [query], "topk": count, "return_scores": True})["result"]
        return [
            str(document.get("text") or document["contents"])
            for document in (each["document"] for each in documents)
        ]


@functools.lru_cache(maxsize=4)
def corpus_of(file: Path) -> Corpus:
    """Return the corpus in a file. All episodes of a process share a single index of it."""
    return Corpus(file)


class Search:
    """Answers the model's searches.

    The run's rewards, such as `task`, score the text between the answer tags.
    """

    def __init__(
        self,
        *,
        corpus: Path | None = None,
        retriever: str = "",
        topk: int = 3,
        opens: str = " <information>",
        closes: str = "</information> ",
    ) -> None:
        """Open the corpus.

        corpus: the file of passages. retriever: URL of a server to use instead of a file, such as
        {search}/retrieve. topk: number of passages that a search returns. opens, closes: the strings before
        and after the passages.
        """
        if (corpus is None) == (not retriever):
            raise ValueError("search needs either --env.corpus FILE or --env.retriever URL")
        self.corpus: Corpus | Retriever = Retriever(retriever) if corpus is None else corpus_of(corpus)
        self.topk, self.opens, self.closes = topk, opens, closes
        self.searches = 0

    def step(self, text: str) -> Turn:
        """Run the last search of a turn, and return the passages it finds as the next message.

        If the turn has an answer, the episode ends instead.
        """
        if ANSWERED.search(text):
            return Turn(done=True, log={"searches": self.searches})
        queries = ASKED.findall(text)
        if not queries:
            return Turn(done=True, log={"searches": self.searches})
        self.searches += 1
        passages = self.corpus.best(queries[-1], self.topk)
        return Turn(says=f"{self.opens}{' '.join(passages) or 'nothing was found'}{self.closes}")
