"""`--env search`: the model searches a corpus between its thoughts, as Search-R1 (Jin et al. 2025, arXiv:2503.09516) has it.

``<search>query</search>`` is answered with ``<information>passages</information>``; ``<answer>text</answer>`` ends the episode. The corpus
is a JSON Lines file with the field ``text`` and, if wanted, ``title``; BM25 ranks it, in the process of the environment, by bm25s.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

from rlflow.author.turn import Turn
from rlflow.extras import require

ASKED = re.compile(r"<search>(.*?)</search>", re.DOTALL)
ANSWERED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Corpus:
    """Passages, ranked by BM25 (Robertson and Zaragoza 2009)."""

    def __init__(self, file: Path) -> None:
        self.bm25s: Any = require("bm25s", extra="search")
        self.passages = [_passage(json.loads(line)) for line in file.read_text("utf-8").splitlines() if line.strip()]
        self.index = self.bm25s.BM25()
        self.index.index(self.bm25s.tokenize(self.passages, show_progress=False), show_progress=False)

    def best(self, query: str, count: int) -> list[str]:
        """The passages that fit a query best, the best one first; none for a query without words."""
        tokens = self.bm25s.tokenize(query, show_progress=False, return_ids=False)
        if not tokens or not tokens[0]:
            return []
        places, scores = self.index.retrieve(tokens, k=min(count, len(self.passages)), show_progress=False)
        return [self.passages[place] for place, score in zip(places[0].tolist(), scores[0].tolist(), strict=True) if score > 0]


def _passage(record: dict[str, Any]) -> str:
    title = str(record.get("title") or "")
    return f"{title}: {record['text']}" if title else str(record["text"])


@functools.lru_cache(maxsize=4)
def corpus_of(file: Path) -> Corpus:
    """The corpus in a file, indexed once for all episodes of a process."""
    return Corpus(file)


class Search:
    """Answers searches. The answer is judged by the run's rewards, such as `task`, which read what stands between the tags."""

    def __init__(self, *, corpus: Path, topk: int = 3, opens: str = " <information>", closes: str = "</information> ") -> None:
        """corpus: the file of passages. topk: passages that a search gives. opens, closes: what stands around them."""
        self.corpus, self.topk, self.opens, self.closes = corpus_of(corpus), topk, opens, closes
        self.searches = 0

    def step(self, text: str) -> Turn:
        """Carry out the last search of a turn, or end with its answer."""
        if ANSWERED.search(text):
            return Turn(done=True, log={"searches": self.searches})
        queries = ASKED.findall(text)
        if not queries:
            return Turn(done=True, log={"searches": self.searches})
        self.searches += 1
        passages = self.corpus.best(queries[-1], self.topk)
        return Turn(says=f"{self.opens}{' '.join(passages) or 'nothing was found'}{self.closes}")
