"""Passages ranked by the vectors that a local encoder gives them, with faiss."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlflow.extras import require
from rlflow.training import pretrained

BATCH = 32  # texts that are encoded at a time
READ_TOKENS = 256  # tokens of a text that are read


class Vectors:
    """The mean of a model's last hidden states over a text's tokens, of length 1; the inner product of two is their score."""

    def __init__(self, texts: Sequence[str], folder: Path) -> None:
        """``folder``: a Hugging Face folder of a model with a tokenizer. Raises PlanError."""
        self._faiss = require("faiss", "vectors")
        from transformers import AutoModel

        self._tokenizer = pretrained.read_tokenizer(folder)
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._model = pretrained.read_model(AutoModel, folder).eval()
        self._turn = threading.Lock()  # one text at a time: threads of requests share the model's cores
        vectors = torch.cat([self._encoded(texts[start : start + BATCH]) for start in range(0, len(texts), BATCH)])
        self._index: Any = self._faiss.IndexFlatIP(vectors.shape[1])
        self._index.add(vectors.numpy())
        self._count = len(texts)

    def ranked(self, query: str, count: int) -> list[tuple[int, float]]:
        """(number of a passage, score) of those that fit a query best, the best one first."""
        with self._turn:
            scores, places = self._index.search(self._encoded([query]).numpy(), min(count, self._count))
        return [(int(place), float(score)) for place, score in zip(places[0], scores[0], strict=True)]

    @torch.inference_mode()
    def _encoded(self, texts: Sequence[str]) -> torch.Tensor:
        """float32 [texts, width], each of length 1."""
        tokens = self._tokenizer(list(texts), padding=True, truncation=True, max_length=READ_TOKENS, return_tensors="pt")
        mask = tokens["attention_mask"].unsqueeze(-1)
        hidden = self._model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).last_hidden_state.float()
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1).clamp(min=1), dim=-1)
