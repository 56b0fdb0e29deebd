"""Sampled rows as columns, the same as the local backend's."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from rlflow.backends.local.tokenizer import texts
from rlflow.backends.vllm.engine import Row
from rlflow.batch import Axis, Batch, Data
from rlflow.columns import Kind, Level, standard_kind
from rlflow.training.protocols import Sampling


def batch_of(axis: Axis, rows: Sequence[Row], sampling: Sampling, eos: Sequence[int], tokenizer: Any) -> Batch:
    """tokens, mask, completion, finish, sampled_logprobs, temperature, policy_version and group over ``axis``."""
    lengths = torch.tensor([len(row.tokens) for row in rows], dtype=torch.int64)
    tokens = torch.tensor(list(itertools.chain.from_iterable(row.tokens for row in rows)), dtype=torch.int64)
    token_level = {
        "tokens": tokens,
        "mask": torch.ones(len(tokens), dtype=torch.bool),
        "sampled_logprobs": torch.tensor(list(itertools.chain.from_iterable(row.logprobs for row in rows)), dtype=torch.float32),
        "policy_version": torch.tensor(list(itertools.chain.from_iterable(row.versions for row in rows)), dtype=torch.int64),
    }
    columns = {name: Data(Kind(Level.TOKEN, str(x.dtype).removeprefix("torch.")), x, lengths) for name, x in token_level.items()}
    spoken = [row.tokens[:-1] if row.tokens and row.tokens[-1] in eos else row.tokens for row in rows]
    columns |= {
        "completion": Data(Kind(Level.TEXT), tuple(texts(tokenizer, spoken))),
        "finish": Data(Kind(Level.TEXT), tuple("stop" if row.stopped else "length" for row in rows)),
        "temperature": Data(_kind("temperature"), torch.full((len(rows),), sampling.temperature or 1.0)),
        "group": Data(_kind("group"), axis.keys[:, 0].clone()),
    }
    return Batch(axis, columns)


def _kind(name: str) -> Kind:
    kind = standard_kind(name)
    assert kind is not None
    return kind
