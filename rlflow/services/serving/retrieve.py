"""`rlflow serve retrieve CORPUS` searches passages. It accepts requests in the format of verl and SkyRL-gym.

``POST /retrieve`` takes ``{"queries": […]}``, or ``{"query": "…"}`` for a single query, and optionally
``topk`` and ``return_scores``. It returns ``{"result": [[…], …]}``: a list of documents for each query, best
first. A document is ``{"id": …, "contents": "…", "text": "…"}``, where the first line of ``contents`` is the
title. With ``return_scores``, it becomes ``{"document": …, "score": …}``.

Passages are ranked by BM25 or, with faiss, by the embeddings of a local encoder.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
from annotated_types import Ge, Le, MaxLen
from pydantic import BaseModel, model_validator

from rlflow.extras import require
from rlflow.rewards.environments.shipped.passages import Passages
from rlflow.services.serving.server import application
from rlflow.training import pretrained

BATCH = 32  # number of texts that are encoded together
READ_TOKENS = 256  # tokens after which a text is truncated


class Vectors:
    """An index that ranks texts by embeddings.

    A text's embedding is the mean of the model's last hidden states over all tokens, scaled to length 1.
    Texts are scored by the inner product of their embedding with the query's.
    """

    def __init__(self, texts: Sequence[str], folder: Path) -> None:
        """Encode ``texts`` with a Hugging Face model and its tokenizer, from ``folder``.

        Raises PlanError if the model can't be used.
        """
        self._faiss = require("faiss", "vectors")
        from transformers import AutoModel

        self._tokenizer = pretrained.read_tokenizer(folder)
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._model = pretrained.read_model(AutoModel, folder).eval()
        self._turn = (
            threading.Lock()
        )  # encode one query at a time, since the threads of requests share the cores
        vectors = torch.cat(
            [self._encoded(texts[start : start + BATCH]) for start in range(0, len(texts), BATCH)]
        )
        self._index: Any = self._faiss.IndexFlatIP(vectors.shape[1])
        self._index.add(vectors.numpy())
        self._count = len(texts)

    def ranked(self, query: str, count: int) -> list[tuple[int, float]]:
        """Return the ``count`` best passages, best first, as (index of the passage, score)."""
        with self._turn:
            scores, places = self._index.search(self._encoded([query]).numpy(), min(count, self._count))
        return [(int(place), float(score)) for place, score in zip(places[0], scores[0], strict=True)]

    @torch.inference_mode()
    def _encoded(self, texts: Sequence[str]) -> torch.Tensor:
        """Return the texts' embeddings, float32 [texts, width]. Each row has length 1."""
        tokens = self._tokenizer(
            list(texts), padding=True, truncation=True, max_length=READ_TOKENS, return_tensors="pt"
        )
        mask = tokens["attention_mask"].unsqueeze(-1)
        hidden = self._model(
            input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
        ).last_hidden_state.float()
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1).clamp(min=1), dim=-1)


MOST = 1000  # most queries in a request, and most documents for a query
# maximum number of characters in all queries in a request: splitting longer ones into words would delay other
# requests by seconds
LONGEST = 1 << 18


class Index(Protocol):
    """An index that ranks passages for a query."""

    def ranked(self, query: str, count: int) -> list[tuple[int, float]]:
        """Return the ``count`` best passages, best first, as (index of the passage, score)."""


class Query(BaseModel):
    """A request to /retrieve."""

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
        """All queries in the request."""
        return [*self.queries, *([self.query] if self.query is not None else [])]


def retriever(corpus: Path, encoder: Path | None, topk: int) -> Any:
    """Return the web application that searches a corpus.

    ``encoder``: the folder of a local model whose embeddings rank the passages, or None for BM25. ``topk``:
    how many passages to return per query if the request doesn't say. Raises PlanError if the corpus or the
    encoder can't be used.
    """
    passages = Passages.of(corpus)
    index = _index(passages, encoder)
    app = application(
        "retrieve",
        lambda: {"passages": len(passages.texts), "index": "bm25" if encoder is None else "vectors"},
    )

    def retrieve(request: Query) -> dict[str, Any]:
        return {
            "result": [
                _documents(passages, index.ranked(query, request.topk or topk), request.return_scores)
                for query in request.all
            ]
        }

    app.add_api_route("/retrieve", retrieve, methods=["POST"])
    return app


def _index(passages: Passages, encoder: Path | None) -> Index:
    if encoder is not None:
        return Vectors(passages.texts, encoder)
    from rlflow.rewards.environments.shipped.passages import BM25

    return BM25(passages.texts)


def _documents(passages: Passages, ranked: list[tuple[int, float]], scores: bool) -> list[dict[str, Any]]:
    documents = [
        (
            {
                "id": passages.ids[number],
                "contents": passages.contents[number],
                "text": passages.texts[number],
            },
            score,
        )
        for number, score in ranked
    ]
    return [{"document": document, "score": score} if scores else document for document, score in documents]
