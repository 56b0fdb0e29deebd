"""`rlflow serve retrieve CORPUS`: passages that fit queries, as verl's and SkyRL-gym's clients of search ask for them.

``POST /retrieve`` with ``{"queries": […]}``, or ``{"query": "…"}`` for one, and if wanted ``topk`` and ``return_scores``, gives
``{"result": [[…], …]}``, a list of documents for each query, the best one first: ``{"id": …, "contents": "…", "text": "…"}``, in whose
``contents`` a title has a line of its own; with ``return_scores`` within ``{"document": …, "score": …}``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Protocol

from annotated_types import Ge, Le, MaxLen
from pydantic import BaseModel, model_validator

from rlflow.rewards.environments.shipped.passages import Passages
from rlflow.services.serving.server import application

MOST = 1000  # queries of a request, and documents of a query
LONGEST = 1 << 18  # characters of all queries of a request: to cut more into words takes seconds, in which others wait


class Index(Protocol):
    """Ranks passages."""

    def ranked(self, query: str, count: int) -> list[tuple[int, float]]:
        """(number of a passage, score) of those that fit a query best, the best one first."""


class Query(BaseModel):
    """A request."""

    queries: Annotated[list[str], MaxLen(MOST)] = []
    query: str | None = None
    topk: Annotated[int, Ge(1), Le(MOST)] | None = None
    return_scores: bool = False

    @model_validator(mode="after")
    def _bounded(self) -> Query:
        if (length := sum(map(len, self.all))) > LONGEST:
            raise ValueError(f"found queries of {length} characters, expected at most {LONGEST}")
        return self

    @property
    def all(self) -> list[str]:
        """All queries of the request."""
        return [*self.queries, *([self.query] if self.query is not None else [])]


def retriever(corpus: Path, encoder: Path | None, topk: int) -> Any:
    """The application that searches a corpus: by BM25, or by the vectors of a local ``encoder``. ``topk``: passages of a query that names
    no number. Raises PlanError."""
    passages = Passages.of(corpus)
    index = _index(passages, encoder)
    app = application("retrieve", lambda: {"passages": len(passages.texts), "index": "bm25" if encoder is None else "vectors"})

    def retrieve(asked: Query) -> dict[str, Any]:
        return {"result": [_documents(passages, index.ranked(query, asked.topk or topk), asked.return_scores) for query in asked.all]}

    app.add_api_route("/retrieve", retrieve, methods=["POST"])
    return app


def _index(passages: Passages, encoder: Path | None) -> Index:
    if encoder is not None:
        from rlflow.services.serving.vectors import Vectors

        return Vectors(passages.texts, encoder)
    from rlflow.rewards.environments.shipped.passages import BM25

    return BM25(passages.texts)


def _documents(passages: Passages, ranked: list[tuple[int, float]], scores: bool) -> list[dict[str, Any]]:
    documents = [({"id": passages.ids[number], "contents": passages.contents[number], "text": passages.texts[number]}, score)
                 for number, score in ranked]  # fmt: skip
    return [{"document": document, "score": score} if scores else document for document, score in documents]
